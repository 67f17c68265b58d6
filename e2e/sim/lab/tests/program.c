/* A program as anybody would write it, over cuda.h's declarations of what it uses. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
CUresult cuInit(unsigned int);
CUresult cuDeviceGet(CUdevice *, int);
CUresult cuDeviceGetName(char *, int, CUdevice);
CUresult cuDeviceTotalMem_v2(size_t *, CUdevice);
CUresult cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuMemGetInfo_v2(size_t *, size_t *);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
CUresult cuGetErrorName(CUresult, const char **);

static void ok(CUresult result) {
    const char *name = "?";
    if (result == 0) return;
    cuGetErrorName(result, &name);
    fprintf(stderr, "%s\n", name);
    exit(1);
}

int main(void) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction fill, checksum;
    CUdeviceptr data, sum;
    char name[64];
    size_t total, left, all, len = 100;
    unsigned char value = 17;
    unsigned long long result;
    ok(cuInit(0));
    ok(cuDeviceGet(&device, 0));
    ok(cuDeviceGetName(name, sizeof name, device));
    ok(cuDeviceTotalMem_v2(&total, device));
    ok(cuCtxCreate_v2(&context, 0, device));
    ok(cuMemAlloc_v2(&data, len << 10));
    ok(cuMemAlloc_v2(&sum, sizeof result));
    ok(cuModuleLoadData(&module, "any"));
    ok(cuModuleGetFunction(&fill, module, "fill"));
    ok(cuModuleGetFunction(&checksum, module, "checksum"));
    void *filled[] = {&data, &value, &len};
    ok(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, filled, NULL));
    void *summed[] = {&data, &len, &sum};
    ok(cuLaunchKernel(checksum, 1, 1, 1, 1, 1, 1, 0, NULL, summed, NULL));
    ok(cuMemcpyDtoH_v2(&result, sum, sizeof result));
    ok(cuMemGetInfo_v2(&left, &all));
    printf("%s %zu used %zu sum %llu oom %d\n", name, total, all - left, result, cuMemAlloc_v2(&data, total));
    ok(cuCtxDestroy_v2(context));
    return 0;
}
