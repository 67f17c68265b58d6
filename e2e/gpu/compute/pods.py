#!/usr/bin/env python3
"""Shows on a real GPU that pods with a weight get their parts of its compute time, on a cluster.

usage: sudo pods.py ARCHIVE [--seconds N] [--wait N]

ARCHIVE is the output of `cargo e2e pack`. Needs one otherwise unused NVIDIA GPU, root, and a Python with torch. The
script starts a cluster of one node with Bursar, waits for the agent's own test of the GPU, and runs pairs of programs of
`kinds.py` in pods: without weights, at 75 : 25 and at 50 : 50 with one pod of three processes of which one computes.
Prints the parts of each pair by what the pods finish alone, and exits with 1 for a wrong one or for a finding.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import image
from cluster import FINDINGS, PYTHON, REFERENCE, Cluster, pod
from table import Table

HERE = pathlib.Path(__file__).parent
GIB, START_SECONDS = 24, 60
WEIGHT = "bursar.dev/gpu-compute"
# The most that a part may differ from its weight's.
OTHER = 0.05


class Pods:
    """Runs programs in pods, and knows what each kind finishes alone."""

    def __init__(self, cluster, folder, seconds):
        self.cluster, self.folder, self.seconds, self.alone, self.count = cluster, folder, seconds, {}, 0

    def run(self, *programs):
        """Runs (kind, weight, idle processes) at once, and returns what each finished a second in their common time."""
        self.count += 1
        names = []
        for at, (kind, weight, idle) in enumerate(programs):
            names.append(f"{kind}-{self.count}-{at}")
            command = [PYTHON, "/programs/kinds.py", kind, "-", str(self.seconds), str(idle)]
            one = pod(names[-1], GIB, command, self.folder)
            if weight:
                one["spec"]["containers"][0]["resources"]["limits"][WEIGHT] = str(weight)
            self.cluster.apply(one)
        status = None
        rows = []
        for name in names:
            if status is None:
                time.sleep(self.seconds / 2 + 10)
                status = self.gpu()
            phase, answer, log = self.cluster.answer(name, self.seconds + START_SECONDS)
            if phase != "Succeeded" or not answer:
                raise RuntimeError(f"{name}: {phase}: {log[-800:]}")
            rows.append(answer["finished"])
            self.cluster.kubectl("delete", "pod", name, "--wait=true")
        # The first seconds are before the agent knows the processes.
        begin, end = max(row[0][0] for row in rows) + 5, min(row[-1][0] for row in rows)
        if end < begin + self.seconds / 3:
            raise RuntimeError(f"the pods ran at once for {end - begin:.1f} s only")
        return [(count(row, end) - count(row, begin)) / (end - begin) for row in rows], status

    def shares(self, *programs):
        rates, status = self.run(*programs)
        return [rate / self.alone[kind] for rate, (kind, _, _) in zip(rates, programs)], status

    def gpu(self):
        """Returns the GPU's compute status."""
        nodes = json.loads(self.cluster.kubectl("get", "gpunodes", "--output", "json"))["items"]
        return nodes[0]["status"]["gpus"][0].get("compute", {})


def count(row, at):
    """Returns what was finished at a time, between the two samples around it."""
    for (t0, n0), (t1, n1) in zip(row, row[1:]):
        if t0 <= at <= t1:
            return n0 + (n1 - n0) * (at - t0) / (t1 - t0)
    return row[-1][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--wait", type=int, default=120, help="the most seconds for the agent's test")
    options = parser.parse_args()
    table = Table("pods", "shares", "sum", "answer")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        folder = os.path.join(scratch, "programs")
        os.mkdir(folder)
        shutil.copy(HERE / "kinds.py", folder)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(options.archive), scratch) as cluster:
            cluster.load(archive)
            pods = Pods(cluster, folder, options.seconds)
            begun = time.monotonic()
            while (status := pods.gpu()).get("state") in (None, "NotTested") and time.monotonic() < begun + options.wait:
                time.sleep(1)
            took = time.monotonic() - begun
            table.add("the agent's test of the idle GPU", "", "", f"{status}, after {took:.0f} s", wrong=status.get("state") != "Enforced" and cluster.complaint()[-3000:])
            try:
                for kind in "gemm", "decode":
                    (pods.alone[kind],), _ = pods.run((kind, None, 0))
                    table.say(f"{kind} alone: {pods.alone[kind]:.1f} a second")
                for one, other, part in (
                    (("gemm", None, 0), ("decode", None, 0), None),
                    (("gemm", 75, 0), ("decode", 25, 0), 0.75),
                    (("gemm", 25, 0), ("decode", 75, 0), 0.25),
                    (("gemm", 50, 2), ("gemm", 50, 0), 0.5),
                ):
                    shares, status = pods.shares(one, other)
                    own = shares[0] / sum(shares)
                    names = " + ".join(f"{kind} {weight or 'without'}{f', {idle} idle processes' if idle else ''}" for kind, weight, idle in (one, other))
                    table.add(names, " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", f"part {own:.3f}; {status}", wrong=part is not None and abs(own - part) > OTHER)
            except Exception as error:
                table.add("stopped early", "", "", "", wrong=f"{error}\n{cluster.complaint()[-2500:]}")
            found = cluster.findings(reasons=(*FINDINGS, "GpuComputeNotHeld"))
            table.add("findings", "", "", str(len(found)), wrong=str(found) if found else None)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
