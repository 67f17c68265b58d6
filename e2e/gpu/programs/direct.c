// Links with libcuda.so.1, and runs one command: allocates in one way until the driver refuses, or
// makes one call that costs memory without a request. Prints one JSON object. Exits with 0 unless a
// call fails that should succeed.
#include <cuda.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define CHECK(call)                                                       \
    do {                                                                  \
        CUresult result_ = (call);                                        \
        if (result_ != CUDA_SUCCESS) {                                    \
            printf("{\"failed\":\"%s\",\"code\":%d}\n", #call, result_);  \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

static CUdevice device;
static CUcontext context;

static void begin(void) {
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
}

static size_t total(void) {
    size_t free_bytes, total_bytes;
    CHECK(cuMemGetInfo(&free_bytes, &total_bytes));
    return total_bytes;
}

static size_t free_now(void) {
    size_t free_bytes, total_bytes;
    CHECK(cuMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

static CUmemAllocationProp on_device(void) {
    CUmemAllocationProp prop = {0};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

// Allocates `size` bytes in the way `how`. The handle is not needed again, because the process
// ends.
static CUresult take(const char *how, size_t size) {
    CUdeviceptr pointer;
    if (!strcmp(how, "linear")) return cuMemAlloc(&pointer, size);
    if (!strcmp(how, "async")) {
        CUresult result = cuMemAllocAsync(&pointer, size, 0);
        return result ? result : cuStreamSynchronize(0);
    }
    if (!strcmp(how, "vmm")) {
        CUmemAllocationProp prop = on_device();
        CUmemGenericAllocationHandle handle;
        return cuMemCreate(&handle, size, &prop, 0);
    }
    if (!strcmp(how, "array")) {
        CUDA_ARRAY_DESCRIPTOR descriptor = {4096, size / 4096 / 4, CU_AD_FORMAT_FLOAT, 1};
        CUarray array;
        return cuArrayCreate(&array, &descriptor);
    }
    if (!strcmp(how, "odd")) return cuMemAlloc(&pointer, MIB + 1);  // takes 2 MiB
    fprintf(stderr, "unknown way %s\n", how);
    exit(2);
}

static void greedy(const char *how) {
    begin();
    size_t step = !strcmp(how, "odd") ? 2 * MIB : 64 * MIB, got = 0;
    CUresult result;
    while ((result = take(how, step)) == CUDA_SUCCESS) got += step;
    CUcontext other;
    CUresult after = cuCtxGetCurrent(&other);
    printf("{\"sees_mib\":%zu,\"got_mib\":%zu,\"refused\":%d,\"ran_on\":%s}\n", total() >> 20, got >> 20, result,
           after == CUDA_SUCCESS ? "true" : "false");
    // The process holds its memory until its parent closes its input.
    fflush(stdout);
    while (getchar() != EOF) {}
}

// Prints the answer of a call that seems to need no memory, and the free memory before and after
// it.
static void limit(size_t bytes) {
    begin();
    size_t before = free_now();
    CUresult result = cuCtxSetLimit(CU_LIMIT_STACK_SIZE, bytes);
    printf("{\"sees_mib\":%zu,\"answer\":%d,\"took_mib\":%zd}\n", total() >> 20, result,
           (ssize_t)(before - free_now()) / (ssize_t)MIB);
}

static void locals(const char *cubin) {
    begin();
    CUmodule module;
    CUfunction function;
    CHECK(cuModuleLoad(&module, cubin));
    size_t before = free_now();
    CUresult got = cuModuleGetFunction(&function, module, "locals"), launched = got;
    if (got == CUDA_SUCCESS) {
        CUdeviceptr nothing = 0;
        void *arguments[] = {&nothing};
        launched = cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, arguments, 0);
        if (launched == CUDA_SUCCESS) launched = cuCtxSynchronize();
    }
    printf("{\"sees_mib\":%zu,\"get\":%d,\"launch\":%d,\"took_mib\":%zd}\n", total() >> 20, got, launched,
           (ssize_t)(before - free_now()) / (ssize_t)MIB);
}

// Launches a graph with a memory node of `mib` ten times.
static void graph(size_t mib) {
    begin();
    CUgraph graph;
    CUgraphNode allocates, frees;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {0};
    CUmemAllocationProp prop = on_device();
    params.poolProps.allocType = prop.type;
    params.poolProps.location = prop.location;
    params.bytesize = mib * MIB;
    CHECK(cuGraphCreate(&graph, 0));
    CHECK(cuGraphAddMemAllocNode(&allocates, graph, 0, 0, &params));
    CHECK(cuGraphAddMemFreeNode(&frees, graph, &allocates, 1, params.dptr));
    CUgraphExec exec;
    CUresult result = cuGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 10 && result == CUDA_SUCCESS; i++) {
        result = cuGraphLaunch(exec, 0);
        if (result == CUDA_SUCCESS) result = cuStreamSynchronize(0);
    }
    printf("{\"sees_mib\":%zu,\"answer\":%d,\"free_mib\":%zu}\n", total() >> 20, result, free_now() >> 20);
}

// Sleeps and wakes as an inference server does: the addresses stay, and the memory is freed and
// allocated again.
static void sleep_wake(int rounds, size_t mib) {
    begin();
    CUmemAllocationProp prop = on_device();
    CUdeviceptr address;
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(cuMemAddressReserve(&address, mib * MIB, 0, 0, 0));
    size_t asleep = 0, awake = 0;
    for (int i = 0; i < rounds; i++) {
        CUmemGenericAllocationHandle handle;
        CHECK(cuMemCreate(&handle, mib * MIB, &prop, 0));
        CHECK(cuMemMap(address, mib * MIB, 0, handle, 0));
        CHECK(cuMemSetAccess(address, mib * MIB, &access, 1));
        CHECK(cuMemsetD8(address, i & 255, mib * MIB));
        CHECK(cuCtxSynchronize());
        size_t now = free_now();
        if (i && now != awake) { printf("{\"failed\":\"awake, round %d\"}\n", i); exit(1); }
        awake = now;
        CHECK(cuMemUnmap(address, mib * MIB));
        CHECK(cuMemRelease(handle));
        now = free_now();
        if (i && now != asleep) { printf("{\"failed\":\"asleep, round %d\"}\n", i); exit(1); }
        asleep = now;
    }
    printf("{\"sees_mib\":%zu,\"rounds\":%d,\"awake_free_mib\":%zu,\"asleep_free_mib\":%zu}\n", total() >> 20, rounds,
           awake >> 20, asleep >> 20);
}

static int held_s = 3;

// Prints whether this process gets as much memory as `holder` holds of a process that was just
// killed, before and after `holder` is killed too.
static void print_given(size_t mib, pid_t holder) {
    sleep(held_s);
    begin();
    CUdeviceptr pointer;
    CUresult while_held = cuMemAlloc(&pointer, mib * MIB), after = while_held;
    kill(holder, SIGKILL);
    int waited = 0;
    for (; waited < 600; waited++) {
        after = cuMemAlloc(&pointer, mib * MIB);
        if (after == CUDA_SUCCESS) break;
        usleep(100000);
    }
    printf("{\"sees_mib\":%zu,\"while_held\":%d,\"after\":%d,\"waited_ms\":%d}\n", total() >> 20, while_held, after,
           waited * 100);
}

// Kills the parent of a forked child. The parent's memory stays in use until the child has exited,
// and no other process gets it before. A third process of the container tries.
static void orphan(size_t mib) {
    int ready[2];
    if (pipe(ready)) exit(2);
    pid_t parent = fork();
    if (!parent) {
        begin();
        CUdeviceptr pointer;
        CHECK(cuMemAlloc(&pointer, mib * MIB));
        pid_t child = fork();
        if (!child) {
            pause();
            _exit(0);
        }
        if (write(ready[1], &child, sizeof child) != sizeof child) exit(2);
        pause();
    }
    pid_t child;
    if (read(ready[0], &child, sizeof child) != sizeof child) exit(2);
    kill(parent, SIGKILL);
    waitpid(parent, 0, 0);
    print_given(mib, child);
}

// Sends bytes and, if it is not negative, a descriptor.
static void give(int socket, int descriptor, const void *bytes, size_t size) {
    char control[CMSG_SPACE(sizeof descriptor)] = {0};
    struct iovec part = {(void *)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof descriptor);
        memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    if (sendmsg(socket, &message, 0) != (ssize_t)size) exit(2);
}

// Receives bytes. A descriptor that came with them stays open.
static void get(int socket, void *bytes, size_t size) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (recvmsg(socket, &message, 0) != (ssize_t)size) exit(2);
}

// Exports memory and kills the exporter, while another process holds the memory by an unused
// descriptor (`parked`) or by a mapping. Prints whether others get as much meanwhile, and after the
// holder's exit.
static void exported(size_t mib, int parked) {
    int pair[2], ready[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(ready)) exit(2);
    pid_t holder = fork();
    if (!holder) {
        CUipcMemHandle shared;
        get(pair[1], &shared, sizeof shared);
        if (!parked) {
            CUdeviceptr pointer;
            begin();
            CHECK(cuIpcOpenMemHandle(&pointer, shared, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        }
        if (write(ready[1], "", 1) != 1) exit(2);
        pause();
    }
    pid_t exporter = fork();
    if (!exporter) {
        CUipcMemHandle shared = {0};
        int descriptor = -1;
        begin();
        if (parked) {
            CUmemAllocationProp prop = on_device();
            CUmemGenericAllocationHandle handle;
            prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            CHECK(cuMemCreate(&handle, mib * MIB, &prop, 0));
            CHECK(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        } else {
            CUdeviceptr pointer;
            CHECK(cuMemAlloc(&pointer, mib * MIB));
            CHECK(cuIpcGetMemHandle(&shared, pointer));
        }
        give(pair[0], descriptor, &shared, sizeof shared);
        pause();
    }
    char byte;
    if (read(ready[0], &byte, 1) != 1) exit(2);
    kill(exporter, SIGKILL);
    waitpid(exporter, 0, 0);
    print_given(mib, holder);
}

static size_t reserved(CUmemoryPool pool) {
    cuuint64_t bytes;
    CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
    return bytes;
}

// Allocates and frees at random in four streams, and checks each growth of a pool. A pool may grow
// by one step and, for each request, by twice its size and at least 2 MiB. A request above half a
// step counts as its size in whole steps instead.
static void pool_growth(int rounds) {
    enum { STREAMS = 4, HELD = 512 };
    const size_t step = 32 * MIB;
    static struct {
        CUdeviceptr pointer;
        int stream;
    } held[HELD];
    CUstream streams[STREAMS];
    CUmemoryPool pool;
    int over = 0, count = 0;
    double most = 0;
    begin();
    for (int i = 0; i < STREAMS; i++) CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuDeviceGetDefaultMemPool(&pool, device));
    srand(7);
    for (int round = 0; round < rounds; round++) {
        cuuint64_t keep = rand() % 2 ? ~0ull : 0;
        CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        size_t before = reserved(pool), bound = step, largest = (size_t)1 << (9 + rand() % 18);
        for (int call = rand() % 200; call > 0; call--) {
            int stream = rand() % STREAMS, what = rand() % 100;
            if (what < 2) CHECK(cuCtxSynchronize());
            else if (what < 5) CHECK(cuStreamSynchronize(streams[stream]));
            else if (count == HELD || (count > 0 && what < 50)) {
                int which = rand() % count;
                CHECK(cuMemFreeAsync(held[which].pointer, streams[held[which].stream]));
                held[which] = held[--count];
            } else {
                size_t size = 1 + ((size_t)rand() << 8 ^ rand()) % largest;
                CHECK(cuMemAllocAsync(&held[count].pointer, size, streams[stream]));
                held[count++].stream = stream;
                bound += size > step / 2 ? (size + step - 1) / step * step : size < MIB ? 2 * MIB : 2 * size;
                size_t grown = reserved(pool) > before ? reserved(pool) - before : 0;
                over += grown > bound;
                if ((double)grown / bound > most) most = (double)grown / bound;
            }
        }
    }
    printf("{\"rounds\":%d,\"over\":%d,\"most_of_bound\":%.2f}\n", rounds, over, most);
}

int main(int count, char **words) {
    const char *command = count > 1 ? words[1] : "", *argument = count > 2 ? words[2] : "";
    if (count > 3) held_s = atoi(words[3]);
    if (!strcmp(command, "greedy")) greedy(argument);
    else if (!strcmp(command, "stack")) limit(strtoul(argument, 0, 10));
    else if (!strcmp(command, "locals")) locals(argument);
    else if (!strcmp(command, "graph")) graph(strtoul(argument, 0, 10));
    else if (!strcmp(command, "sleep-wake")) sleep_wake(100, strtoul(argument, 0, 10));
    else if (!strcmp(command, "orphan")) orphan(strtoul(argument, 0, 10));
    else if (!strcmp(command, "pool-growth")) pool_growth(atoi(argument));
    else if (!strcmp(command, "parked") || !strcmp(command, "imported"))
        exported(strtoul(argument, 0, 10), !strcmp(command, "parked"));
    else return 2;
    return 0;
}
