"""Replays many captured CUDA graphs with PyTorch for a while and checks every result. Prints one JSON object.

usage: graphs.py SECONDS

Captures each layer of a model for each batch size by itself, as vLLM does, and a few of them anew all the while.
"""

import json
import random
import sys
import time

import torch

SIZES, LAYERS, WIDTH = 250, 8, 1024
MIB = 1 << 20


def capture(layers, size, pool):
    """Captures the layers for one batch size. Returns the graphs, their input and output, and what that should be."""
    static = torch.full((size, WIDTH), 0.5, device="cuda", dtype=torch.bfloat16)
    graphs, value = [], static
    for layer in layers:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            value = layer(value)
        graphs.append(graph)
    expected = static
    for layer in layers:
        expected = layer(expected)
    # The graphs read their input's memory, which its tensor keeps.
    return graphs, static, value, expected


@torch.inference_mode()
def main():
    torch.manual_seed(1)
    chosen = random.Random(1)
    total = torch.cuda.mem_get_info()[1]
    layers = []
    for _ in range(LAYERS):
        linear = torch.nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
        layers.append(torch.nn.Sequential(linear, torch.nn.GELU(), torch.nn.LayerNorm(WIDTH, device="cuda", dtype=torch.bfloat16)))
        # The libraries choose their kernels, and allocate their workspaces, before the first capture.
        layers[-1](torch.zeros(1, WIDTH, device="cuda", dtype=torch.bfloat16))
    pool = torch.cuda.graph_pool_handle()
    captured = [capture(layers, size, pool) for size in range(1, SIZES + 1)]
    print("begun", flush=True)
    deadline = time.monotonic() + float(sys.argv[1])
    rounds, wrong, anew = 0, 0, 0
    while time.monotonic() < deadline:
        number = chosen.randrange(SIZES)
        graphs, _, output, expected = captured[number]
        for graph in graphs:
            graph.replay()
        wrong += not torch.allclose(output.float(), expected.float(), rtol=0.02, atol=0.02)
        rounds += 1
        if rounds % 100 == 0:
            graphs = output = expected = captured[number] = None
            captured[number] = capture(layers, number + 1, pool)
            anew += 1
    answer = {
        "sees_mib": total // MIB,
        "got_mib": torch.cuda.memory_reserved() // MIB,
        "graphs": SIZES * LAYERS,
        "anew": anew * LAYERS,
        "rounds": rounds,
        "wrong": wrong,
    }
    print(json.dumps(answer))


main()
