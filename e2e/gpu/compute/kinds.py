"""Runs one kind of work and counts what has finished: kinds.py KIND BOARD, or kinds.py KIND - SECONDS IDLE.

The board is a file of 64-bit words: end, pause, ready, finished; the program runs until it is told to end. Without one
it runs for some seconds beside idle processes, and prints what had finished when. Each kind keeps the GPU's queue filled.
"""

import collections
import json
import math
import mmap
import os
import sys
import time

import torch

END, PAUSE, READY, FINISHED = range(4)
QUEUED = 24


def gemm():
    """Multiplies matrices of 8192."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, a, out=out)


def copy():
    """Copies 1 GiB within the GPU."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    out = torch.empty_like(a)
    return lambda: out.copy_(a)


def attention():
    """Attends causally over 8,192 tokens."""
    q = torch.randn(4, 16, 8192, 128, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def decode():
    """Replays a graph of 32 layers of one token for eight sequences."""
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(32)]
    state = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)

    def layers():
        x = state
        for weight in weights:
            x = torch.nn.functional.relu(x @ weight)
        return x

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return graph.replay


def training():
    """Trains two layers of a transformer."""
    layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, dropout=0.0, device="cuda", dtype=torch.bfloat16)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, 1024, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(batch).float().pow(2).mean().backward()
        optimizer.step()

    return step


def idle(count):
    """Forks processes that have a context and compute nothing."""
    parent = os.getpid()
    for _ in range(count):
        if os.fork() == 0:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            while os.getppid() == parent:
                time.sleep(0.1)
            os._exit(0)


def main():
    kind, path, *timed = sys.argv[1:]
    if timed:
        idle(int(timed[1]))
        board = memoryview(bytearray(4096)).cast("Q")
    else:
        with open(path, "r+b") as file:
            board = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    step = {"gemm": gemm, "copy": copy, "attention": attention, "decode": decode, "training": training}[kind]()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    board[READY] = 1
    queue, samples = collections.deque(), [(time.time(), 0)]
    end = time.monotonic() + float(timed[0]) if timed else math.inf
    while not board[END] and time.monotonic() < end:
        if board[PAUSE]:
            time.sleep(0.001)
        else:
            step()
            event = torch.cuda.Event()
            event.record()
            queue.append(event)
        while queue and (len(queue) >= QUEUED or queue[0].query()):
            queue.popleft().synchronize()
            board[FINISHED] += 1
        if timed and time.time() > samples[-1][0] + 0.1:
            samples.append((time.time(), board[FINISHED]))
    if timed:
        print(json.dumps({"finished": samples}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
