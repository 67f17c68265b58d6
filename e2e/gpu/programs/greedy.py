"""Allocates until it is refused and frees everything, again and again. Prints one JSON object.

usage: greedy.py SECONDS
"""

import json
import sys
import time

import torch

MIB = 1 << 20
begun, rounds, most = time.monotonic(), 0, 0
print("begun", flush=True)
while time.monotonic() < begun + float(sys.argv[1]):
    held, refused = [], False
    while not refused:
        try:
            held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            refused = True
    most = max(most, len(held) * 64)
    rounds += 1
    held.clear()
    torch.cuda.empty_cache()
print(json.dumps({"sees_mib": torch.cuda.mem_get_info()[1] // MIB, "got_mib": most, "rounds": rounds}))
