"""Tells a slower pool from one that the compiler placed differently: two commits' pools by turns, in several builds.

usage: layouts.py OLDER NEWER [OLDER NEWER...] [--state FILE] [--seconds N]

Each pair is the `runtime-bench` of an older and of a newer commit, built with the same number of codegen units. The
programs run wherever CUDA is, the simulated driver included: the pool calls the driver for its slab alone. Each start
measures a cell three times and keeps the shortest. The script prints the ratio of the newer program's time to the older
one's with its interval, for each build and cell, and for a pair alone and under a `Budget`. It exits with 1 if that of
all cells, of all pairs, or of all pairs under a `Budget`, of all builds together, is above 1.03. No pair of starts
begins after N seconds; with FILE the next run goes on with the others.
"""

import argparse
import sys

from comparison import Comparison, ratio_of
from runtime import SLOWER, rows_of
from table import Table

CELLS = ["1000 1", "10000 1", "10000 64", "10000 1024", "100000 64"]
STARTS = 12
PAIRS = {"a pair": "pool", "under a Budget": "budget over the pool"}
PAIR_STARTS = 4
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
    return {kind: found[source] for kind, source in PAIRS.items()}


def cells(program):
    """Returns the milliseconds of each cell after a start of its own."""
    return {cell: shortest(program, cell) for cell in CELLS}


def together(comparisons, figures):
    """Returns the ratio of these figures of several comparisons."""
    values = [comparison.values(figure) for comparison in comparisons for figure in figures]
    first, second = (sum(side, []) for side in zip(*values))
    return ratio_of(first, second, sum(comparison.planned for comparison in comparisons) * len(figures))


def main():
    """Compares all pairs, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--state")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    table = Table("newer program", *CELLS, *PAIRS)
    of_cells, of_pairs = [], []
    for older, newer in zip(options.programs[::2], options.programs[1::2], strict=True):
        for taken, measure, starts in (of_cells, cells, STARTS), (of_pairs, pairs, PAIR_STARTS):
            comparison = Comparison(f"{measure.__name__} of {newer}", starts, options.state)
            both = (lambda program=program, measure=measure: measure(program) for program in (older, newer))
            taken.append(comparison.take(*both, seconds=options.seconds))
        table.add(newer, *(of_cells[-1].ratio(cell) for cell in CELLS), *(of_pairs[-1].ratio(kind) for kind in PAIRS))
    table.add("all builds, all cells", ratio := together(of_cells, CELLS), *[""] * 6, **ratio.at_most(SLOWER))
    for kind in PAIRS:
        table.add(f"all builds, {kind}", ratio := together(of_pairs, [kind]), *[""] * 6, **ratio.at_most(SLOWER))
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
