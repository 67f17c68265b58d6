// Defines kernels that direct.c and overhead.c load by name.
extern "C" __global__ void nothing(char *) {}

extern "C" __global__ void locals(char *out) {
    volatile char many[65536];
    for (int at = 0; at < 65536; at += 97) many[(at * (threadIdx.x + 7)) & 65535] = at;
    if (out && many[threadIdx.x] == 77) out[1] = many[3];
}
