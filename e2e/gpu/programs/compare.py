"""Runs `overhead` through the real library and through the shim in turn. Prints the median of each figure, and
the median of the ratios of neighbouring runs.

usage: compare.py OVERHEAD CUBIN ROUNDS
"""

import json
import statistics
import subprocess
import sys

REAL, SHIM = "/opt/bursar/drv/cuda.so.1", "/opt/bursar/lib/libcuda.so.1"


def run(library):
    output = subprocess.run([sys.argv[1], library, sys.argv[2]], capture_output=True, text=True, check=False)
    if output.returncode != 0:
        raise SystemExit(f"{library}: {output.stderr}")
    return json.loads(output.stdout)


run(REAL), run(SHIM)
pairs = [(run(REAL), run(SHIM)) for _ in range(int(sys.argv[3]))]
print(
    json.dumps(
        {
            figure: {
                "native": statistics.median(native[figure] for native, _ in pairs),
                "shim": statistics.median(shim[figure] for _, shim in pairs),
                "ratio": round(statistics.median(shim[figure] / native[figure] for native, shim in pairs), 4),
            }
            for figure in pairs[0][0]
        }
    )
)
