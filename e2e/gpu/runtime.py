"""Shows on a real GPU the cost of the runtime's pool, and that it is correct there.

usage: runtime.py FOLDER [--only random|earlier|pair|steal|planted|sources|references...]

FOLDER has `runtime-bench`, `sources` and `references`, built by `cargo build --release -p
bursar-gpu-programs`, and `rmm`, built of programs/rmm.cpp as docs/internals/benchmarks.md
describes. Needs an NVIDIA driver and compute-sanitizer; no network, no cluster. The script runs RMM's random
allocations and the pair beside RMM's own resources, a two-stream steal, planted overflows, and every source of memory
and references to it. It prints one table last, and exits with 1 if a row fails. Without `rmm` it compares with times
of RMM from an earlier day. With `earlier`, the `runtime-bench` of an earlier commit, it compares both pools by turns.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys

from comparison import ratio_of
from table import Table

SANITIZERS = ["/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda-13.0/bin/compute-sanitizer"]
# The best times of RMM 26.10 on an H200 of an earlier day: ms by allocations and MiB, and a pair in ns.
RMM = {
    (1000, 1): 0.61, (1000, 64): 0.65, (1000, 1024): 0.41,
    (10000, 1): 14.1, (10000, 64): 12.0, (10000, 1024): 4.29,
    (100000, 1): 206, (100000, 64): 127, (100000, 1024): 43,
}  # fmt: skip
RMM_PAIR = 142
# The pool's goals: three times as fast in every cell, and 50 ns a pair on that day's machine.
AHEAD = 3
PAIR_SHARE = 50 / RMM_PAIR
# At most this many times an earlier commit's time in each cell.
SLOWER = 1.03
# Starts of two programs that run by turns, and the turns after each start, by allocations.
STARTS = 15
TURNS = {1000: 31, 10000: 9, 100000: 3}
# The percentage of the GPU's memory for each of two programs that run in turn.
SHARE = 34


def rows_of(program, *arguments, bound=500, given=""):
    """Runs the program with the text as its input, and returns its rows, its exit code and its output."""
    ran = subprocess.run(
        [*program, *arguments], input=given, text=True, capture_output=True, timeout=bound, check=False
    )
    rows = []
    for line in ran.stdout.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows, ran.returncode, ran.stdout + ran.stderr


@functools.cache
def peer(program):
    """Returns the times of RMM's best resources: ms by cell, ns of a pair, and each resource's name."""
    program = os.path.join(os.path.dirname(program), "rmm")
    if not os.path.exists(program):
        return {**{cell: (ms, "another day") for cell, ms in RMM.items()}, "pair": (RMM_PAIR, "another day")}
    rows, code, output = rows_of([program])
    if code:
        raise RuntimeError(f"{program} ended with {code}: {output[-800:]}")
    best = {}
    for row in rows:
        if row.get("failed"):
            continue
        cell, took = ("pair", row["ns"]) if row["row"] == "pair" else ((row["allocations"], row["max_mib"]), row["ms"])
        best[cell] = min(best.get(cell, (took, row["source"])), (took, row["source"]))
    return best


class Turns:
    """A program that runs a cell for each line of its input."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def run(self, cell):
        """Returns milliseconds and failed allocations."""
        self.process.stdin.write("{} {}\n".format(*cell))
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        row = json.loads(line)
        return row["ms"], row["failed"]


def by_turns(program, rmm):
    """Returns for each cell the medians of the pool and of RMM's best resource, their ratio, and the failures.

    A busy host halves a program's speed for seconds, so neighbouring runs are compared. Where the kernel places a
    program decides its speed too, so both programs start repeatedly."""
    peers = os.path.join(os.path.dirname(program), "rmm")
    starts = {cell: [] for cell in RMM}
    for _ in range(STARTS):
        with Turns(program, "turns", str(SHARE)) as pool:
            for source in {rmm[cell][1] for cell in RMM}:
                with Turns(peers, "turns", source, str(SHARE)) as peer_:
                    for cell in (cell for cell in RMM if rmm[cell][1] == source):
                        starts[cell].append(compared(pool, peer_, cell))
    found = {}
    for cell, rows in starts.items():
        ms, theirs, ratio = (statistics.median(row[at] for row in rows) for at in range(3))
        found[cell] = ms, theirs, 1 / ratio, *(sum(row[at] for row in rows) for at in (3, 4))
    return found


