// Measures RMM's resources on RMM's random allocations, and on one allocation and its free.
// e2e/gpu/runtime.py compares the pool with them on the same machine in the same minutes. The steps
// are those of e2e/gpu/runtime-programs/src/runtime_bench/random.rs, the numbers libstdc++'s own.
// docs/internals/benchmarks.md describes the build. Prints a line of JSON for each row. With the
// arguments `turns SOURCE PERCENT`, runs one cell for each line "ALLOCATIONS MIB" of its input,
// within this percentage of the GPU's memory.

#include <cuda/stream_ref>
#include <rmm/cuda_device.hpp>
#include <rmm/cuda_stream.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::uint64_t MIB = 1 << 20;
// The maximum of live bytes, as in RMM's benchmark.
constexpr std::uint64_t MOST_LIVE = 16'000 * MIB;
constexpr std::size_t ALIGN = 256;
// The constant of measure.rs.
constexpr std::uint64_t ENOUGH = 500'000;
constexpr int PAIRS = 2'000, BLOCKS = 301;
// A resource that needs this long for a tenth of a cell is far slower than the best one.
constexpr double HOPELESS_MS = 60;
constexpr std::pair<std::uint64_t, std::uint64_t> CELLS[] = {
    {1'000, 1},      {1'000, 64},      {1'000, 1'024},   {10'000, 1},   {10'000, 64},
    {10'000, 1'024}, {100'000, 1},     {100'000, 64},    {100'000, 1'024},
};

using Clock = std::chrono::steady_clock;
using Resource = rmm::device_async_resource_ref;

double nanoseconds(Clock::duration time) { return std::chrono::duration<double, std::nano>(time).count(); }

struct Live {
  void* address;
  std::uint64_t bytes;
};

// Runs a cell once, and returns the number of failed allocations.
std::uint64_t run(Resource resource, cuda::stream_ref stream, std::uint64_t allocations, std::uint64_t max_mib) {
  std::default_random_engine engine;
  std::uniform_int_distribution<std::uint64_t> size{1, max_mib * MIB}, chance{0, 99}, index{0, allocations - 1};
  std::vector<Live> live;
  std::uint64_t made = 0, live_bytes = 0, failed = 0;
  for (std::uint64_t step = 0; step < 2 * allocations; ++step) {
    std::uint64_t const bytes = size(engine);
    bool allocates            = true;
    if (!live.empty()) {
      auto const drawn = chance(engine);
      allocates        = drawn < 73 && made < allocations && live_bytes + bytes < MOST_LIVE;
    }
    if (allocates) {
      try {
        live.push_back({resource.allocate(stream, bytes, ALIGN), bytes});
        made += 1;
        live_bytes += bytes;
        continue;
      } catch (std::bad_alloc const&) {
        failed += 1;
      }
    }
    if (!live.empty()) {
      auto const drawn = index(engine) % live.size();
      std::swap(live[drawn], live.back());
      Live const block = live.back();
      live.pop_back();
      resource.deallocate(stream, block.address, block.bytes, ALIGN);
      live_bytes -= block.bytes;
    }
  }
  for (auto const& block : live) { resource.deallocate(stream, block.address, block.bytes, ALIGN); }
  return failed;
}

struct Times {
  double median, best;
};

Times sorted(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

void measure(std::string const& source, Resource resource, cuda::stream_ref stream) {
  std::map<std::uint64_t, double> smaller;
  for (auto const [allocations, max_mib] : CELLS) {
    if (smaller[max_mib] > HOPELESS_MS) { continue; }
    run(resource, stream, allocations, max_mib);
    std::uint64_t failed = 0;
    std::vector<double> times(std::clamp<std::uint64_t>(ENOUGH / allocations, 5, 101));
    for (auto& time : times) {
      auto const begun = Clock::now();
      failed += run(resource, stream, allocations, max_mib);
      time = nanoseconds(Clock::now() - begun) / 1e6;
    }
    auto const [median, best] = sorted(times);
    smaller[max_mib] = median;
    std::printf(
      R"({"row": "random", "source": "%s", "allocations": %lu, "max_mib": %lu, "ms": %g, "best_ms": %g, "failed": %lu})"
      "\n", source.c_str(), allocations, max_mib, median, best, failed);
  }
  for (std::uint64_t const bytes : {std::uint64_t{256}, MIB, 64 * MIB}) {
    std::vector<double> times(BLOCKS);
    for (auto& time : times) {
      auto const begun = Clock::now();
      for (int pair = 0; pair < PAIRS; ++pair) {
        void* const address = resource.allocate(stream, bytes, ALIGN);
        asm volatile("" : : "r"(address) : "memory");
        resource.deallocate(stream, address, bytes, ALIGN);
      }
      time = nanoseconds(Clock::now() - begun) / PAIRS;
    }
    auto const [median, best] = sorted(times);
    std::printf(
      R"({"row": "pair", "source": "%s", "bytes": %lu, "ns": %g, "best_ns": %g})"
      "\n", source.c_str(), bytes, median, best);
  }
}

// Runs cells in turn with another program.
void turns(Resource resource, cuda::stream_ref stream) {
  std::uint64_t allocations, max_mib;
  while (std::cin >> allocations >> max_mib) {
    auto const begun  = Clock::now();
    auto const failed = run(resource, stream, allocations, max_mib);
    auto const ms     = nanoseconds(Clock::now() - begun) / 1e6;
    std::printf(R"({"row": "turn", "ms": %g, "failed": %lu})" "\n", ms, failed);
  }
}

std::string const OWN_STREAM = ", own stream";

// The selection of measurements: all of them, or turns of one source.
struct Wanted {
  std::string source;
  std::uint64_t bytes;

  // Measures in the default stream, as RMM's own benchmark does, and in a separate one.
  void of(std::string const& name, Resource resource) const {
    rmm::cuda_stream const stream{};
    if (source.empty()) {
      measure(name, resource, cudaStream_t{});
      measure(name + OWN_STREAM, resource, stream);
    } else if (source == name) {
      turns(resource, cudaStream_t{});
    } else if (source == name + OWN_STREAM) {
      turns(resource, stream);
    }
  }

  bool begins_with(std::string const& name) const { return source.compare(0, name.size(), name) == 0 || source.empty(); }
};

}  // namespace

int main(int argc, char** argv) {
  // Rows are written line by line, so that a later crash loses none.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  rmm::mr::cuda_memory_resource const cuda{};
  bool const by_turns = argc == 4 && argv[1] == std::string{"turns"};
  if (argc > 1 && !by_turns) {
    std::fprintf(stderr, "usage: rmm [turns SOURCE PERCENT]\n");
    return 2;
  }
  Wanted const wanted = by_turns
    ? Wanted{argv[2], rmm::available_device_memory().second / 100 * std::stoull(argv[3]) / MIB * MIB}
    : Wanted{"", rmm::percent_of_free_device_memory(50)};
  if (wanted.begins_with("arena")) {
    rmm::mr::arena_memory_resource arena{cuda, wanted.bytes};
    wanted.of("arena", arena);
  }
  if (wanted.begins_with("pool") || wanted.begins_with("binning")) {
    rmm::mr::pool_memory_resource pool{cuda, wanted.bytes};
    wanted.of("pool", pool);
    // Bins of 256 KiB to 4 MiB over a pool, as in RMM's benchmark.
    rmm::mr::binning_memory_resource binning{pool, 18, 22};
    wanted.of("binning", binning);
  }
  if (wanted.begins_with("cuda_async")) {
    rmm::mr::cuda_async_memory_resource async{wanted.bytes};
    wanted.of("cuda_async", async);
  }
}
