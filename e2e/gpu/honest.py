"""Shows on a real GPU that the agent accuses no honest program under `audit.policy: kill`.

usage: honest.py ARCHIVE [--seconds N]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver, nvcc and gcc, and a Python with torch, triton,
cupy, jax and numba; no network. The script starts a cluster of one node with Bursar and runs all programs at the same
time, each in a pod of its own, for N seconds. Most start again and again, allocate their whole quota and compute. Three
run all the while, and two more over both GPUs where the machine has two, one of them as a user that is not root. Prints
one table, and exits with 1 for a finding, a killed process or a wrong result.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import image
from cluster import CUDA, FINDINGS, PYTHON, REFERENCE, Cluster, pod
from enforcement import compile_programs
from table import Table
from two_gpus import GPUS, ranks

QUOTA_GIB = 4
# A start of JAX beside a dozen busy pods takes tens of seconds.
LAST_START_SECONDS = 90


def programs(seconds):
    """Returns each program: its name, command and variables."""
    again = [PYTHON, "/programs/starts.py", f"{seconds}s"]
    quota = [*again, PYTHON, "/programs/quota.py"]
    alloc = "PYTORCH_CUDA_ALLOC_CONF"
    yield "torch", [*quota, "torch"], {}
    yield "torch, expandable segments", [*quota, "torch"], {alloc: "expandable_segments:True"}
    yield "torch, cudaMallocAsync", [*quota, "torch"], {alloc: "backend:cudaMallocAsync"}
    yield "triton", [*quota, "triton"], {}
    yield "cupy", [*quota, "cupy"], {}
    yield "cupy, async pool", [*quota, "cupy-async"], {}
    yield "jax", [*quota, "jax"], {}
    yield "numba", [*quota, "numba"], {"CUDA_HOME": CUDA}
    yield "VMM sleep and wake", [*again, "/programs/direct", "sleep-wake", "2048"], {}
    yield "graph memory", [*again, "/programs/direct", "graph", "1024"], {}
    yield "torch all the while", [PYTHON, "/programs/steady.py", str(seconds)], {}
    yield "2,000 captured graphs all the while", [PYTHON, "/programs/graphs.py", str(seconds)], {}
    yield "NCCL all the while", [PYTHON, "/programs/ranks.py", "ddp", str(seconds)], {}


def wrong(answer):
    """Returns what is wrong with a program's answer, or None."""
    if "answers" in answer:
        if len(answer["answers"]) != 1:
            return "the starts had different answers"
        (text,) = answer["answers"]
        try:
            start = json.loads(text)
        except ValueError:
            return text
        return None if start.get("ran_on", True) and start.get("answer", 0) == 0 else text
    parts = answer.get("ranks", [answer])
    if not all(part.get("rounds", part.get("steps")) for part in parts):
        return "nothing was computed"
    return None if all(part["wrong"] == 0 for part in parts) else "a result was wrong"


def main():
    """Runs everything, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--seconds", type=int, default=400)
    arguments = parser.parse_args()
    table = Table("program", "answer")
    with tempfile.TemporaryDirectory() as scratch:
        folder = os.path.join(scratch, "programs")
        os.mkdir(folder)
        os.chmod(scratch, 0o755)
        compile_programs(folder)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            table.say("the cluster is up, findings are killed")
            names = {}
            for number, (title, command, env) in enumerate(programs(arguments.seconds)):
                names[title] = f"honest-{number}"
                cluster.apply(pod(names[title], QUOTA_GIB, command, folder, env.items()))
            bound = arguments.seconds + LAST_START_SECONDS
            gpus = subprocess.run(["nvidia-smi", "--list-gpus"], check=True, text=True, stdout=subprocess.PIPE).stdout
            if len(gpus.splitlines()) == GPUS:
                for title, name, user in (("DDP over both GPUs", "root", None), ("the same as user 1000", "user", 1000)):
                    cluster.apply(ranks(name, GPUS * QUOTA_GIB, folder, "ddp", arguments.seconds, user=user))
                    names[title] = name
            for title, name in names.items():
                phase, answer, log = cluster.answer(name, bound)
                # All programs end at the same time, so the others have little more.
                bound = LAST_START_SECONDS
                right = phase == "Succeeded" and answer is not None
                table.add(title, json.dumps(answer), wrong=wrong(answer) if right else f"{phase}: {log[-1500:]}")
            minutes = len(names) * arguments.seconds // 60
            findings = cluster.findings(reasons=(*FINDINGS, "GpuQuotaNotEnforced"))
            table.add(f"findings in {minutes} minutes of programs", len(findings), wrong=str(findings) if findings else None)
            if findings:
                print(cluster.complaint()[-8000:])
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
