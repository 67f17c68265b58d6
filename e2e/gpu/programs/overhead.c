// Measures calls through the real library and through the shim in one process: blocks of calls in
// turn, so that both meet the same machine. Prints one JSON object: the median nanoseconds of a
// native call, and the median of the neighbouring blocks' ratios with its interval. Or measures how long one library takes to
// start, which a process can do once.
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCKS 301
// The ranks below and above the median of so many values that hold it with 95 %.
#define RANKS 17
#define THREADS 8
#define THREAD_PAIRS 200

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

#define CHECK(call)                                        \
    do {                                                   \
        CUresult result_ = (call);                         \
        if (result_ != CUDA_SUCCESS) {                     \
            fprintf(stderr, "%s: %d\n", #call, result_);   \
            exit(1);                                       \
        }                                                  \
    } while (0)

static void *open_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return library;
}

static void *named(void *library, const char *name) {
    void *function = dlsym(library, name);
    if (!function) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(2);
    }
    return function;
}

// The measured calls of one library.
struct calls {
    __typeof__(&cuMemAlloc) alloc;
    __typeof__(&cuMemFree) free;
    __typeof__(&cuMemAllocAsync) alloc_async;
    __typeof__(&cuMemFreeAsync) free_async;
    __typeof__(&cuLaunchKernel) launch;
};

static struct calls calls_of(void *library) {
    return (struct calls){named(library, "cuMemAlloc_v2"), named(library, "cuMemFree_v2"), named(library, "cuMemAllocAsync"),
                          named(library, "cuMemFreeAsync"), named(library, "cuLaunchKernel")};
}

static CUcontext context;
static CUstream stream;
static CUfunction function;

static void async_pair(const struct calls *calls) {
    CUdeviceptr pointer;
    CHECK(calls->alloc_async(&pointer, 1 << 20, stream));
    CHECK(calls->free_async(pointer, stream));
}

static void linear_pair(const struct calls *calls) {
    CUdeviceptr pointer;
    CHECK(calls->alloc(&pointer, 2 << 20));
    CHECK(calls->free(pointer));
}

// A piece that shares the driver's chunk with one that stays.
static void small_pair(const struct calls *calls) {
    CUdeviceptr pointer;
    CHECK(calls->alloc(&pointer, 64 << 10));
    CHECK(calls->free(pointer));
}

static void *small_pairs(void *calls) {
    CHECK(cuCtxSetCurrent(context));
    for (int i = 0; i < THREAD_PAIRS; i++) small_pair(calls);
    return 0;
}

static void small_pairs_in_threads(const struct calls *calls) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], 0, small_pairs, (void *)calls)) exit(1);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
}

static void launch(const struct calls *calls) {
    CUdeviceptr null = 0;
    void *arguments[] = {&null};
    CHECK(calls->launch(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0));
}

static double block(void (*once)(const struct calls *), const struct calls *calls, int times) {
    double begun = now();
    for (int i = 0; i < times; i++) once(calls);
    return (now() - begun) / times;
}

static int ascending(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static double median(double *values) {
    qsort(values, BLOCKS, sizeof *values, ascending);
    return values[BLOCKS / 2];
}

static void compare(const char *name, void (*once)(const struct calls *), int times, const struct calls *real, const struct calls *shim) {
    static double native[BLOCKS], ratio[BLOCKS];
    block(once, real, times), block(once, shim, times);
    for (int i = 0; i < BLOCKS; i++) {
        // The order alternates, because the second block benefits from caches and the queue of the
        // first.
        double hooked = i % 2 ? block(once, shim, times) : 0;
        native[i] = block(once, real, times);
        if (i % 2 == 0) hooked = block(once, shim, times);
        ratio[i] = hooked / native[i];
        CHECK(cuStreamSynchronize(stream));
    }
    double middle = median(ratio), low = ratio[BLOCKS / 2 - RANKS], high = ratio[BLOCKS / 2 + RANKS];
    printf("\"%s\":{\"native\":%.1f,\"ratio\":%.4f,\"low\":%.4f,\"high\":%.4f},", name, median(native), middle, low, high);
}

static int start(const char *path) {
    void *library = open_library(path);
    __typeof__(&cuInit) init = named(library, "cuInit");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = named(library, "cuDevicePrimaryCtxRetain");
    double begun = now();
    CHECK(init(0));
    CHECK(retain(&context, 0));
    printf("%.0f\n", now() - begun);
    return 0;
}

// The program links with libcuda.so.1, so that unmeasured calls go through the preloaded shim.
int main(int count, char **words) {
    if (count == 3 && !strcmp(words[1], "start")) return start(words[2]);
    if (count != 5 || strcmp(words[1], "calls")) {
        fprintf(stderr, "usage: overhead start LIBRARY | overhead calls REAL SHIM CUBIN\n");
        return 2;
    }
    CUdeviceptr kept;
    CUmodule module;
    CUmemoryPool pool;
    cuuint64_t keep = ~0ull;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    CHECK(cuModuleLoad(&module, words[4]));
    CHECK(cuModuleGetFunction(&function, module, "nothing"));
    struct calls real = calls_of(open_library(words[2])), shim = calls_of(open_library(words[3]));
    printf("{");
    compare("async", async_pair, 1000, &real, &shim);
    compare("linear", linear_pair, 20, &real, &shim);
    compare("launch", launch, 200, &real, &shim);
    CHECK(cuMemAlloc(&kept, 64 << 10));
    compare("small", small_pair, 200, &real, &shim);
    compare("threads", small_pairs_in_threads, 1, &real, &shim);
    printf("\"blocks\":%d}\n", BLOCKS);
    return 0;
}
