"""Prints the proportional memory of a sleeping program in KiB, as JSON.

usage: proportional.py PROGRAM ARGUMENT...
"""

import json
import subprocess
import sys
import time

with subprocess.Popen(sys.argv[1:]) as program:
    try:
        time.sleep(0.5)
        with open(f"/proc/{program.pid}/smaps_rollup", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("Pss:"))
    finally:
        program.kill()
print(json.dumps({"kib": int(line.split()[1])}))
