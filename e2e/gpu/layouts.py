"""Tells a slower pool from one that the compiler placed differently: two commits' pools by turns, in several builds.

usage: layouts.py OLDER NEWER [OLDER NEWER...]

Each pair is the `runtime-bench` of an older and of a newer commit, built with the same number of codegen units. The
programs run wherever CUDA is, the simulated driver included: the pool calls the driver for its slab alone. Each start
measures a cell three times and keeps the shortest. The script prints the median ratio of neighbouring starts for each
build and cell, and for a pair alone and under a `Budget`. It exits with 1 if the median of all cells, of all pairs, or
of all pairs under a `Budget` is above 1.03.
"""

import argparse
import statistics
import sys

from runtime import SLOWER, rows_of
from table import Table

CELLS = ["1000 1", "10000 1", "10000 64", "10000 1024", "100000 64"]
STARTS = 12
PAIRS = {"a pair": "pool", "under a Budget": "budget over the pool"}
PAIR_STARTS = 3
# The percentage of the GPU's memory for the pool.
SHARE = "40"


def shortest(program, cell):
    """Returns the milliseconds of the shortest of three rounds after one start."""
    rows, code, output = rows_of([program, "turns", SHARE], given=f"{cell}\n" * 3)
    if code or not rows or any(row["failed"] for row in rows):
        raise RuntimeError(f"{program} ended with {code}: {output[-800:]}")
    return min(row["ms"] for row in rows)


def pairs(program):
    """Returns the nanoseconds of a pair of 1 MiB in one thread, alone and under a `Budget`, of one start."""
    rows, code, output = rows_of([program, "pair"])
    if code:
        raise RuntimeError(f"{program} ended with {code}: {output[-800:]}")
    found = {row["source"]: row["ns"] for row in rows if (row["bytes"], row["threads"]) == (1 << 20, 1)}
    return [found[source] for source in PAIRS.values()]


def turns(older, newer, starts, measure):
    """Runs both by turns that change their order, and returns their results of each turn."""
    results = []
    for start in range(starts):
        order = (older, newer) if start % 2 else (newer, older)
        took = {program: measure(program) for program in order}
        results.append((took[newer], took[older]))
    return results


def ratios_of(older, newer):
    """Returns the median ratio of neighbouring starts for each cell and each kind of pair."""
    medians = []
    for cell in CELLS:
        took = turns(older, newer, STARTS, lambda program, cell=cell: shortest(program, cell))
        medians.append(statistics.median(new / old for new, old in took))
    took = turns(older, newer, PAIR_STARTS, pairs)
    for kind in range(len(PAIRS)):
        medians.append(statistics.median(new[kind] / old[kind] for new, old in took))
    return medians


def main():
    """Compares all pairs, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+")
    programs = parser.parse_args().programs
    table = Table("newer program", *CELLS, *PAIRS)
    builds = []
    for older, newer in zip(programs[::2], programs[1::2], strict=True):
        builds.append(ratios_of(older, newer))
        table.add(newer, *(f"{ratio:.3f}" for ratio in builds[-1]))
    cells = statistics.median(ratio for build in builds for ratio in build[: len(CELLS)])
    of_pairs = [statistics.median(build[len(CELLS) + kind] for build in builds) for kind in range(len(PAIRS))]
    medians = [cells, *[""] * (len(CELLS) - 1), *of_pairs]
    is_slower = any(median > SLOWER for median in (cells, *of_pairs))
    table.add("median of all builds", *(f"{m:.3f}" if m else m for m in medians), wrong=is_slower)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
