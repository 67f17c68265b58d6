"""Computes with PyTorch for a while and checks every result. Prints one JSON object.

usage: steady.py SECONDS
"""

import json
import sys
import time

import torch

MIB = 1 << 20

total = torch.cuda.mem_get_info()[1]
x = torch.arange(4096, device="cuda", dtype=torch.float64).remainder(7).outer(torch.ones(4096, device="cuda", dtype=torch.float64))
expected = (x @ x).sum().item()
print("begun", flush=True)
rounds, wrong, slowest, most = 0, 0, 0.0, 0
deadline = time.monotonic() + float(sys.argv[1])
while time.monotonic() < deadline:
    begun = time.monotonic()
    # A new tensor each time, so that the allocator requests memory too.
    scratch = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    wrong += (x @ x).sum().item() != expected
    del scratch
    most = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    slowest = max(slowest, time.monotonic() - begun)
    rounds += 1
print(
    json.dumps(
        {
            "gpu": str(torch.cuda.get_device_properties(0).uuid),
            "sees_mib": total // MIB,
            "got_mib": most // MIB,
            "rounds": rounds,
            "wrong": wrong,
            "slowest_ms": round(slowest * 1000),
        }
    )
)
