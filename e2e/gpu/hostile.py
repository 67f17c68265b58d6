"""Shows on a real GPU that the agent finds, names and ends a tenant that takes more than its quota.

usage: hostile.py ARCHIVE [--rounds N]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver and gcc; no network. The script starts a
cluster of one node with Bursar under `audit.policy: kill`, and makes each attack in a pod of its own. Then it runs the
program of an honest neighbour, and prints one table. It exits with 1 if a row fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import image
from cluster import CUDA, REFERENCE, Cluster, pod
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = 2
FOUND_WITHIN, ENDED_WITHIN = 2.0, 5.0


def ended(cluster, name, answer):
    """Returns the failures in how an attacker was found and ended, and the text of its row."""
    if "signal" not in answer:
        return f"no end: {answer}", str(answer)
    found = cluster.findings(name)
    first = found[0][0] - answer["held_at"] if found else None
    shown = f"found {first:.2f} s, ended {answer['ended_s']} s, {', '.join(reason for _, reason, _ in found)}" if found else "not found"
    if first is None or first > FOUND_WITHIN:
        return f"found after {first} s, goal {FOUND_WITHIN}", shown
    if answer["signal"] != 9 or answer["ended_s"] > ENDED_WITHIN:
        return f"signal {answer['signal']} after {answer['ended_s']} s, goal {ENDED_WITHIN}", shown
    return None, shown


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
    ("5 GiB exported, unsaid, parked in a socket", 8, ["/programs/hostile", "parked", "5120"], held),
    ("honest program", 4, ["/programs/direct", "greedy", "linear"], honest),
)


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    table = Table("attack", "quota GiB", "seen")
    with tempfile.TemporaryDirectory() as scratch:
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        os.chmod(scratch, 0o755)
        for name in "hostile", "direct":
            source = [f"-I{CUDA}/include", f"{HERE}/programs/{name}.c", "-o", f"{programs}/{name}"]
            subprocess.run(["gcc", "-O2", *source, f"-L{CUDA}/lib64/stubs", "-lcuda", "-ldl"], check=True)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            table.say("the cluster is up, findings are killed")
            for number in range(arguments.rounds * len(ROWS)):
                title, gib, command, judge = ROWS[number % len(ROWS)]
                name = f"row-{number}"
                cluster.apply(pod(name, gib, command, programs))
                _, answer, log = cluster.answer(name, 60)
                time.sleep(1)
                wrong, shown = judge(cluster, name, answer) if answer else ("no answer", log[-1500:])
                table.add(title, gib, shown, wrong=wrong)
                if wrong:
                    print(cluster.complaint()[-6000:])
                cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
