"""Allocates by a framework's own allocator until it is refused, then computes. Prints one JSON object.

usage: quota.py FRAMEWORK
"""

import json
import sys

MIB = 1 << 20
STEP = 64 * MIB


def take(allocate, refused):
    """Allocates STEP at a time until `refused` is raised, and returns the bytes and the error's text."""
    held, message = [], ""
    try:
        while True:
            held.append(allocate())
    except refused as error:
        message = str(error)
    got = len(held) * STEP
    held.clear()
    return got, message


def with_torch():
    import torch

    total = torch.cuda.mem_get_info()[1]
    got, message = take(lambda: torch.empty(STEP, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
    torch.cuda.empty_cache()
    # A replayed CUDA graph.
    x = torch.ones(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ x) + 1
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return total, got, y[5, 5].item() == 1025, {"gpu": uuid, "told": message.split(".")[0]}


def with_triton():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(values, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(values + at, tl.load(values + at, mask=at < count) * 2, mask=at < count)

    total = torch.cuda.mem_get_info()[1]
    x = torch.ones(1 << 20, device="cuda")
    double[(1024,)](x, x.numel(), BLOCK=1024)
    got, _ = take(lambda: torch.empty(STEP, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
    double[(1024,)](x, x.numel(), BLOCK=1024)
    torch.cuda.synchronize()
    return total, got, x[7].item() == 4


def with_cupy(pool=None):
    import cupy

    if pool is not None:
        cupy.cuda.set_allocator(pool(cupy).malloc)
    total = cupy.cuda.runtime.memGetInfo()[1]
    got, _ = take(lambda: cupy.empty(STEP, dtype=cupy.uint8), cupy.cuda.memory.OutOfMemoryError)
    cupy.get_default_memory_pool().free_all_blocks()
    return total, got, int(cupy.arange(1000).sum()) == 499500


def with_cupy_async():
    return with_cupy(lambda cupy: cupy.cuda.MemoryAsyncPool())


def with_jax():
    import jax
    import jax.numpy as jnp

    total = jax.devices()[0].memory_stats()["bytes_limit"]

    def allocate():
        return jnp.zeros(STEP, dtype=jnp.uint8).block_until_ready()

    got, message = take(allocate, jax.errors.JaxRuntimeError)
    assert "RESOURCE_EXHAUSTED" in message, message
    return total, got, int(jnp.arange(1000).sum()) == 499500


def with_numba():
    import numpy

    # numba-cuda refers to this name, which numpy 2.5 has removed.
    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack
    from numba import cuda

    from numba.cuda.cudadrv.driver import CudaAPIError

    total = cuda.current_context().get_memory_info().total
    got, _ = take(lambda: cuda.device_array(STEP, dtype=numpy.uint8), (CudaAPIError, MemoryError))
    cuda.current_context().deallocations.clear()

    @cuda.jit
    def double(values):
        at = cuda.grid(1)
        if at < values.size:
            values[at] *= 2

    values = cuda.to_device(numpy.ones(1000))
    double[8, 128](values)
    return total, got, values.copy_to_host().sum() == 2000


FRAMEWORKS = {
    "torch": with_torch,
    "triton": with_triton,
    "cupy": with_cupy,
    "cupy-async": with_cupy_async,
    "jax": with_jax,
    "numba": with_numba,
}

if __name__ == "__main__":
    sees, got, right, *more = FRAMEWORKS[sys.argv[1]]()
    answer = {"sees_mib": sees // MIB, "got_mib": got // MIB, "ran_on": bool(right)}
    for part in more:
        answer |= part
    print(json.dumps(answer))
