"""Shows on real GPUs that the agent runs an allocator runtime for each, what each costs, and that memory outlives it.

usage: runtimes.py ARCHIVE PROGRAM

ARCHIVE is the output of `cargo e2e pack`, PROGRAM that of `cargo build --release --package bursar-gpu-programs --bin
retained`. Needs root and NVIDIA GPUs; no network. The script starts a cluster of one node with Bursar. It kills every
allocator runtime at once while a pod retains memory, and prints one table. It exits with 1 if a row fails.
"""

import argparse
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import image
from cluster import NAMESPACE, REFERENCE, Cluster, pod
from table import Table

LEASED_GIB = 4
FAULTS = 90
AT_ONCE = 8


def provisioners():
    """Returns the process of each GPU's allocator runtime, as pids by the GPU's UUID."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
                words = file.read().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.path.basename(words[0]) == "bursar-provisioner" and "--gpu" in words:
            found[words[words.index("--gpu") + 1]] = int(pid)
    return found


def started_at(pid):
    """Returns the time at which the process was made, to 10 ms, as seconds since the epoch."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def memory_kib(pid):
    """Returns the resident and the proportional set size of the process in KiB."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        fields = dict(line.split()[:2] for line in file if ":" in line.split()[0])
    return int(fields["Rss:"]), int(fields["Pss:"])


def last_starts(cluster):
    """Returns the time of each GPU's last finished start by the agent's log, as seconds since the epoch."""
    started = {}
    for line in cluster.kubectl("logs", "daemonset/bursar-agent", "--namespace", NAMESPACE).splitlines():
        if "provisioner started" not in line:
            continue
        record = json.loads(line)
        fields = record.get("fields", record)
        at = datetime.datetime.fromisoformat(record["timestamp"].replace("Z", "+00:00"))
        started[fields["gpu"]] = at.timestamp()
    return started


def gpu_node(cluster):
    """Returns the node's GpuNode."""
    return json.loads(cluster.kubectl("get", "gpunodes", "--output", "json"))["items"][0]


def states(cluster):
    """Returns the status of each GPU's allocator runtime by the GPU's UUID."""
    return {gpu["uuid"]: gpu.get("runtime", {}) for gpu in gpu_node(cluster)["status"]["gpus"]}


def until(condition, bound=60):
    """Waits until `condition` is true, and returns whether it became true in `bound` seconds."""
    deadline = time.monotonic() + bound
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def judge_processes(cluster, table, title, starts):
    """Adds rows on the states, the starts and the memory of the processes, and that they have no context."""

    def ready():
        return all(state.get("state") == "Ready" and state["starts"] == starts for state in states(cluster).values())

    right = until(ready)
    table.add(f"{title}: ready, start {starts}", json.dumps(states(cluster)), wrong=not right)
    started, pids = last_starts(cluster), provisioners()
    took = [started[gpu] - started_at(pid) for gpu, pid in pids.items()]
    table.add(f"{title}: from the process to its readiness", ", ".join(f"{seconds:.2f} s" for seconds in took), wrong=len(took) != len(states(cluster)))
    sizes = [memory_kib(pid) for pid in pids.values()]
    table.add(f"{title}: resident, proportional memory", ", ".join(f"{rss / 1024:.1f}, {pss / 1024:.1f} MiB" for rss, pss in sizes))
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    apps = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split()
    held = [pid for pid in pids.values() if str(pid) in apps]
    table.add(f"{title}: processes that NVML shows on a GPU", len(held), wrong=bool(held))


def start_at_once(scratch, table):
    """Adds rows on processes that start at once, by turns on the GPUs, beside those of the agent."""
    running = provisioners()
    program = os.path.join(scratch, "provisioner")
    shutil.copy(f"/proc/{next(iter(running.values()))}/exe", program)
    gpus, ends, processes = sorted(running), [], []
    begun = time.monotonic()
    for number in range(AT_ONCE):
        gpu = gpus[number % len(gpus)]
        end, theirs = socket.socketpair()
        end.settimeout(60)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        processes.append(subprocess.Popen([program, "--gpu", gpu], stdin=theirs, env=environment))
        theirs.close()
        ends.append(end)
    took, ready = [], 0
    for end in ends:
        # An unread rest of the message would make the close an error.
        ready += bool(end.recv(4096))
        took.append(time.monotonic() - begun)
    title = f"{AT_ONCE} processes at once"
    table.add(f"{title}: the first and the last ready after", f"{took[0]:.2f}, {took[-1]:.2f} s", wrong=ready != AT_ONCE)
    sizes = [memory_kib(process.pid) for process in processes]
    largest = [max(size) / 1024 for size in zip(*sizes)]
    table.add(f"{title}: resident, proportional memory at most", f"{largest[0]:.1f}, {largest[1]:.1f} MiB")
    for end in ends:
        end.close()
    ended = [process.wait(timeout=60) for process in processes]
    table.add(f"{title}: exit codes once the agent's end closes", sorted(set(ended)), wrong=set(ended) != {0})


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("program")
    arguments = parser.parse_args()
    table = Table("what", "seen")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        shutil.copy(arguments.program, f"{programs}/retained")
        os.chmod(f"{programs}/retained", 0o755)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            table.say("the cluster is up")
            judge_processes(cluster, table, "all at once", 1)
            start_at_once(scratch, table)
            policy = {"action": "InPlace", "maxRestarts": 100, "windowSeconds": 86400}
            budget = {"apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": {"name": "default"}}
            cluster.apply(budget | {"spec": {"deviceMemory": {"guaranteed": "64Gi"}, "contextPolicy": policy}})
            # Until the operator has told the agent, a fault ends the process.
            if not until(lambda: cluster.kubectl("get", "gpunamespaces", "--output", "name").strip()):
                raise SystemExit("the operator wrote no context policy in 60 s")
            command = ["/programs/retained", "restarted", "/state/faults", str(LEASED_GIB << 30), str(FAULTS)]
            manifest = pod("retains", LEASED_GIB + 4, command, programs)
            manifest["spec"]["containers"][0]["volumeMounts"].append({"name": "state", "mountPath": "/state"})
            manifest["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
            cluster.apply(manifest)

            def lent():
                return sum(state.get("lent") == f"{LEASED_GIB}Gi" for state in states(cluster).values())

            right = until(lambda: lent() == 1)
            table.add(f"{LEASED_GIB} GiB lent by one GPU's runtime", json.dumps(states(cluster)), wrong=not right)
            for pid in provisioners().values():
                os.kill(pid, 9)
            judge_processes(cluster, table, "killed at once", 2)
            phase, _, log = cluster.answer("retains", 120)
            images = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
            found = sum(row["found"] for row in images)
            wrong = log[-800:] if phase != "Succeeded" or found != FAULTS else None
            table.add("images that found their memory after a fault", f"{found} of {FAULTS}", wrong=wrong)
            cluster.kubectl("delete", "pod", "retains", "--now", "--wait=true")
            ended = until(lambda: all(state.get("lent") == "0" for state in states(cluster).values()))
            table.add("nothing is lent after the pod's end", json.dumps(states(cluster)), wrong=not ended)
            if any(row[-1] != "right" for row in table.rows):
                print(cluster.complaint()[-8000:])
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
