"""Compares on a real GPU the cost of two commits' shims, by turns.

usage: shims.py EARLIER LATER [--rounds N] [--rows ROW ...]

Each folder has what `cargo bench -p bursar-shim --bench overhead --no-run` built of a commit: the benchmark as
`overhead`, `quota-client` and `libbursar_shim.so`. Needs root and an NVIDIA driver; no cluster, because the benchmark
is the agent of its container. The script prints for each row the driver's own time of a call, both shims' ratio to it,
and the later one's time over the earlier one's: the mean of the rounds with two standard errors. It exits with 1 if a
mean is above 1.03, or 1.02 for small pieces, by more than that.
"""

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys

from table import Table

ROW = re.compile(r"(?P<row>.+?) +native +(?P<native>[\d.]+) ns  shim +(?P<shim>[\d.]+) ns")
# The most that a call may take of the earlier one's time, and that of a small piece.
LIMIT, SMALL_LIMIT = 1.03, 1.02


def driver():
    """Returns the path of the driver's library, as the loader finds it."""
    ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "/libcuda.so" in line)


def measure(folder, rows):
    """Runs a commit's benchmark once. Returns the driver's and the shim's nanoseconds of each row."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    gpu = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    variables = {"BURSAR_LIBRARIES": folder, "BURSAR_DRIVER": driver(), "BURSAR_GPU": gpu}
    command = [f"{folder}/overhead", *rows]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False)
    found = {row["row"].strip(): (float(row["native"]), float(row["shim"])) for row in ROW.finditer(ran.stdout)}
    if ran.returncode or not found:
        raise RuntimeError(f"failed to measure {folder}: {ran.stdout[-500:]}{ran.stderr[-1500:]}")
    return found


def main():
    """Measures both shims by turns, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", default=["2 MiB", "4 KiB", "async"], help="words of the rows' names")
    options = parser.parse_args()
    folders = [os.path.abspath(folder) for folder in options.folders]
    rounds, table = [], Table("row", "driver, ns", "earlier", "later", "later over earlier")
    for number in range(options.rounds):
        order = folders if number % 2 else folders[::-1]
        rounds.append({folder: measure(folder, options.rows) for folder in order})
        table.say(f"round {number + 1}: {rounds[-1]}")
    earlier, later = folders
    for row in rounds[0][earlier]:
        native = statistics.median(one[row][0] for took in rounds for one in took.values())
        over = [statistics.median(took[folder][row][1] for took in rounds) / native for folder in folders]
        ratios = [took[later][row][1] / took[earlier][row][1] for took in rounds]
        mean, error = statistics.mean(ratios), 2 * statistics.stdev(ratios) / len(ratios) ** 0.5
        shown = f"{mean:.3f} +- {error:.3f}"
        limit = SMALL_LIMIT if "4 KiB" in row else LIMIT
        table.add(row, f"{native:.0f}", *(f"{ratio:.3f}x" for ratio in over), shown, wrong=mean - error > limit)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
