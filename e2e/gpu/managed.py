"""Shows on a real GPU that memory of a dead exporter is given to nobody until managed memory has left.

usage: managed.py ARCHIVE [--covered GIB] [--oversubscribed GIB]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver, gcc and cgroup v2; no network. The script
starts a cluster of one node with Bursar. Pods with managed memory use it while a pod shares memory between processes
that die, and a neighbour allocates and frees its quota. A second pod does the same once the others have ended. The
script prints one table, and exits with 1 if a row fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import image
from cluster import CUDA, REFERENCE, Cluster, pod
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = 2
MANAGED = "bursar.dev/managed-memory-gib"
CONTEXT_GIB = 2
NEIGHBOUR_GIB, EXPORTED_GIB = 24, 5
# The exporter's program waits 60 s for its memory, longer than the pods beside it run.
HELD_S, RUNNING_S = 3, 40
# The least and the most time from the close of the memory until it is granted.
GRANTED_AFTER_MS = {"beside": (5_000, 60_000), "alone": (0, 5_000)}


def with_host_memory(manifest, gib, managed_gib=0):
    """Limits the pod's host memory, and requests oversubscribed managed memory."""
    limits = manifest["spec"]["containers"][0]["resources"]["limits"]
    limits["memory"] = f"{gib}Gi"
    if managed_gib:
        limits[MANAGED] = str(managed_gib)
    return manifest


def add_exporter(cluster, table, programs, when):
    """Adds the row of a pod whose process shares memory and is killed."""
    name = f"exporter-{when}"
    command = ["/programs/direct", "parked", str(EXPORTED_GIB << 10), str(HELD_S)]
    cluster.apply(pod(name, EXPORTED_GIB + 3, command, programs))
    _, answer, log = cluster.answer(name, 90)
    title = f"{EXPORTED_GIB} GiB in a socket for {HELD_S} s after its process was killed, {when}"
    right = answer and answer.get("while_held") == OUT_OF_MEMORY and answer.get("after") == 0
    least, most = GRANTED_AFTER_MS[when]
    right = right and least <= answer["waited_ms"] <= most
    shown = f"refused meanwhile, granted {answer['waited_ms']} ms after its close" if right else (answer or log[-800:])
    table.add(title, shown, wrong=not right)
    cluster.kubectl("delete", "pod", name, "--now", "--wait=true")


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--covered", type=int, default=4, help="managed memory in GiB of the pod without a managed quota")
    parser.add_argument("--oversubscribed", type=int, default=8, help="managed memory in GiB of the pod with one")
    arguments = parser.parse_args()
    covered_gib, oversubscribed_gib = arguments.covered, arguments.oversubscribed
    table = Table("what", "seen")
    with tempfile.TemporaryDirectory() as scratch:
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        os.chmod(scratch, 0o755)
        for name in "managed", "direct":
            source = [f"-I{CUDA}/include", f"{HERE}/programs/{name}.c", "-o", f"{programs}/{name}"]
            subprocess.run(["gcc", "-O2", *source, f"-L{CUDA}/lib64/stubs", "-lcuda"], check=True)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.configure('managed-memory-capacity = "0"', f'managed-memory-capacity = "{2 * oversubscribed_gib}Gi"')
            table.say("the cluster is up, managed memory is offered")
            pods = {
                "covered": with_host_memory(
                    pod("covered", covered_gib + CONTEXT_GIB, ["/programs/managed", "resident", str(covered_gib << 10), str(RUNNING_S)], programs),
                    2 * covered_gib,
                ),
                "oversubscribed": with_host_memory(
                    pod("oversubscribed", CONTEXT_GIB, ["/programs/managed", "resident", str(oversubscribed_gib << 10), str(RUNNING_S)], programs),
                    2 * oversubscribed_gib,
                    oversubscribed_gib,
                ),
                "neighbour": pod(
                    "neighbour",
                    NEIGHBOUR_GIB + CONTEXT_GIB,
                    ["/programs/managed", "neighbour", str(NEIGHBOUR_GIB << 10), str(RUNNING_S)],
                    programs,
                ),
            }
            for manifest in pods.values():
                cluster.apply(manifest)
            add_exporter(cluster, table, programs, "beside")
            for name in pods:
                phase, answer, log = cluster.answer(name, RUNNING_S)
                wrong = not answer or phase != "Succeeded" or answer.get("wrong") or answer.get("refused")
                table.add(f"{name} meanwhile", json.dumps(answer) if answer else log[-800:], wrong=bool(wrong))
            add_exporter(cluster, table, programs, "alone")
            findings = cluster.findings()
            table.add("findings", len(findings), wrong=str(findings) if findings else None)
            if any(row[-1] != "right" for row in table.rows):
                print(cluster.complaint()[-8000:])
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
