"""Compares on a real GPU the cost of two commits' shims, by turns.

usage: shims.py EARLIER LATER [--pairs N] [--rows ROW ...] [--state FILE] [--seconds N] [--simulated]

Each folder has what `cargo bench -p bursar-shim --bench overhead --no-run` built of a commit: the benchmark as
`overhead`, `quota-client` and `libbursar_shim.so`. Needs root and an NVIDIA driver; no cluster, because the benchmark
is the agent of its container. The script prints for each row the driver's own time of a call, each shim's time over
that (both in one run, by turns on one processor), and the ratio of the later one's to the earlier one's with its
interval. It exits with 1 if that is above 1.03, or 1.02 for small pieces, or 1.05 at the quota. No pair begins after N
seconds; with FILE the next run goes on with the others. `--simulated` takes the simulated driver,
`libbursar_sim_cuda.so` in each folder.
"""

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys

from comparison import Comparison, output
from table import Table

ROW = re.compile(r"(?P<row>.+?) +native +(?P<native>[\d.]+) ns  shim +[\d.]+ ns  (?P<over>[\d.]+)x")
# The most that a call may take of the earlier one's time, by a word of the row's name.
LIMITS = {"4 KiB": 1.02, "at quota": 1.05, "": 1.03}


def driver():
    """Returns the path of the driver's library, as the loader finds it."""
    ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "/libcuda.so" in line)


def machine():
    """Returns the variables by which the benchmark finds this machine's driver and GPU."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    gpu = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    return {"BURSAR_DRIVER": driver(), "BURSAR_GPU": gpu}


def measure(folder, rows, variables):
    """Runs a commit's benchmark once. Returns the driver's nanoseconds of each row, and the shim's over them."""
    variables = variables | {"BURSAR_LIBRARIES": folder}
    printed = output([f"{folder}/overhead", *rows], 300, env=os.environ | variables)
    return {f"{row['row'].strip()}: {figure}": float(row[figure]) for row in ROW.finditer(printed) for figure in ("native", "over")}


def main():
    """Measures both shims by turns, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--state")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--rows", nargs="+", default=["2 MiB", "4 KiB", "async"], help="words of the rows' names")
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    variables = {} if options.simulated else machine()
    folders = [os.path.abspath(folder) for folder in options.folders]
    programs = [lambda folder=folder: measure(folder, options.rows, variables) for folder in folders]
    comparison = Comparison("shims", options.pairs, options.state).take(*programs, seconds=options.seconds)
    table = Table("row", "driver, ns", "earlier", "later", "later over earlier")
    for row in (figure.removesuffix(": over") for figure in comparison.figures() if figure.endswith(": over")):
        native = statistics.median(sum(comparison.values(f"{row}: native"), []))
        over = [f"{statistics.median(side):.3f}x" for side in comparison.values(f"{row}: over")]
        ratio = comparison.ratio(f"{row}: over")
        limit = next(limit for word, limit in LIMITS.items() if word in row)
        table.add(row, f"{native:.0f}", *over, ratio, **ratio.at_most(limit))
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