def compared(one, other, cell):
    """Runs two programs by turns. Returns the medians of their times and of the ratios, and both failures."""
    one.run(cell), other.run(cell)
    rows = []
    for number in range(TURNS[cell[0]]):
        # The program that runs second finds the other one's data in the processor's caches.
        first, second = (one, other) if number % 2 else (other, one)
        took = {first: first.run(cell), second: second.run(cell)}
        rows.append((*took[one], *took[other]))
    ours, our_failures, theirs, their_failures = zip(*rows)
    ratio = statistics.median(mine / yours for mine, yours in zip(ours, theirs))
    return statistics.median(ours), statistics.median(theirs), ratio, sum(our_failures), sum(their_failures)


def random(program):
    """Runs RMM's nine cells, and counts failed allocations."""
    rmm = peer(program)
    turns = by_turns(program, rmm) if all(source != "another day" for _, source in rmm.values()) else {}
    rows, code, output = rows_of([program], "random")
    driver, driver_code, driver_output = rows_of([program], "native")
    native = {(row["allocations"], row["max_mib"]): row["ms"] for row in driver}
    for row in rows:
        if row["row"] != "random":
            continue
        cell = row["allocations"], row["max_mib"]
        best, resource = rmm[cell]
        ms, failed, ratio, theirs = row["ms"], row["failed"], best / row["ms"], 0
        if row["source"] == "pool" and cell in turns:
            ms, best, ratio, more, theirs = turns[cell]
            failed += more
        wrong = None
        if failed or theirs:
            wrong = f"{failed} allocations failed, {theirs} of RMM's"
        elif ratio < AHEAD:
            wrong = f"goal {AHEAD}x"
        took = f"{ms:.3g} ms ({ms * 1e6 / 2 / cell[0]:.0f} ns a step)"
        beside = f"RMM ({resource}) {best:.3g} ms: {ratio:.2f}x; driver's pool {native.get(cell, 0):.3g} ms: "
        beside += f"{native.get(cell, 0) / ms:.1f}x"
        yield f"{row['source']}: {cell[0]} to {cell[1]} MiB", took, beside, wrong
    left = next((row for row in rows if row["row"] == "left"), None)
    yield "what is left after all", show(left), "", output[-800:] if code or left is None else None
    if driver_code:
        yield "the driver's pool", driver_output[-800:], "", f"exit code {driver_code}"


def earlier(program):
    """Runs the cells and the pairs by turns in the pool of an earlier commit and in this one's."""
    other = os.path.join(os.path.dirname(program), "earlier")
    if not os.path.exists(other):
        return
    starts = {cell: [] for cell in RMM}
    for _ in range(STARTS):
        with Turns(program, "turns", str(SHARE)) as pool, Turns(other, "turns", str(SHARE)) as before:
            for cell in RMM:
                starts[cell].append(compared(pool, before, cell))
    for cell, rows in starts.items():
        yield judged(f"{cell[0]} to {cell[1]} MiB", "ms", rows)
    # The driver's pool shows how much the host's speed changes between the turns.
    pairs = {}
    for number in range(STARTS):
        took = {}
        for one in (program, other) if number % 2 else (other, program):
            took[one], code, output = rows_of([one], "pair")
            if code:
                raise RuntimeError(output)
        for mine, yours in zip(took[program], took[other], strict=True):
            title = f"pair, {mine['bytes']} bytes, {mine['threads']} threads: {mine['source']}"
            pairs.setdefault(title, []).append((mine["ns"], yours["ns"], mine["ns"] / yours["ns"]))
    for title, rows in pairs.items():
        yield judged(title, "ns", rows)


