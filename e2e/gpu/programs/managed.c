// Uses managed memory (`resident`), or allocates and frees device memory beside it (`neighbour`),
// for some seconds. Prints one JSON object. Exits with 1 if a call fails that should succeed.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
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

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static double longest(double so_far, double since) {
    double took = now() - since;
    return took > so_far ? took : so_far;
}

// Writes all pages from the GPU again and again, and checks a byte of the former round before.
static void resident(size_t mib, double until) {
    CUdeviceptr pointer;
    CHECK(cuMemAllocManaged(&pointer, mib * MIB, CU_MEM_ATTACH_GLOBAL));
    unsigned char expected = 0, found;
    double most = 0;
    int rounds = 0, wrong = 0;
    for (; now() < until; rounds++, usleep(300000)) {
        double since = now();
        for (size_t at = 0; rounds && at < mib; at += 64) {
            CHECK(cuMemcpyDtoH(&found, pointer + at * MIB, 1));
            wrong += found != expected;
        }
        expected = rounds;
        CHECK(cuMemsetD8(pointer, expected, mib * MIB));
        CHECK(cuCtxSynchronize());
        most = longest(most, since);
    }
    printf("{\"rounds\":%d,\"wrong\":%d,\"longest_ms\":%.0f}\n", rounds, wrong, most * 1e3);
}

static void neighbour(size_t mib, double until) {
    double most = 0;
    int rounds = 0, refused = 0;
    for (; now() < until; rounds++) {
        CUdeviceptr pointer;
        double since = now();
        if (cuMemAlloc(&pointer, mib * MIB) != CUDA_SUCCESS) {
            refused++;
            continue;
        }
        most = longest(most, since);
        CHECK(cuMemFree(pointer));
    }
    printf("{\"rounds\":%d,\"refused\":%d,\"longest_ms\":%.0f}\n", rounds, refused, most * 1e3);
}

int main(int count, char **words) {
    if (count != 4) return 2;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    size_t mib = strtoul(words[2], 0, 10);
    double until = now() + atoi(words[3]);
    if (!strcmp(words[1], "resident")) resident(mib, until);
    else if (!strcmp(words[1], "neighbour")) neighbour(mib, until);
    else return 2;
    return 0;
}
