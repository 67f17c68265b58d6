// Takes more than the quota of a tenant, in one way a run. The first process of the container
// starts the others and uses no GPU itself. It prints one JSON object: when the memory was taken,
// when its holder was ended, and by which signal.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define DRIVER "/opt/bursar/drv/cuda.so.1"
#define CHECK(call)                                                                    \
    do {                                                                               \
        CUresult result_ = (call);                                                     \
        if (result_ != CUDA_SUCCESS) {                                                 \
            fprintf(stderr, "%s: %d\n", #call, result_);                               \
            _exit(3);                                                                  \
        }                                                                              \
    } while (0)

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static CUmemAllocationProp exportable(void) {
    CUmemAllocationProp prop = {0};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
}

// Allocates through the driver's own file without a context, so that the driver lists no process.
static void take_without_context(size_t mib) {
    CUmemAllocationProp prop = exportable();
    CUmemGenericAllocationHandle handle;
    void *driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    CUresult (*init)(unsigned) = driver ? dlsym(driver, "cuInit") : 0;
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long) =
        driver ? dlsym(driver, "cuMemCreate") : 0;
    if (!init || !create) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(3);
    }
    CHECK(init(0));
    CHECK(create(&handle, mib * MIB, &prop, 0));
}

// Allocates without a context in a process that the agent knows, because the shim opens a session
// in cuInit.
static void take_with_session(size_t mib) {
    CHECK(cuInit(0));
    take_without_context(mib);
}

// Allocates through the shim and exports the memory as a descriptor.
static int take_and_export(size_t mib) {
    CUmemAllocationProp prop = exportable();
    CUmemGenericAllocationHandle handle;
    CUcontext context;
    int descriptor;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemCreate(&handle, mib * MIB, &prop, 0));
    CHECK(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return descriptor;
}

// Writes 0 into the page shared with the agent that counts the exports of this process.
static void unsay_exports(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], rights[5];
    uintptr_t from, to;
    int found = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s", &from, &to, rights) != 3 || strcmp(rights, "rw-s") || to - from != 4096) continue;
        if (memcmp((void *)from, "bursarCP", 8)) continue;
        for (uintptr_t slot = from + 64; slot < to; slot += 64) *(volatile uint32_t *)(slot + 20) = 0;
        found = 1;
    }
    if (!found) {
        fprintf(stderr, "no credit page\n");
        _exit(3);
    }
}

static void await(int ready) {
    char byte;
    if (read(ready, &byte, 1) != 1) {
        printf("{\"failed\":\"the attack could not be made\"}\n");
        exit(1);
    }
}

// Forks a child that runs `body` and stays, and returns once `body` has returned.
static pid_t child(void (*body)(size_t), size_t mib) {
    int ready[2];
    if (pipe(ready)) exit(2);
    pid_t pid = fork();
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(mib);
        if (write(ready[1], "", 1) != 1) _exit(2);
        for (;;) pause();
    }
    close(ready[1]);
    await(ready[0]);
    return pid;
}

static void export_and_stay(size_t mib) { take_and_export(mib); }

// Prints how the process ended, with the times, and waits for at most `bound` seconds.
static void judge(pid_t holder, double held_at, int bound) {
    int status = 0, signal = 0;
    double until = now() + bound;
    while (now() < until && !signal) {
        if (waitpid(holder, &status, WNOHANG) == holder) {
            signal = WIFSIGNALED(status) ? WTERMSIG(status) : -1;
            break;
        }
        usleep(10000);
    }
    printf("{\"held_at\":%.3f,\"ended_s\":%.2f,\"signal\":%d}\n", held_at, now() - held_at, signal);
}

// Passes exported memory to a process without a session, erases the export's count and kills the
// exporter. Prints whether another process of the container gets as much meanwhile, and after the
// holder's exit.
static void parked(size_t mib) {
    int pair[2], ready[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(ready)) exit(2);
    pid_t exporter = fork();
    if (!exporter) {
        int descriptor = take_and_export(mib);
        char control[CMSG_SPACE(sizeof descriptor)] = {0};
        struct iovec part = {"", 1};
        struct msghdr message = {0, 0, &part, 1, control, sizeof control, 0};
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof descriptor);
        memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
        if (sendmsg(pair[0], &message, 0) != 1) _exit(2);
        unsay_exports();
        if (write(ready[1], "", 1) != 1) _exit(2);
        for (;;) pause();
    }
    close(ready[1]);
    await(ready[0]);
    // The descriptor is in the socket's queue, and this process holds the socket.
    close(pair[0]);
    kill(exporter, SIGKILL);
    waitpid(exporter, 0, 0);
    sleep(3);
    CUcontext context;
    CUdeviceptr pointer;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CUresult while_held = cuMemAlloc(&pointer, mib * MIB), after = while_held;
    close(pair[1]);
    int waited = 0;
    for (; waited < 100 && after != CUDA_SUCCESS; waited++) {
        usleep(100000);
        after = cuMemAlloc(&pointer, mib * MIB);
    }
    printf("{\"while_held\":%d,\"after\":%d,\"waited_ms\":%d}\n", while_held, after, waited * 100);
}

int main(int count, char **words) {
    if (count != 3) return 2;
    size_t mib = strtoul(words[2], 0, 10);
    if (!strcmp(words[1], "parked")) {
        parked(mib);
        return 0;
    }
    void (*take)(size_t) = take_without_context;
    if (!strcmp(words[1], "exported-twice")) child(export_and_stay, mib);
    else if (!strcmp(words[1], "with-session")) take = take_with_session;
    else if (strcmp(words[1], "without-context")) return 2;
    pid_t holder = child(take, mib);
    judge(holder, now(), 30);
    return 0;
}
