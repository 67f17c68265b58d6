// Takes more than the quota of a tenant, in one way a run. The first process of the container
// starts the others and uses no GPU itself. It prints one JSON object: when the memory was taken,
// when its holder was ended, and by which signal.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
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

static void tell(int ready) {
    if (write(ready, "", 1) != 1) _exit(2);
}

// Forks a child that runs `body` and stays. It writes to `ready` once `body` has returned.
static pid_t start(void (*body)(size_t), size_t mib, int *ready) {
    int pair[2];
    if (pipe(pair)) exit(2);
    pid_t pid = fork();
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(mib);
        tell(pair[1]);
        for (;;) pause();
    }
    close(pair[1]);
    *ready = pair[0];
    return pid;
}

// Forks a child that runs `body` and stays, and returns once `body` has returned.
static pid_t child(void (*body)(size_t), size_t mib) {
    int ready;
    pid_t pid = start(body, mib, &ready);
    await(ready);
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

static void send_descriptor(int socket, int descriptor) {
    char control[CMSG_SPACE(sizeof descriptor)] = {0};
    struct iovec part = {"", 1};
    struct msghdr message = {0, 0, &part, 1, control, sizeof control, 0};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    if (sendmsg(socket, &message, 0) != 1) _exit(2);
}

static int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {0, 0, &part, 1, control, sizeof control, 0};
    int descriptor = -1;
    if (recvmsg(socket, &message, 0) != 1) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header) memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

// Passes exported memory to a process without a session, erases the export's count and kills the
// exporter. Prints whether another process of the container gets as much meanwhile, and after the
// holder's exit.
static void parked(size_t mib) {
    int pair[2], ready[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(ready)) exit(2);
    pid_t exporter = fork();
    if (!exporter) {
        send_descriptor(pair[0], take_and_export(mib));
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

static const char *driver_file = DRIVER;

// Allocates through the driver's own file in a context, so that the driver lists the process.
static void take_past_shim(size_t mib) {
    CUcontext context;
    CUdeviceptr pointer;
    void *driver = dlopen(driver_file, RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(3);
    }
    CUresult (*init)(unsigned) = dlsym(driver, "cuInit");
    CUresult (*retain)(CUcontext *, CUdevice) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    CUresult (*set)(CUcontext) = dlsym(driver, "cuCtxSetCurrent");
    CUresult (*allocate)(CUdeviceptr *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    CHECK(init(0));
    CHECK(retain(&context, 0));
    CHECK(set(context));
    CHECK(allocate(&pointer, mib * MIB));
}

static int go[2];

static void take_once_told(size_t mib) {
    await(go[0]);
    take_past_shim(mib);
}

// Starts the taker, hides the first process's mount table by `hide`, and lets the taker go on.
static void hidden(size_t mib, void (*hide)(void)) {
    int ready;
    pid_t holder = start(take_once_told, mib, &ready);
    hide();
    tell(go[1]);
    await(ready);
    judge(holder, now(), 30);
}

static void change_root(void) {
    mkdir("/tmp/empty", 0700);
    if (chroot("/tmp/empty")) exit(2);
}

static void await_main_thread(void) {
    usleep(500000);
}

static void *in_thread(void *mib) {
    hidden((size_t)mib, await_main_thread);
    exit(0);
}

// The process that holds the memory of one that has ended.
static volatile pid_t *heir;

// Takes memory, forks a child that only keeps the driver's files, and ends.
static void take_and_fork(size_t mib) {
    take_past_shim(mib);
    pid_t forked = fork();
    if (!forked) {
        prctl(PR_SET_PDEATHSIG, 0);
        for (;;) pause();
    }
    *heir = forked;
}

static void forked(size_t mib) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    heir = mmap(0, sizeof *heir, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t taker = child(take_and_fork, mib);
    kill(taker, SIGKILL);
    waitpid(taker, 0, 0);
    judge(*heir, now(), 30);
}

static int pair_of_importer[2];

// Creates memory past the shim and without a context, passes it on and ends.
static void create_for_importer(size_t mib) {
    CUmemAllocationProp prop = exportable();
    CUmemGenericAllocationHandle handle;
    int descriptor;
    void *driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    CUresult (*init)(unsigned) = dlsym(driver, "cuInit");
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long) =
        dlsym(driver, "cuMemCreate");
    CUresult (*export_)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) =
        dlsym(driver, "cuMemExportToShareableHandle");
    CHECK(init(0));
    CHECK(create(&handle, mib * MIB, &prop, 0));
    CHECK(export_(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_descriptor(pair_of_importer[0], descriptor);
}

// Uses memory that another process has created, in a process with a session, and keeps it open.
static void import_and_use(size_t mib) {
    CUmemGenericAllocationHandle handle;
    CUcontext context;
    CUdeviceptr address;
    CUmemAccessDesc access = {exportable().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    intptr_t descriptor = receive_descriptor(pair_of_importer[1]);
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    CHECK(cuMemAddressReserve(&address, mib * MIB, 0, 0, 0));
    CHECK(cuMemMap(address, mib * MIB, 0, handle, 0));
    CHECK(cuMemSetAccess(address, mib * MIB, &access, 1));
    CHECK(cuMemsetD8(address, 1, mib * MIB));
    CHECK(cuCtxSynchronize());
}

static void imported(size_t mib) {
    int ready;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair_of_importer)) exit(2);
    pid_t importer = start(import_and_use, mib, &ready), creator = child(create_for_importer, mib);
    kill(creator, SIGKILL);
    waitpid(creator, 0, 0);
    await(ready);
    judge(importer, now(), 30);
}

// The sidecar without GPU memory makes device nodes that it may not open, gets them open from its
// neighbour (passed.c), and takes memory by a copy of the driver.
static void sidecar(size_t mib) {
    FILE *nodes;
    char path[64];
    unsigned major, minor;
    while (access("/shared/ready", F_OK)) usleep(10000);
    if (!(nodes = fopen("/shared/nodes", "r"))) exit(2);
    while (fscanf(nodes, "%63s %u %u", path, &major, &minor) == 3) mknod(path, S_IFCHR | 0666, makedev(major, minor));
    driver_file = "/shared/cuda.so.1";
    pid_t holder = child(take_past_shim, mib);
    judge(holder, now(), 30);
    fclose(fopen("/shared/done", "w"));
}

// Passes open device nodes to the sidecar until it is done.
static void pass_nodes(size_t unused) {
    (void)unused;
    struct sockaddr_un at = {AF_UNIX, "/shared/socket"};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (system("cp /opt/bursar/drv/cuda.so.1 /shared/ && ln -s cuda.so.1 /shared/libcuda.so.1; for node in /dev/nvidia*; do test -c $node && "
               "echo $node $(stat -c '0x%t 0x%T' $node | while read a b; do echo $((a)) $((b)); done); done > /shared/nodes; true"))
        exit(2);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 64)) exit(2);
    fclose(fopen("/shared/ready", "w"));
    while (access("/shared/done", F_OK)) {
        char path[128] = {0};
        struct timeval second = {1, 0};
        setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
        int client = accept(listener, 0, 0);
        if (client < 0) continue;
        if (read(client, path, sizeof path - 1) > 0) {
            int node = open(path, O_RDWR);
            if (node >= 0) send_descriptor(client, node);
            close(node);
        }
        close(client);
    }
}

