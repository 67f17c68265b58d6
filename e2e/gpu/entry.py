"""Measures on a real GPU what the shims cost programs at their start, and many threads and processes, by turns.

usage: entry.py ARCHIVE [--pairs N] [--state FILE] [--seconds N]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver and gcc, and a Python with torch; no network. The
script starts a cluster of one node with Bursar. Programs that use no GPU run in a pod with GPU memory and in one of the
same image without, programs that use one in the pod and directly on the machine. Figures of starts are from exec to
exit, those of `programs/many.c` of a call. The script prints one table, and exits with 1 if a row fails. No pair begins
after N seconds; with FILE the next run goes on.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

import image
from cluster import CUDA, PYTHON, REFERENCE, RESOURCE, Cluster, pod
from comparison import LEAST_PAIRS, Comparison, output
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = "import torch; assert torch.ones(1, device='cuda').item() == 1"
SMI = ["{smi}", "--query-gpu=name", "--format=csv"]
# Programs without a GPU: how often a turn starts each, and the most that a pod with GPU memory may take.
WITHOUT = {
    "/bin/true": (20, ["/bin/true"], 1.10),
    "sh -c true": (20, ["/bin/sh", "-c", "/bin/true"], 1.10),
    "python3 -S -c pass": (5, [PYTHON, "-S", "-c", "pass"], 1.10),
    "python3 -c 'import json, email'": (3, [PYTHON, "-c", "import json, email"], 1.10),
}
# Programs with one.
WITH = {
    "nvidia-smi": (3, SMI),
    "cuInit to the first kernel": (3, ["{programs}/first"]),
    "PyTorch to its first number": (1, [PYTHON, "-c", TORCH]),
}
# Calls of `programs/many.c` in a pod and directly on the machine, and the most that those but NVML's may take.
NVML, MOST_OF_MANY = "the GPU's memory by NVML", 1.05
MANY = {
    **{f"2 MiB by {count} threads": ["threads", count, pairs] for count, pairs in ((1, 4000), (8, 1000), (64, 100))},
    **{f"2 MiB by {count} processes": ["processes", count, pairs] for count, pairs in ((8, 1000), (64, 100))},
    "a fork of a process with a context": ["forks", 300],
    NVML: ["nvml", 1000],
}
# Enough for 64 contexts.
QUOTA_GIB = 48
# The most memory in KiB that the shims may add to a process that uses no GPU.
MOST_KIB = 307


def compile_programs(into):
    """Compiles the C programs, and copies the others."""
    source = os.path.join(HERE, "programs")
    include, link = f"-I{CUDA}/include", [f"-L{CUDA}/lib64/stubs", "-lcuda"]
    subprocess.run(["gcc", "-O2", f"{source}/timed.c", "-o", f"{into}/timed"], check=True)
    subprocess.run(["gcc", "-O2", include, f"{source}/first.c", "-o", f"{into}/first", *link], check=True)
    subprocess.run(["gcc", "-O2", include, f"{source}/many.c", "-o", f"{into}/many", "-pthread", *link], check=True)
    subprocess.run(["cp", f"{source}/proportional.py", into], check=True)


class Side:
    """A place where programs run."""

    def __init__(self, cluster, name, programs):
        """`name` is a pod's; none is the machine."""
        self.cluster, self.name, self.programs = cluster, name, programs
        self.smi = "/opt/nvidia-smi" if name else "nvidia-smi"

    def run(self, command):
        """Returns the JSON line of a program."""
        if self.name is None:
            return json.loads(output(command, 120))
        return json.loads(self.cluster.kubectl("exec", self.name, "--", *command, timeout=120))

    def milliseconds(self, count, command):
        """Returns the median time of some starts."""
        command = [word.format(programs=self.programs, smi=self.smi) for word in command]
        return statistics.median(self.run([f"{self.programs}/timed", str(count), *command])["ns"]) / 1e6

    def times(self, programs):
        return {name: self.milliseconds(count, command) for name, (count, command, *_) in programs.items()}

    def calls(self):
        """Returns the milliseconds of each call of `MANY`."""
        return {name: self.run([f"{self.programs}/many", *map(str, words)])["ns"][0] / 1e6 for name, words in MANY.items()}

    def kib(self, command):
        return self.run([PYTHON, f"{self.programs}/proportional.py", *command])["kib"]


def judge(table, comparison, limits, where):
    """Adds a row for each figure; a program without a limit is stated."""
    for name in comparison.figures():
        ratio, sides = comparison.ratio(name), comparison.values(name)
        cells = [f"{statistics.median(side):.3f} ms" for side in sides]
        table.add(f"{name}, {where}", *cells, ratio, **ratio.at_most(limits.get(name, math.inf)))


def main():
    """Measures all programs, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--state")
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args()
    table = Table("start", "without Bursar", "with", "ratio")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = f"{scratch}/programs"
        os.makedirs(programs)
        compile_programs(programs)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(options.archive), scratch) as cluster:
            cluster.load(archive)
            sides = {}
            for name in "without", "with":
                manifest = pod(name, QUOTA_GIB, ["sleep", "3600"], programs)
                if name == "without":
                    del manifest["spec"]["containers"][0]["resources"]["limits"][RESOURCE]
                cluster.apply(manifest)
                cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
                sides[name] = Side(cluster, name, "/programs")
            table.say("both pods run")
            bare, shim, native = sides["without"], sides["with"], Side(cluster, None, programs)
            take = {"seconds": options.seconds / 3}
            beside = Comparison("entry without a GPU", options.pairs, options.state)
            beside.take(lambda: bare.times(WITHOUT), lambda: shim.times(WITHOUT), **take)
            judge(table, beside, {name: row[2] for name, row in WITHOUT.items()}, "two pods")
            gpu = Comparison("entry with a GPU", options.pairs, options.state)
            gpu.take(lambda: native.times(WITH), lambda: shim.times(WITH), **take)
            judge(table, gpu, {}, "machine and pod")
            many = Comparison("many", max(LEAST_PAIRS, options.pairs // 2), options.state)
            many.take(native.calls, shim.calls, **take)
            judge(table, many, {name: MOST_OF_MANY for name in MANY if name != NVML}, "machine and pod")
            for name, command in {"sleep": ["sleep", "60"], "python3": [PYTHON, "-S", "-c", "import time; time.sleep(60)"]}.items():
                before, after = bare.kib(command), shim.kib(command)
                over = after - before
                table.add(f"memory of a sleeping {name} (PSS)", f"{before} KiB", f"{after} KiB", f"{over:+} KiB", wrong=over > MOST_KIB)
            for component in "agent", "operator", "relay":
                kib = cluster.proportional_kib(f"bursar-{component}")
                table.add(f"memory of the {component}'s pod, all its processes (PSS)", "", f"{kib} KiB", "", wrong=not kib)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
