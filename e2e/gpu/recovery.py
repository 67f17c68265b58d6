"""Shows on a real GPU how soon a container computes again after faults and kills, with its retained memory.

usage: recovery.py ARCHIVE PROGRAM [--gib N] [--times N]

ARCHIVE is the output of `cargo e2e pack`, PROGRAM that of `cargo build --release --package bursar-gpu-programs --bin
retained`. Needs root, an NVIDIA driver and a Python with torch; no network. The script starts a cluster of one node with
Bursar. The main process of one pod faults repeatedly and is executed again in its place, a second pod has its child
killed, and a third pod computes beside them. The script prints one table, and exits with 1 if a row fails. No recovery
may take longer than without Bursar, in a process of the node with as much memory that executes itself again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import image
from cluster import PYTHON, REFERENCE, Cluster, pod
from table import Table, milliseconds, percentile

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = "exec", "init", "context", "attach", "verify", "whole"
FLOOR = "fault", "exec", "init", "context", "take", "whole"


def floor(table, program, size, times):
    """Returns rows on the times of driver and kernel without Bursar, and the 99th percentile of the total."""
    made = subprocess.run([program, "floor", size, str(times)], capture_output=True, text=True, timeout=30 + 2 * times)
    images = [json.loads(line) for line in made.stdout.splitlines()]
    table.add("without Bursar: faults", str(len(images)), str(times), wrong=made.stderr[-600:] if len(images) != times else None)
    for step in FLOOR if images else ():
        table.add(f"without Bursar: {step}", milliseconds([row[f"{step}_ns"] for row in images]), "")
    return percentile([row["whole_ns"] for row in images], 99) if images else 0


def judge(table, name, times, log, goal):
    """Returns rows on the images of one pod, of which the first created the memory; `goal` in ns."""
    images = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    first, *later = images or [{"checksum": None}]
    right = sum(row["found"] and row["checksum"] == first["checksum"] for row in later)
    wrong = None if right == times and not first["found"] else log[-1500:]
    table.add(f"{name}: found the retained memory", f"{right} of {len(later)}", f"all {times}", wrong=wrong)
    for step in STEPS if later else ():
        spans = [row[f"{step}_ns"] for row in later]
        whole = step == "whole"
        what = "to the first correct kernel" if whole else step
        late = whole and percentile(spans, 99) > goal
        table.add(f"{name}: {what}", milliseconds(spans), f"p99 <= {goal / 1e6:.0f} ms" if whole else "", wrong=late)


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("program")
    parser.add_argument("--gib", type=int, default=40)
    parser.add_argument("--times", type=int, default=100)
    arguments = parser.parse_args()
    gib, times = arguments.gib, arguments.times
    table = Table("what", "measured", "wanted")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        shutil.copy(arguments.program, f"{programs}/retained")
        os.chmod(f"{programs}/retained", 0o755)
        for name in "steady.py", "killed.py":
            shutil.copy(os.path.join(HERE, "programs", name), programs)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            table.say("the cluster is up, findings are killed")
            policy = {"action": "InPlace", "maxRestarts": 100, "windowSeconds": 86400}
            cluster.apply(
                {
                    "apiVersion": "bursar.dev/v1alpha1",
                    "kind": "GpuMemoryBudget",
                    "metadata": {"name": "default"},
                    "spec": {"deviceMemory": {"guaranteed": "128Gi"}, "contextPolicy": policy},
                }
            )
            cluster.apply(pod("beside", 16, [PYTHON, "/programs/steady.py", str(3 * times)], programs))
            cluster.kubectl("wait", "pod/beside", "--for=condition=Ready", "--timeout=60s")
            size = str(gib << 30)
            goal = floor(table, arguments.program, size, times)
            # The audit rightly finds the floor's processes of the host.
            begun = time.time()
            for name, command in (
                ("faults", ["/programs/retained", "restarted", "/state/faults", size, str(times)]),
                ("SIGKILLs", [PYTHON, "/programs/killed.py", "/programs/retained", size, str(times)]),
            ):
                manifest = pod(name.lower(), gib + 4, command, programs)
                # The number of faults survives the images of a process, but not the pod.
                manifest["spec"]["containers"][0]["volumeMounts"].append({"name": "state", "mountPath": "/state"})
                manifest["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
                manifest["spec"]["restartPolicy"] = "OnFailure"
                cluster.apply(manifest)
                phase, _, log = cluster.answer(name.lower(), 30 + times)
                judge(table, name, times, log, goal)
                path = "jsonpath={.status.containerStatuses[0].restartCount}"
                restarts = cluster.kubectl("get", "pod", name.lower(), "--output", path)
                wrong = phase != "Succeeded" or restarts != "0"
                table.add(f"{name}: the pod, restarts by the kubelet", f"{phase}, {restarts}", "Succeeded, 0", wrong=wrong)
                if wrong:
                    table.say(cluster.complaint())
                cluster.kubectl("delete", "pod", name.lower(), "--now", "--wait=true")
            phase, beside, log = cluster.answer("beside", 60 + 3 * times)
            wrong = log[-600:] if phase != "Succeeded" or beside is None or beside["wrong"] else None
            table.add("a neighbour that computes", json.dumps(beside), "0 wrong", wrong=wrong)
            if wrong:
                table.say(cluster.complaint())
            findings = [finding for finding in cluster.findings() if finding[0] > begun]
            table.add("findings about honest programs", len(findings), 0, wrong=str(findings) if findings else None)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
