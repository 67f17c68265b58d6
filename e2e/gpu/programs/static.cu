// Links the CUDA runtime statically: allocates until the shim refuses, then computes.
#include <cstdio>

__global__ void fill(float *values, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) values[at] = 2.0f * at;
}

int main() {
    size_t step = 64 << 20, got = 0, free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    void *last = nullptr, *pointer = nullptr;
    cudaError_t refused;
    while ((refused = cudaMalloc(&pointer, step)) == cudaSuccess) {
        got += step;
        last = pointer;
    }
    cudaGetLastError();
    float *values = static_cast<float *>(last), answer = 0;
    fill<<<1024, 256>>>(values, 1024 * 256);
    cudaError_t ran = cudaMemcpy(&answer, values + 1000, sizeof answer, cudaMemcpyDeviceToHost);
    printf("{\"sees_mib\":%zu,\"got_mib\":%zu,\"refused\":%d,\"ran_on\":%s}\n", total >> 20, got >> 20, refused,
           ran == cudaSuccess && answer == 2000.0f ? "true" : "false");
    return 0;
}