def judged(title, unit, rows):
    """Makes the row of several starts of both programs, of times of this one, of the earlier one, and their ratios."""
    took, theirs, _ = (statistics.median(row[at] for row in rows) for at in range(3))
    # The ratios of single starts differ by more than any change of the pool: their mean must reach the limit.
    ratio = ratio_of([1] * len(rows), [row[2] for row in rows])
    wrong = f"at most {SLOWER}x" if ratio.low > SLOWER and "cuMemAllocAsync" not in title else None
    return f"by turns: {title}", f"{took:.3g} {unit}", f"the earlier commit {theirs:.3g} {unit}: {ratio}", wrong


def pair(program):
    """Measures one allocation and its free."""
    best, resource = peer(program)["pair"]
    goal = best * PAIR_SHARE
    rows, code, output = rows_of([program], "pair")
    native = {row["bytes"]: row["ns"] for row in rows if row["source"] == "cuMemAllocAsync"}
    for row in rows:
        if row["source"] == "cuMemAllocAsync":
            continue
        # The goal applies to the pool with its exact limit, in every thread that has a stream of its own.
        judged = row["source"] in ("pool", "pool, a stream each")
        wrong = f"goal {goal:.3g} ns" if judged and row["ns"] > goal else None
        took = f"{row['ns']:.1f} ns, best {row['best_ns']:.1f}"
        beside = f"RMM ({resource}) {best:.0f} ns: {best / row['ns']:.1f}x; driver's pool {native.get(row['bytes'], 0):.0f} ns"
        yield f"pair, {row['bytes']} bytes, {row['threads']} threads: {row['source']}", took, beside, wrong
    if code:
        yield "pair", output[-800:], "", f"exit code {code}"


def steal(program):
    """Moves a block from one stream to another and checks its data, also under compute-sanitizer."""
    for title, command in ("steal", [program]), ("steal, memcheck", sanitized(program)):
        if command is None:
            yield title, "no compute-sanitizer", "", "not run"
            continue
        rows, code, output = rows_of(command, "steal")
        yield title, show(rows[0] if rows else None), "", output[-800:] if code or not rows else None


def planted(program):
    """Plants overflows by one byte, which the guard or the sanitizer must find."""
    for how in "direct", "guarded":
        command = sanitized(program)
        if command is None:
            yield f"overflow, {how}", "no compute-sanitizer", "", "not run"
            continue
        _, code, output = rows_of(command, "planted", how)
        found = next((line.strip("= ") for line in output.splitlines() if "Invalid __global__ write" in line), None)
        yield f"overflow, {how}", found or output[-800:], "", None if found and code else "not found"
    rows, _, output = rows_of([program], "planted", "canary")
    right = rows and rows[0]["refused"] == "Corrupted"
    yield "overflow, canary", show(rows[0]) if rows else output[-800:], "", None if right else "not found"


def sources(program):
    """Runs every source of memory and the layers over it."""
    yield from clean(program, "sources")


def references(program):
    """Runs typed references, managed memory and checksums, the last ones over 1 GiB."""
    yield from clean(program, "references", "1")


def clean(program, name, *arguments):
    """Runs another program of the folder, alone and under compute-sanitizer."""
    program = os.path.join(os.path.dirname(program), name)
    # The example provokes refusals of the driver.
    checked = sanitized(program, "--report-api-errors", "no")
    for title, command in (name, [program]), (f"{name}, memcheck", checked):
        if command is None:
            yield title, "no compute-sanitizer", "", "not run"
            continue
        _, code, output = rows_of(command, *arguments)
        yield title, f"{len(output.splitlines())} lines", "", output[-1500:] if code else None


def sanitized(program, *options):
    """Runs the program under memcheck, which exits with 9 after a finding."""
    found = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if os.path.exists(path)), None)
    return found and [found, "--tool", "memcheck", "--error-exitcode", "9", *options, program]


def show(row):
    """Formats a row of the program as a cell of the table."""
    if row is None:
        return "no answer"
    return ", ".join(f"{key} {value}" for key, value in row.items() if key != "row" and value is not None)


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    program = os.path.join(os.path.abspath(arguments.folder), "runtime-bench")
    table = Table("what", "answer", "beside")
    for part in random, earlier, pair, steal, planted, sources, references:
        if arguments.only and part.__name__ not in arguments.only:
            continue
        for *cells, wrong in part(program):
            table.add(*cells, wrong=wrong)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
