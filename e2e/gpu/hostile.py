"""Shows on a real GPU that the agent finds, names and ends a tenant that takes more than its quota.

usage: hostile.py ARCHIVE [--rounds N] [--only WORD ...]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver and gcc; no network. The script starts a
cluster of one node with Bursar under `audit.policy: kill`, and an honest neighbour that allocates and frees all the
while. It makes each attack in a pod of its own, and checks that the attacker was named and ended in time and that the
neighbour has no finding and was refused nothing. Then it runs the program of another honest tenant, and prints one
table. It exits with 1 if a row fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import image
from cluster import CUDA, FINDINGS, REFERENCE, Cluster, pod
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = 2
FOUND_WITHIN, ENDED_WITHIN = 2.0, 5.0
FOUND_LATE, ENDED_LATE = 12.0, 15.0
NEIGHBOUR = "neighbour"


def ended(cluster, name, answer, found_within=FOUND_WITHIN, ended_within=ENDED_WITHIN):
    """Returns the failures in how an attacker was found and ended, and the text of its row."""
    if "signal" not in answer:
        return f"no end: {answer}", str(answer)
    found = cluster.findings(name)
    first = found[0][0] - answer["held_at"] if found else None
    shown = f"found {first:.2f} s, ended {answer['ended_s']} s, {', '.join(reason for _, reason, _ in found)}" if found else f"not found: {answer}"
    if first is None or first > found_within:
        return f"found after {first} s, goal {found_within}", shown
    if answer["signal"] != 9 or answer["ended_s"] > ended_within:
        return f"signal {answer['signal']} after {answer['ended_s']} s, goal {ended_within}", shown
    return None, shown


def ended_late(cluster, name, answer):
    """Returns what `ended` does, for memory that the driver lists for no living process."""
    return ended(cluster, name, answer, FOUND_LATE, ENDED_LATE)


def held(cluster, name, answer):
    """Returns the failures in allocations granted while memory of the container's exited processes was held."""
    right = answer.get("while_held") == OUT_OF_MEMORY and answer.get("after") == 0
    return None if right else "given twice", json.dumps(answer)


def honest(cluster, name, answer):
    """Checks that an honest program gets its quota, and that no finding names it."""
    findings = cluster.findings(name)
    return (f"accused: {findings}" if findings else None), f"got {answer.get('got_mib')} MiB"


ROWS = (
    ("20 GiB without a context", 4, ["/programs/hostile", "without-context", "20480"], ended),
    ("20 GiB without a context, with a session", 4, ["/programs/hostile", "with-session", "20480"], ended),
    ("3 GiB exported, 3 GiB without a context", 4, ["/programs/hostile", "exported-twice", "3072"], ended),
    ("8 GiB, the first process has another root", 1, ["/programs/hostile", "chroot", "8192"], ended),
    ("8 GiB, the first process ended its main thread", 1, ["/programs/hostile", "ended-main-thread", "8192"], ended),
    ("8 GiB by a sidecar, with its neighbour's device nodes", 1, ["/programs/hostile", "sidecar", "8192"], ended),
    ("8 GiB of a dead process, kept by its child", 1, ["/programs/hostile", "forked", "8192"], ended_late),
    ("20 GiB created past the shim, imported and used", 4, ["/programs/hostile", "imported", "20480"], ended_late),
    ("5 GiB exported, unsaid, parked in a socket", 8, ["/programs/hostile", "parked", "5120"], held),
    ("honest program", 4, ["/programs/direct", "greedy", "linear"], honest),
)


def with_server(manifest):
    """Gives the pod's GPU memory to a second container, which passes its device nodes to the first."""
    spec = manifest["spec"]
    (attacker,) = spec["containers"]
    server = attacker | {"name": "server", "command": ["/programs/hostile", "pass-nodes", "0"]}
    wait = "while ! test -e /shared/ready; do sleep 0.1; done"
    run = f"LD_PRELOAD=/programs/passed.so LD_LIBRARY_PATH=/shared exec {' '.join(attacker['command'])}"
    attacker = attacker | {"command": ["sh", "-c", f"{wait}; {run}"], "resources": {}}
    shared = [{"name": "shared", "mountPath": "/shared"}]
    spec["containers"] = [each | {"volumeMounts": each["volumeMounts"] + shared} for each in (attacker, server)]
    spec["volumes"].append({"name": "shared", "emptyDir": {}})
    return manifest


def wronged(cluster):
    """Returns what happened to the honest neighbour, or None."""
    findings = cluster.findings(NEIGHBOUR, reasons=(*FINDINGS, "GpuQuotaNotEnforced"))
    phase = cluster.kubectl("get", "pod", NEIGHBOUR, "--output", "jsonpath={.status.phase}")
    lines = cluster.kubectl("logs", NEIGHBOUR).splitlines()
    if findings or phase != "Running" or not lines or json.loads(lines[-1])["refused"]:
        return f"the neighbour is {phase}, {lines[-1:]}, {findings}"
    return None


def compile_programs(into):
    """Builds the programs of the attacks."""
    for name in "hostile", "direct":
        source = [f"-I{CUDA}/include", f"{HERE}/programs/{name}.c", "-o", f"{into}/{name}"]
        subprocess.run(["gcc", "-O2", *source, f"-L{CUDA}/lib64/stubs", "-lcuda", "-ldl", "-lpthread"], check=True)
    source = [f"{HERE}/programs/passed.c", "-o", f"{into}/passed.so"]
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *source, "-ldl"], check=True)


def attack(cluster, programs, rows, table):
    """Makes each attack beside the honest neighbour, and adds its row."""
    cluster.apply(pod(NEIGHBOUR, 8, ["/programs/hostile", NEIGHBOUR, "1024"], programs))
    cluster.kubectl("wait", f"pod/{NEIGHBOUR}", "--for=condition=Ready", "--timeout=60s")
    for number, (title, gib, command, judge) in enumerate(rows):
        name = f"row-{number}"
        manifest = pod(name, gib, command, programs)
        cluster.apply(with_server(manifest) if "sidecar" in command else manifest)
        _, answer, log = cluster.answer(name, 60)
        time.sleep(1)
        wrong, shown = judge(cluster, name, answer) if answer else ("no answer", log[-1500:])
        wrong = wrong or wronged(cluster)
        table.add(title, gib, shown, wrong=wrong)
        if wrong:
            print(cluster.complaint()[-6000:])
        # A container whose first process has no main thread may not end, which is no reason to wait.
        cluster.kubectl("delete", "pod", name, "--now", "--timeout=20s", check=False)
    cluster.kubectl("delete", "pod", NEIGHBOUR, "--now", "--wait=true")


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="words that a row's command must have")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or set(arguments.only) & set(row[2])]
    table = Table("attack", "quota GiB", "seen")
    with tempfile.TemporaryDirectory() as scratch:
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        os.chmod(scratch, 0o755)
        compile_programs(programs)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            table.say("the cluster is up, findings are killed")
            attack(cluster, programs, rows * arguments.rounds, table)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
