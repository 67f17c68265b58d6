// usage: many threads|processes N PAIRS, many forks N, many nvml N
//
// Prints the nanoseconds of a call as JSON, while N threads or N processes with a context each
// allocate and free 2 MiB PAIRS times; of a fork of a process with a context until its child ended;
// of a question to NVML about the GPU's memory.
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                    \
    do {                                                                               \
        int result_ = (call);                                                          \
        if (result_) fprintf(stderr, "%s: %d\n", #call, result_), fflush(0), _exit(1); \
    } while (0)

static CUcontext context;
static long pairs;
// Shared with the children: they wait for each other, and add their times.
static struct {
    pthread_barrier_t ready;
    long long ns;
} *shared;

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ll + at.tv_nsec;
}

static void start(void) {
    CUdevice device;
    // A child that failed leaves the others at the barrier.
    alarm(110);
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
}

static void *allocate(void *unused) {
    CUdeviceptr memory;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc(&memory, 2 << 20));
    CHECK(cuMemFree(memory));
    pthread_barrier_wait(&shared->ready);
    long long begun = now();
    for (long left = pairs; left > 0; left--) {
        CHECK(cuMemAlloc(&memory, 2 << 20));
        CHECK(cuMemFree(memory));
    }
    __atomic_add_fetch(&shared->ns, now() - begun, __ATOMIC_RELAXED);
    return unused;
}

static void print(long long ns) { printf("{\"ns\": [%lld]}\n", ns); }

static int run_threads(long count) {
    pthread_t threads[count];
    start();
    for (long at = 0; at < count; at++) CHECK(pthread_create(threads + at, 0, allocate, 0));
    for (long at = 0; at < count; at++) pthread_join(threads[at], 0);
    print(shared->ns / count / pairs);
    return 0;
}

static int run_processes(long count) {
    int status, failed = 0;
    for (long at = 0; at < count; at++)
        if (!fork()) start(), allocate(0), _exit(0);
    for (long at = 0; at < count; at++) wait(&status), failed |= status;
    print(shared->ns / count / pairs);
    return failed != 0;
}

static int run_forks(long count) {
    start();
    long long begun = now();
    for (long left = count; left > 0; left--) {
        pid_t child = fork();
        if (!child) _exit(0);
        CHECK(waitpid(child, 0, 0) != child);
    }
    print((now() - begun) / count);
    return 0;
}

static int ask_nvml(long count) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    unsigned long long memory[3];
    if (!nvml) return fprintf(stderr, "%s\n", dlerror()), 1;
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, void *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    CHECK(init());
    CHECK(by_index(0, &device));
    long long begun = now();
    for (long left = count; left > 0; left--) CHECK(info(device, memory));
    print((now() - begun) / count);
    return 0;
}

int main(int count, char **words) {
    long number = count > 2 ? atol(words[2]) : 0;
    if (number < 1 || number > 1024) return fprintf(stderr, "usage: many threads|processes|forks|nvml N [PAIRS]\n"), 2;
    pairs = count > 3 ? atol(words[3]) : 1;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->ready, &across, number);
    if (!strcmp(words[1], "threads")) return run_threads(number);
    if (!strcmp(words[1], "processes")) return run_processes(number);
    if (!strcmp(words[1], "forks")) return run_forks(number);
    return ask_nvml(number);
}
