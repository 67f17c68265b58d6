"""Starts a program again and again, and compares what each start could allocate.

usage: starts.py ROUNDS PROGRAM...

Prints one line of JSON: how often each answer of the program came. An answer that is rare is a refusal of memory.
"""

import collections
import json
import subprocess
import sys
import time

rounds, program = int(sys.argv[1]), sys.argv[2:]
answers, slowest = collections.Counter(), 0.0
for _ in range(rounds):
    begun = time.monotonic()
    ran = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    answers[ran.stdout.strip() or f"exit code {ran.returncode}: {ran.stderr[-200:]}"] += 1
    slowest = max(slowest, time.monotonic() - begun)
print(json.dumps({"rounds": rounds, "answers": answers, "slowest_ms": round(slowest * 1000)}))
