// What calls cost, through the library that is named: nanoseconds of each, as one JSON object.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static void *library;
static void *named(const char *name) {
    void *function = dlsym(library, name);
    if (!function) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(2);
    }
    return function;
}

#define USE(name, symbol) __typeof__(&name) call_##name = (__typeof__(&name))named(symbol)
#define CHECK(call)                                        \
    do {                                                   \
        CUresult result_ = (call);                         \
        if (result_ != CUDA_SUCCESS) {                     \
            fprintf(stderr, "%s: %d\n", #call, result_);   \
            exit(1);                                       \
        }                                                  \
    } while (0)
// The best of five: what else the machine does only adds.
#define TIME(into, times, call)                            \
    do {                                                   \
        for (int warm = 0; warm < times / 10; warm++) call;\
        into = 1e18;                                       \
        for (int round = 0; round < 5; round++) {          \
            double begun = now();                          \
            for (int i = 0; i < times; i++) call;          \
            double each = (now() - begun) / times;         \
            if (each < into) into = each;                  \
        }                                                  \
    } while (0)

int main(int count, char **words) {
    if (count < 3 || !(library = dlopen(words[1], RTLD_NOW))) {
        fprintf(stderr, "usage: overhead LIBRARY CUBIN: %s\n", count < 3 ? "too few arguments" : dlerror());
        return 2;
    }
    USE(cuInit, "cuInit");
    USE(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    USE(cuCtxSetCurrent, "cuCtxSetCurrent");
    USE(cuCtxSynchronize, "cuCtxSynchronize");
    USE(cuStreamCreate, "cuStreamCreate");
    USE(cuStreamSynchronize, "cuStreamSynchronize");
    USE(cuMemAlloc, "cuMemAlloc_v2");
    USE(cuMemFree, "cuMemFree_v2");
    USE(cuMemAllocAsync, "cuMemAllocAsync");
    USE(cuMemFreeAsync, "cuMemFreeAsync");
    USE(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool");
    USE(cuMemPoolSetAttribute, "cuMemPoolSetAttribute");
    USE(cuModuleLoad, "cuModuleLoad");
    USE(cuModuleGetFunction, "cuModuleGetFunction");
    USE(cuLaunchKernel, "cuLaunchKernel");

    double begun = now();
    CUcontext context;
    CHECK(call_cuInit(0));
    CHECK(call_cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(call_cuCtxSetCurrent(context));
    double started = now() - begun;

    CUstream stream;
    CUmemoryPool pool;
    cuuint64_t keep = ~0ull;
    CHECK(call_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(call_cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(call_cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    CUdeviceptr pointer;
    double async, linear, launch;
    TIME(async, 100000, (call_cuMemAllocAsync(&pointer, (1 << 20), stream), call_cuMemFreeAsync(pointer, stream)));
    CHECK(call_cuStreamSynchronize(stream));
    TIME(linear, 2000, (call_cuMemAlloc(&pointer, 2 * (1 << 20)), call_cuMemFree(pointer)));

    CUmodule module;
    CUfunction function;
    CHECK(call_cuModuleLoad(&module, words[2]));
    CHECK(call_cuModuleGetFunction(&function, module, "nothing"));
    CUdeviceptr null = 0;
    void *arguments[] = {&null};
    TIME(launch, 20000, call_cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0));
    CHECK(call_cuCtxSynchronize());
    printf("{\"start\":%.0f,\"async\":%.2f,\"linear\":%.1f,\"launch\":%.2f}\n", started, async, linear, launch);
    return 0;
}
