// Takes memory in ways that leave the driver holding more than was asked for, until the quota
// refuses. Prints one JSON object, and holds all for a while, so that NVML shows it.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define CHUNK (2 * MIB)
#define MOST 4000000
#define CHECK(call)                                                       \
    do {                                                                  \
        CUresult result_ = (call);                                        \
        if (result_ != CUDA_SUCCESS) {                                    \
            printf("{\"failed\":\"%s\",\"code\":%d}\n", #call, result_);  \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

static const char *HEAD = ".version 7.0\n.target sm_75\n.address_size 64\n";
static const char *EMPTY = ".visible .entry empty() { ret; }";
static const char *HEAP =
    ".extern .func (.param .b64 result) malloc (.param .b64 size);\n"
    ".visible .entry heap() { .reg .b64 %at; .reg .pred %none;\n"
    "{ .param .b64 size; st.param.b64 [size], 16; .param .b64 result;\n"
    "call.uni (result), malloc, (size); ld.param.b64 %at, [result]; }\n"
    "setp.eq.u64 %none, %at, 0; @%none bra done; st.u32 [%at], 1; done: ret; }";
static const char *VARIABLE =
    ".visible .global .align 8 .b8 data[536870912];\n"
    ".visible .entry variable() { .reg .b64 %at; mov.u64 %at, data; st.global.u32 [%at], 1; ret; }";

static CUdeviceptr pieces[MOST];
static size_t count;

static CUmodule load(const char *text) {
    char image[4096];
    CUmodule module;
    snprintf(image, sizeof image, "%s%s", HEAD, text);
    CHECK(cuModuleLoadData(&module, image));
    return module;
}

static size_t size_of(size_t bytes) { return bytes ? bytes : 512ul << (rand() % 12); }

static void fill(size_t bytes, size_t most) {
    size_t taken = 0;
    for (; taken < most && count < MOST; count++) {
        size_t size = size_of(bytes);
        if (cuMemAlloc(&pieces[count], size)) return;
        taken += size;
    }
}

// Frees two thirds, all but the first piece of each chunk, or half of them at random.
static void thin(const char *how) {
    size_t kept = 0;
    for (size_t at = 0; at < count; at++) {
        int keep = !strcmp(how, "thirds") ? at % 3 == 0
                   : !strcmp(how, "chunks") ? !kept || pieces[at] / CHUNK != pieces[kept - 1] / CHUNK
                                            : rand() % 2;
        if (keep) pieces[kept++] = pieces[at];
        else CHECK(cuMemFree(pieces[at]));
    }
    count = kept;
}

static CUresult take_nodes(void) {
    static CUfunction function;
    static CUgraph graph;
    if (!graph) {
        CHECK(cuModuleGetFunction(&function, load(EMPTY), "empty"));
        CHECK(cuGraphCreate(&graph, 0));
        CUDA_KERNEL_NODE_PARAMS parameters = {0};
        parameters.func = function;
        parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1;
        parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1;
        CUgraphNode node, last;
        for (int at = 0; at < 10000; at++, last = node)
            CHECK(cuGraphAddKernelNode(&node, graph, at ? &last : 0, at ? 1 : 0, &parameters));
    }
    CUgraphExec executable;
    CUresult result = cuGraphInstantiateWithFlags(&executable, graph, 0);
    return result ? result : cuGraphLaunch(executable, 0);
}

static CUresult take_variable(void) {
    CUdeviceptr at;
    size_t size;
    CUmodule module = load(VARIABLE);
    CUresult result = cuModuleGetGlobal(&at, &size, module, "data");
    if (result) CHECK(cuModuleUnload(module));
    return result;
}

int main(int words, char **word) {
    const char *what = words > 1 ? word[1] : "", *how = words > 2 ? word[2] : "";
    CUcontext context;
    size_t free_bytes, total, taken = 0;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemGetInfo(&free_bytes, &total));
    CUresult result = CUDA_SUCCESS;
    if (!strcmp(what, "nodes")) {
        while (!(result = take_nodes())) taken++;
    } else if (!strcmp(what, "variables")) {
        while (!(result = take_variable())) taken++;
    } else if (!strcmp(what, "heap")) {
        CUfunction function;
        result = cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, total);
        CHECK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, total / 2));
        CHECK(cuModuleGetFunction(&function, load(HEAP), "heap"));
        CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
        taken = 1;
    } else {
        size_t bytes = strtoul(what, 0, 10);
        for (int round = 0; round < 3; round++) {
            fill(bytes, free_bytes / 2);
            thin(how);
        }
        taken = count;
    }
    CHECK(cuCtxSynchronize());
    // The rest of the quota.
    CUdeviceptr pointer;
    size_t rest = 0;
    while (!(result = cuMemAlloc(&pointer, CHUNK))) rest += CHUNK;
    printf("{\"taken\":%zu,\"rest_mib\":%zu,\"refused\":%d}\n", taken, (size_t)(rest / MIB), result);
    fflush(stdout);
    sleep(3);
    return 0;
}
