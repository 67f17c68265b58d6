"""Measures the cost of the shim: `overhead` compares single calls in one process, this script process starts in turn.

usage: compare.py OVERHEAD CUBIN ROUNDS
"""

import json
import statistics
import sys

from comparison import Comparison, output

REAL, SHIM = "/opt/bursar/drv/cuda.so.1", "/opt/bursar/lib/libcuda.so.1"


def run(*arguments):
    return json.loads(output([sys.argv[1], *arguments], 300))


run("start", REAL), run("start", SHIM)
starts = Comparison("starts", int(sys.argv[3])).take(lambda: {"ns": run("start", REAL)}, lambda: {"ns": run("start", SHIM)})
ratio = starts.ratio("ns")
answer = run("calls", REAL, SHIM, sys.argv[2])
answer["start"] = {
    "native": statistics.median(starts.values("ns")[0]),
    "ratio": round(ratio.mean, 4),
    "low": round(ratio.low, 4),
    "high": round(ratio.high, 4),
}
print(json.dumps(answer))
