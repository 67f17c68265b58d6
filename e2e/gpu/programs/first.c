// Loads the driver as programs do, and ends after its first kernel: from cuInit to a result on the
// host. Exits with the number of the call that failed.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>

static const char KERNEL[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry first(.param .u64 out) {\n"
    ".reg .u64 %a; .reg .u32 %v;\n"
    "ld.param.u64 %a, [out]; cvta.to.global.u64 %a, %a; mov.u32 %v, 42; st.global.u32 [%a], %v; ret; }\n";

#define CALL(number, call) \
    if ((call) != CUDA_SUCCESS) return number

int main(void) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr memory;
    unsigned answer = 0;
    CALL(1, cuInit(0));
    CALL(2, cuDeviceGet(&device, 0));
    CALL(3, cuDevicePrimaryCtxRetain(&context, device));
    CALL(4, cuCtxSetCurrent(context));
    CALL(5, cuModuleLoadData(&module, KERNEL));
    CALL(6, cuModuleGetFunction(&function, module, "first"));
    CALL(7, cuMemAlloc(&memory, sizeof answer));
    void *arguments[] = {&memory};
    CALL(8, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0));
    CALL(9, cuMemcpyDtoH(&answer, memory, sizeof answer));
    printf("%u\n", answer);
    return answer == 42 ? 0 : 10;
}
