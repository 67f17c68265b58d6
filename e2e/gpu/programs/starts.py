"""Starts a program again and again, and compares what each start could allocate.

usage: starts.py ROUNDS|SECONDSs PROGRAM...

Starts it ROUNDS times, or until SECONDS have passed. Prints one line of JSON: how often each answer of the program came. An answer that is rare is a refusal of memory.
"""

import collections
import json
import subprocess
import sys
import time

limit, program = sys.argv[1], sys.argv[2:]
count = float("inf") if limit.endswith("s") else int(limit)
end = time.monotonic() + float(limit[:-1]) if limit.endswith("s") else float("inf")
rounds, answers, slowest = 0, collections.Counter(), 0.0
while rounds < count and (begun := time.monotonic()) < end:
    rounds += 1
    ran = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    answers[ran.stdout.strip() or f"exit code {ran.returncode}: {ran.stderr[-200:]}"] += 1
    slowest = max(slowest, time.monotonic() - begun)
print(json.dumps({"rounds": rounds, "answers": answers, "slowest_ms": round(slowest * 1000)}))
