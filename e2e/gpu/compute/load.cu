// Runs as a tenant process: a loop that keeps the GPU busy, a probe that times short kernels, or an
// allocator that times `cudaMalloc` and `cudaFree` of 2 MiB.
// `shares.py` starts it.
//
// usage: load BOARD loop|probe|allocator ITERATIONS_PER_US    or: load - calibrate
//
// BOARD is a file that the process and `shares.py` map. Settings are on its first page, then
// finished work in slots of 1 ms, then the probe's latencies. Work is in microseconds as calibrated
// on the idle GPU, or in MiB of copies. The process sends each line `FD CLIENT OBJECT COMMAND
// PARAMS` of stdin (hex, except FD) to the driver, and prints the status.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <mma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include "rm.h"

#define CHECK(call)                                                               \
    do {                                                                          \
        cudaError_t result_ = (call);                                             \
        if (result_ != cudaSuccess) {                                             \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(result_));      \
            _exit(1);  /* exit() waits for stdin, which another thread reads */   \
        }                                                                         \
    } while (0)

enum Mode : uint32_t { PLAIN, GRAPH, COOPERATIVE, COPY, FAULT };

// `shares.py` depends on this layout.
constexpr size_t SLOTS = 600 * 1000, LATENCIES = 300 * 1000;
struct Board {
    volatile uint32_t stop, pause, mode, kernel_us, ready, pid;
    volatile uint64_t begun_ns;
    volatile uint32_t latencies;
    char reserved[4096 - 36];
    volatile uint32_t done[SLOTS];
    struct {
        volatile uint64_t at_ns, took_ns;
    } latency[LATENCIES];
};

constexpr int DEPTH = 4, GRAPH_KERNELS = 10, COPY_MIB = 64;
constexpr int THREADS = 512;

static uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

// fp16 products on the tensor cores, from registers only, so that the time depends on the
// iterations alone.
__device__ void multiply(int iterations, float *out) {
    using namespace nvcuda::wmma;
    fragment<matrix_a, 16, 16, 16, half, row_major> a;
    fragment<matrix_b, 16, 16, 16, half, col_major> b;
    fragment<accumulator, 16, 16, 16, float> sums[4];
    fill_fragment(a, __float2half(0.5f));
    fill_fragment(b, __float2half(0.25f * (threadIdx.x & 3)));
    for (int at = 0; at < 4; at++) fill_fragment(sums[at], float(at));  // equal ones would be computed once
    for (int at = 0; at < iterations; at++)
        for (auto &sum : sums) mma_sync(sum, a, b, sum);
    if (sums[0].x[0] + sums[1].x[0] + sums[2].x[0] + sums[3].x[0] == -1.0f) *out = 1.0f;
}

__global__ void products(int iterations, float *out) { multiply(iterations, out); }

__global__ void products_in_step(int iterations, float *out) {
    multiply(iterations / 2, out);
    cooperative_groups::this_grid().sync();
    multiply(iterations / 2, out);
}

__global__ void fault() { *(volatile int *)16 = 1; }

struct Gpu {
    int blocks;
    cudaStream_t stream;
    float *out;

    Gpu() {
        CHECK(cudaSetDeviceFlags(cudaDeviceScheduleSpin));
        CHECK(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&out, sizeof *out));
    }

    void launch(int iterations) { products<<<blocks, THREADS, 0, stream>>>(iterations, out); }
};

static double kernel_us(Gpu &gpu, int iterations) {
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    float milliseconds;
    CHECK(cudaEventRecord(from, gpu.stream));
    for (int at = 0; at < 50; at++) gpu.launch(iterations);
    CHECK(cudaEventRecord(to, gpu.stream));
    CHECK(cudaEventSynchronize(to));
    CHECK(cudaEventElapsedTime(&milliseconds, from, to));
    return milliseconds * 1000 / 50;
}

static int calibrate() {
    Gpu gpu;
    kernel_us(gpu, 200000);  // clocks rise
    double few = kernel_us(gpu, 10000), many = kernel_us(gpu, 50000);
    printf("%.3f\n", 40000 / (many - few));
    return 0;
}

// Queues one step of the loop, and computes its amount of work.
class Work {
    Gpu &gpu_;
    const double per_us_;
    cudaGraphExec_t graph_ = nullptr;
    uint32_t graph_us_ = 0;
    void *host_ = nullptr, *device_ = nullptr;

  public:
    Work(Gpu &gpu, double per_us) : gpu_(gpu), per_us_(per_us) {}

