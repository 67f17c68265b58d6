"""Shows on a real GPU that no process is refused memory of its quota while a neighbour's context faults.

usage: beside_faults.py ARCHIVE PROGRAM [--rounds N] [--gib N]

ARCHIVE is what `cargo e2e pack` wrote, PROGRAM what `cargo build --release --package bursar-gpu-programs --bin retained`
made. Needs root, an NVIDIA driver and gcc; no network. Starts a cluster of one node with Bursar on it. One pod starts
a process N times that allocates all of its quota, while pods beside it fault and are restarted in place. Prints one
table. Exits with 1 if a process got less than the others, or if no context faulted meanwhile.
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
from cluster import CUDA, PYTHON, REFERENCE, Cluster, pod
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
# A budget's `maxRestarts` bounds the faults of one container.
FAULTS_OF_A_POD = 100


def faults(cluster, number, gib, programs):
    """Makes a pod that faults, and is restarted in place each time."""
    command = ["/programs/retained", "restarted", "/state/faults", str(gib << 30), str(FAULTS_OF_A_POD)]
    manifest = pod(f"faults-{number}", gib + 4, command, programs)
    manifest["spec"]["containers"][0]["volumeMounts"].append({"name": "state", "mountPath": "/state"})
    manifest["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
    cluster.apply(manifest)
    return f"faults-{number}"


def phase(cluster, name):
    """Returns the pod's phase."""
    return cluster.kubectl("get", "pod", name, "--output", "jsonpath={.status.phase}")


def main():
    """Runs everything, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--gib", type=int, default=20)
    arguments = parser.parse_args()
    table = Table("what", "measured", "wanted")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        shutil.copy(arguments.program, f"{programs}/retained")
        os.chmod(f"{programs}/retained", 0o755)
        shutil.copy(os.path.join(HERE, "programs", "starts.py"), programs)
        source = [f"-I{CUDA}/include", f"{HERE}/programs/direct.c", "-o", f"{programs}/direct"]
        subprocess.run(["gcc", "-O2", *source, f"-L{CUDA}/lib64/stubs", "-lcuda", "-ldl"], check=True)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            table.say("the cluster is up")
            policy = {"action": "InPlace", "maxRestarts": 100, "windowSeconds": 86400}
            cluster.apply(
                {
                    "apiVersion": "bursar.dev/v1alpha1",
                    "kind": "GpuMemoryBudget",
                    "metadata": {"name": "default"},
                    "spec": {"deviceMemory": {"guaranteed": "128Gi"}, "contextPolicy": policy},
                }
            )
            program = ["/programs/direct", "greedy", "linear"]
            cluster.apply(pod("neighbour", 4, [PYTHON, "/programs/starts.py", str(arguments.rounds), *program], programs))
            number, ended, deadline = 0, 0, time.monotonic() + 60 + 3 * arguments.rounds
            name = faults(cluster, number, arguments.gib, programs)
            while phase(cluster, "neighbour") not in ("Succeeded", "Failed") and time.monotonic() < deadline:
                if phase(cluster, name) in ("Succeeded", "Failed"):
                    ended += phase(cluster, name) == "Succeeded"
                    cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
                    number += 1
                    name = faults(cluster, number, arguments.gib, programs)
                time.sleep(0.5)
            last, answer, log = cluster.answer("neighbour", 1)
            images = cluster.kubectl("logs", name, check=False, stderr=subprocess.DEVNULL).count("\n")
            met = ended * FAULTS_OF_A_POD + max(0, images - 1)
            table.add("faults beside it", met, "some", wrong=not met)
            answers = (answer or {}).get("answers", {})
            right = last == "Succeeded" and len(answers) == 1 and answer["rounds"] == arguments.rounds
            table.add("starts, and what each could allocate", json.dumps(answer), "all the same", wrong=None if right else f"{last}: {log[-600:]}")
            if not right:
                print(cluster.complaint()[-12000:])
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