// Allocates and frees within the quota in two processes with sessions, one of which has a child that
// only waits, as a data loader does. Each second it prints what it was refused.
static void neighbour(size_t mib) {
    CUcontext context;
    CUdeviceptr kept, pointer;
    pid_t other = fork();
    if (!other) prctl(PR_SET_PDEATHSIG, SIGKILL);
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc(&kept, mib * MIB));
    if (!other && !fork()) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    int rounds = 0, refused = 0;
    for (;; rounds++) {
        if (cuMemAlloc(&pointer, 64 * MIB) || cuMemsetD8(pointer, 1, 64 * MIB) || cuMemFree(pointer)) refused++;
        usleep(10000);
        if (other && rounds % 100 == 0) {
            // The other process runs on unless somebody ends it.
            refused += waitpid(other, 0, WNOHANG) != 0;
            printf("{\"rounds\":%d,\"refused\":%d}\n", rounds, refused);
            fflush(stdout);
        }
    }
}

int main(int count, char **words) {
    if (count != 3) return 2;
    size_t mib = strtoul(words[2], 0, 10);
    if (pipe(go)) return 2;
    if (!strcmp(words[1], "chroot")) {
        hidden(mib, change_root);
        return 0;
    }
    if (!strcmp(words[1], "ended-main-thread")) {
        pthread_t thread;
        pthread_create(&thread, 0, in_thread, (void *)mib);
        syscall(SYS_exit, 0);
    }
    struct {
        const char *name;
        void (*run)(size_t);
    } whole[] = {{"forked", forked}, {"imported", imported}, {"sidecar", sidecar}, {"pass-nodes", pass_nodes}, {"neighbour", neighbour}};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        if (strcmp(words[1], whole[i].name)) continue;
        whole[i].run(mib);
        return 0;
    }
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