    uint32_t queue(uint32_t mode, uint32_t microseconds) {
        int iterations = int(microseconds * per_us_);
        switch (mode) {
            case GRAPH:
                if (graph_us_ != microseconds) capture(microseconds);
                CHECK(cudaGraphLaunch(graph_, gpu_.stream));
                return microseconds * GRAPH_KERNELS;
            case COOPERATIVE: {
                void *arguments[] = {&iterations, &gpu_.out};
                CHECK(cudaLaunchCooperativeKernel((void *)products_in_step, gpu_.blocks, THREADS, arguments, 0, gpu_.stream));
                return microseconds;
            }
            case COPY:
                if (!host_) {
                    CHECK(cudaMallocHost(&host_, COPY_MIB << 20));
                    CHECK(cudaMalloc(&device_, COPY_MIB << 20));
                }
                CHECK(cudaMemcpyAsync(device_, host_, COPY_MIB << 20, cudaMemcpyHostToDevice, gpu_.stream));
                return COPY_MIB;
            case FAULT:
                fault<<<1, 1, 0, gpu_.stream>>>();
                return 0;
            default:
                gpu_.launch(iterations);
                return microseconds;
        }
    }

  private:
    void capture(uint32_t microseconds) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(gpu_.stream, cudaStreamCaptureModeThreadLocal));
        for (int at = 0; at < GRAPH_KERNELS; at++) gpu_.launch(int(microseconds * per_us_));
        CHECK(cudaStreamEndCapture(gpu_.stream, &graph));
        CHECK(cudaGraphInstantiate(&graph_, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        graph_us_ = microseconds;
    }
};

static void loop(Board *board, double per_us) {
    Gpu gpu;
    Work work(gpu, per_us);
    cudaEvent_t done[DEPTH];
    uint32_t amount[DEPTH];
    for (auto &event : done) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    gpu.launch(1);
    CHECK(cudaStreamSynchronize(gpu.stream));
    board->ready = 1;

    uint64_t queued = 0, finished = 0;
    while (!board->stop) {
        bool more = !board->pause;
        if (more) {
            amount[queued % DEPTH] = work.queue(board->mode, board->kernel_us);
            CHECK(cudaEventRecord(done[queued % DEPTH], gpu.stream));
            queued++;
        }
        if (queued - finished == DEPTH || (!more && queued > finished)) {
            CHECK(cudaEventSynchronize(done[finished % DEPTH]));
            uint64_t slot = (now_ns() - board->begun_ns) / 1000000;
            if (slot < SLOTS) board->done[slot] += amount[finished % DEPTH];
            finished++;
        } else if (!more) {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
}

static void probe(Board *board, double per_us, bool allocates) {
    Gpu gpu;
    void *memory;
    products<<<1, 32, 0, gpu.stream>>>(1, gpu.out);
    CHECK(cudaStreamSynchronize(gpu.stream));
    board->ready = 1;
    while (!board->stop) {
        if (!board->pause && board->latencies < LATENCIES) {
            uint64_t from = now_ns();
            if (allocates) {
                CHECK(cudaMalloc(&memory, 2 << 20));
                CHECK(cudaFree(memory));
            } else {
                products<<<1, 32, 0, gpu.stream>>>(int(10 * per_us), gpu.out);
                CHECK(cudaStreamSynchronize(gpu.stream));
            }
            uint32_t at = board->latencies;
            board->latency[at].at_ns = from;
            board->latency[at].took_ns = now_ns() - from;
            board->latencies = at + 1;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(allocates ? 200 : 1500));
    }
}

// Sends the commands of stdin to the driver, as this process with its own capabilities.
static void obey() {
    int fd;
    unsigned client, object, command;
    char hex[128];
    while (scanf("%d %x %x %x %127s", &fd, &client, &object, &command, hex) == 5) {
        std::vector<unsigned char> params(strlen(hex) / 2);
        for (size_t at = 0; at < params.size(); at++) sscanf(hex + 2 * at, "%2hhx", &params[at]);
        uint64_t from = now_ns();
        uint32_t status = rm_control(fd, client, object, command, params.data(), params.size());
        printf("%x %llu ", status, (unsigned long long)(now_ns() - from));
        for (unsigned char byte : params) printf("%02x", byte);
        printf("\n");
        fflush(stdout);
    }
}

int main(int count, char **arguments) {
    if (count == 3 && !strcmp(arguments[2], "calibrate")) return calibrate();
    if (count != 4) return fprintf(stderr, "usage: load BOARD loop|probe|allocator ITERATIONS_PER_US\n"), 2;
    int file = open(arguments[1], O_RDWR);
    void *shared = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return perror(arguments[1]), 2;
    Board *board = static_cast<Board *>(shared);
    board->pid = getpid();
    std::thread(obey).detach();
    if (!strcmp(arguments[2], "loop")) loop(board, atof(arguments[3]));
    probe(board, atof(arguments[3]), !strcmp(arguments[2], "allocator"));
    _exit(0);
}
