"""Measures the cost of the shim: `overhead` compares single calls in one process, this script process starts in turn.

usage: compare.py OVERHEAD CUBIN ROUNDS
"""

import json
import statistics
import subprocess
import sys

REAL, SHIM = "/opt/bursar/drv/cuda.so.1", "/opt/bursar/lib/libcuda.so.1"


def run(*arguments):
    output = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, check=False)
    if output.returncode != 0:
        raise SystemExit(f"{arguments}: {output.stderr}")
    return json.loads(output.stdout)


run("start", REAL), run("start", SHIM)
pairs = [(run("start", REAL), run("start", SHIM)) for _ in range(int(sys.argv[3]))]
answer = run("calls", REAL, SHIM, sys.argv[2])
answer["start"] = {
    "native": statistics.median(native for native, _ in pairs),
    "ratio": round(statistics.median(shim / native for native, shim in pairs), 4),
}
print(json.dumps(answer))
