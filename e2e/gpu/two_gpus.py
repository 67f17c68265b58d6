"""Shows on two real GPUs that pods over both compute, that each GPU's quota holds, and what drains and waits do.

usage: two_gpus.py ARCHIVE [--seconds N] [--pairs N] [--state FILE] [--peers PROGRAM] [--retained PROGRAM] [--only WORD...]

ARCHIVE is the output of `cargo e2e pack`, each PROGRAM that of `cargo build --release --package bursar-gpu-programs
--bin NAME`. Needs root, two NVIDIA GPUs and a Python with torch; no network. The script starts a cluster of one node with
Bursar under `audit.policy: kill`, and prints one table. It exits with 1 if a row fails. An all-reduce runs on the
machine itself and in a pod by turns; with FILE the next run goes on with its pairs. `--only` runs the parts
whose titles contain a word: programs over both GPUs, `processor`, `faults`, `waits and drains` and the all-reduce.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import image
from cluster import PYTHON, REFERENCE, RESOURCE, Cluster, pod
from comparison import Comparison, output
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
MIB_OF_GIB = 1024
GPUS = 2
REFUSED = "the last rank ends by a refusal"
ALL_REDUCE = "all-reduce in a pod over natively, by turns"
# The least part of the bandwidth natively that a pod has.
LEAST = 0.95


def ranks(name, gib, programs, mode, seconds, annotated=True, env=(), user=None):
    """Makes a pod that runs `ranks.py`, with its GPUs by annotation or by size."""
    manifest = pod(name, gib, [PYTHON, "/programs/ranks.py", mode, str(seconds)], programs, env)
    if annotated:
        manifest["metadata"]["annotations"] = {"bursar.dev/gpus": str(GPUS)}
    if user is not None:
        manifest["spec"]["securityContext"] = {"runAsUser": user, "runAsGroup": user}
    return manifest


def judged(answer, gib):
    """Returns what is wrong with the answer of a pod of `gib` over two GPUs, or None."""
    if answer["world"] != GPUS or len(answer["ranks"]) != GPUS:
        return f"{answer['world']} GPUs"
    sees = [rank["sees_mib"] for rank in answer["ranks"]]
    if sum(sees) != gib * MIB_OF_GIB:
        return f"the ranks see {sees} MiB of {gib} GiB"
    for rank in answer["ranks"]:
        if rank.get("wrong") or not rank.get("gb_per_s"):
            return f"rank {rank}"
    return None


def shown(answer):
    """Formats the ranks of an answer as a cell."""
    if answer is None:
        return "no answer"
    return "; ".join(", ".join(f"{key} {value}" for key, value in rank.items() if key != "rank") for rank in answer["ranks"])


class Gaps:
    """Counts every container that the GpuNode lists as not enforced, from the start to the end."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.not_enforced = set()

    def look(self):
        """Reads the list, and the events of this reason."""
        for node in json.loads(self.cluster.kubectl("get", "gpunodes", "--output", "json"))["items"]:
            self.not_enforced |= {json.dumps(gap, sort_keys=True) for gap in node["status"].get("notEnforced") or []}
        events = json.loads(self.cluster.kubectl("get", "events.events.k8s.io", "--output", "json"))["items"]
        self.not_enforced |= {event["regarding"]["name"] + ": " + event.get("note", "") for event in events if event["reason"] == "GpuQuotaNotEnforced"}


def finish(cluster, table, gaps, title, name, gib, bound, judge):
    """Waits for a pod's end, adds its row, deletes the pod, and returns the answer."""
    phase, answer, log = cluster.answer(name, bound)
    gaps.look()
    try:
        wrong = judge(answer) if phase == "Succeeded" and answer else f"{phase}: {log[-1200:]}"
    except KeyError as missing:
        wrong = f"no {missing} in its answer"
    table.add(title, gib, shown(answer) if answer and "ranks" in answer else json.dumps(answer), wrong=wrong)
    cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
    return answer


def until(cluster, question, wanted, bound):
    """Asks kubectl until the answer is `wanted` or contains it, and returns the seconds or None."""
    begun = time.monotonic()
    while time.monotonic() < begun + bound:
        if wanted in cluster.kubectl(*question, check=False):
            return time.monotonic() - begun
        time.sleep(0.1)
    return None


def refused_alone(gib):
    """Checks that rank 0 got its part and no more, and that all ranks continued."""

    def judge(answer):
        first, *others = answer["ranks"]
        if not first["sees_mib"] * 3 // 4 <= first["got_mib"] <= first["sees_mib"]:
            return f"rank 0 got {first['got_mib']} of {first['sees_mib']} MiB"
        return judged(answer, gib) or (None if all(rank["sum"] == GPUS for rank in answer["ranks"]) else "a wrong sum")

    return judge


def copied(answer):
    """Checks that no copy was wrong, that shared memory was copied, and that a child redeemed each GPU's token."""
    if answer["wrong"]:
        return "wrong bytes"
    if not answer.get("shared_copies"):
        return "no shared memory was copied"
    return None if answer.get("redeemed") == answer.get("gpus") else "a child redeemed other GPUs"


def ends(answer):
    """Returns the exit code of each rank; None is a rank that did not end."""
    return [rank["exit"] for rank in answer["ranks"]]


def ended_like(alone):
    """Checks that the refusal ended the last rank, and that every other rank ended as without Bursar."""

    def judge(answer):
        if answer["ranks"][-1]["exit"] != 1:
            return f"the last rank ended with {answer['ranks'][-1]['exit']}"
        if alone is None:
            return "it did not run without Bursar"
        return None if ends(answer) == ends(alone) else f"the ranks ended with {ends(answer)}, without Bursar with {ends(alone)}"

    return judge


def without_bursar(table, programs, mode, seconds):
    """Runs the ranks on the machine itself, and returns their answer."""
    native = subprocess.run([PYTHON, f"{programs}/ranks.py", mode, str(seconds)], capture_output=True, text=True, timeout=240)
    answer = json.loads(native.stdout.splitlines()[-1]) if native.returncode == 0 else None
    table.add(f"{mode} without Bursar", "", shown(answer), wrong=None if answer else native.stderr[-600:])
    return answer


def slowest(answer):
    """Returns the figure of the slower rank."""
    return {"GB/s": min(rank["gb_per_s"] for rank in answer["ranks"])}


def all_reduce(cluster, table, programs, pairs, state):
    """Reduces over both GPUs natively and in a pod by turns, and adds the ratio of their bandwidths."""

    def native():
        return slowest(json.loads(output([PYTHON, f"{programs}/ranks.py", "reduce"], 120).splitlines()[-1]))

    def in_pod():
        cluster.apply(ranks("reduces", 24, programs, "reduce", 0))
        phase, answer, log = cluster.answer("reduces", 120)
        cluster.kubectl("delete", "pod", "reduces", "--now", "--wait=true")
        if phase != "Succeeded" or answer is None:
            raise RuntimeError(f"{phase}: {log[-800:]}")
        return slowest(answer)

    comparison = Comparison("all-reduce", pairs, state).take(native, in_pod)
    before, after = (statistics.median(side) for side in comparison.values("GB/s"))
    ratio = comparison.ratio("GB/s")
    table.add(ALL_REDUCE, 24, f"{before:.0f}, {after:.0f} GB/s; {ratio}", **ratio.at_least(LEAST))


def programs_over_two(cluster, table, gaps, programs, seconds, refused, chosen):
    """Runs programs over both GPUs, one pod at a time, then two at the same time."""
    expandable = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")]
    node = json.loads(cluster.kubectl("get", "gpunodes", "--output", "json"))["items"][0]
    capacity = min(gpu["capacity"] for gpu in node["status"]["gpus"])
    for title, gib, mode, options, judge in (
        ("DDP, by annotation", 24, "ddp", {}, None),
        ("DDP, by size", capacity * 5 // 4 // GPUS * GPUS, "ddp", {"annotated": False}, None),
        ("DDP, as user 1000", 24, "ddp", {"user": 1000}, None),
        ("tensor parallel", 24, "tensor", {}, None),
        ("DDP, expandable segments", 24, "ddp", {"env": expandable}, None),
        ("symmetric memory", 24, "symmetric", {}, None),
        ("rank 0 allocates until it is refused", 24, "greedy", {}, refused_alone(24)),
        (REFUSED, 24, "refused", {}, ended_like(refused)),
    ):
        if not chosen(title):
            continue
        name = title.lower().replace(", ", "-").replace(" ", "-")
        cluster.apply(ranks(name, gib, programs, mode, seconds, **options))
        finish(cluster, table, gaps, title, name, gib, 200 + seconds, judge or (lambda answer, gib=gib: judged(answer, gib)))
    if not chosen("two pods at the same time"):
        return
    for number in range(2):
        cluster.apply(ranks(f"side-{number}", 24, programs, "ddp", seconds, env=[("MASTER_PORT", str(29500 + number))]))
    for number in range(2):
        finish(cluster, table, gaps, f"two pods at the same time, pod {number}", f"side-{number}", 24, 150 + seconds, lambda answer: judged(answer, 24))


def waits_and_drains(cluster, table, gaps, programs):
    """Fills both GPUs, lets a pod wait for room, and drains one GPU, with a pod on it, while the other computes."""
    node = json.loads(cluster.kubectl("get", "gpunodes", "--output", "json"))["items"][0]
    name, capacity = node["metadata"]["name"], min(gpu["capacity"] for gpu in node["status"]["gpus"])
    most = capacity * 5 // 8
    steady = [PYTHON, "/programs/steady.py", "120"]
    for number in range(GPUS):
        cluster.apply(pod(f"fill-{number}", most, steady, programs))
    cluster.kubectl("wait", "pod/fill-0", "pod/fill-1", "--for=condition=Ready", "--timeout=60s")
    waiting = capacity - most + 8
    cluster.apply(pod("waits", waiting, [PYTHON, "/programs/quota.py", "torch"], programs))
    path = ["get", "gpunodes", "--output", "jsonpath={.items[*].status.waiting}"]
    seconds = until(cluster, path, "waits", 60)
    table.add("a pod waits: neither GPU has room, both together have", waiting, cluster.kubectl(*path)[:300], wrong=seconds is None)
    cluster.kubectl("delete", "pod", "fill-0", "--now", "--wait=true")
    phase = ["get", "pod", "waits", "--output", "jsonpath={.status.phase}{.status.containerStatuses[0].state}"]
    seconds = until(cluster, phase, "started", 60)
    table.add("it starts after one pod ends", waiting, f"{seconds} s", wrong=seconds is None)
    finish(cluster, table, gaps, "it has its quota", "waits", waiting, 90, lambda answer: None if answer["sees_mib"] == waiting * MIB_OF_GIB else "wrong")
    gpus = {gpu["uuid"] for gpu in node["status"]["gpus"]}
    status = json.loads(cluster.kubectl("get", "gpunodes", "--output", "json"))["items"][0]["status"]
    uid = cluster.kubectl("get", "pod", "fill-1", "--output", "jsonpath={.metadata.uid}")
    busy = next(gpu["uuid"] for gpu in status["gpus"] if any(entry["uid"] == uid for entry in gpu.get("pods") or []))
    other = next(iter(gpus - {busy}))
    # Only the other GPU has room for it.
    cluster.apply(pod("lost", capacity - most + 8, steady, programs))
    cluster.kubectl("wait", "pod/lost", "--for=condition=Ready", "--timeout=60s")

    def patch(uuids):
        cluster.kubectl("patch", "gpunode", name, "--type", "merge", "--patch", json.dumps({"spec": {"drain": uuids}}))

    patch([other])
    state = ["get", "gpunodes", "--output", "jsonpath={.items[*].status.gpus[*].health.reason}"]
    seconds = until(cluster, state, "Drained", 60)
    table.add("one GPU drained while the other computes", "", f"{seconds} s", wrong=seconds is None)
    seconds = until(cluster, ["get", "pod", "lost", "--output", "jsonpath={.status.phase}"], "Failed", 60)
    table.add("the pod on it ended", capacity - most + 8, f"{seconds} s", wrong=seconds is None)
    cluster.kubectl("delete", "pod", "lost", "--now", "--wait=true")
    cluster.apply(pod("elsewhere", 8, [PYTHON, "/programs/quota.py", "torch"], programs))

    def on_busy(answer):
        return None if answer["gpu"].removeprefix("GPU-") == busy.removeprefix("GPU-") else f"ran on {answer['gpu']}"

    finish(cluster, table, gaps, "a new pod starts on the other GPU", "elsewhere", 8, 90, on_busy)
    patch([])
    seconds = until(cluster, ["get", "node", name, "--output", "jsonpath={.status.allocatable." + RESOURCE.replace(".", "\\.") + "}"], str(capacity * GPUS), 90)
    table.add("both GPUs are offered again after the drain", "", f"{seconds} s", wrong=seconds is None)
    finish(cluster, table, gaps, "the pod on the other GPU computed throughout", "fill-1", most, 150, lambda answer: f"{answer['wrong']} wrong" if answer["wrong"] else None)


def faults_beside(cluster, table, gaps, programs, times=20):
    """Lets a pod on each GPU compute while a third faults, and is restarted in place each time."""
    policy = {"action": "InPlace", "maxRestarts": 100, "windowSeconds": 86400}
    budget = {"apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": {"name": "default"}}
    cluster.apply(budget | {"spec": {"deviceMemory": {"guaranteed": "1Ti"}, "contextPolicy": policy}})
    node = json.loads(cluster.kubectl("get", "gpunodes", "--output", "json"))["items"][0]
    most = min(gpu["capacity"] for gpu in node["status"]["gpus"]) * 5 // 8
    steady = [f"steady-{number}" for number in range(GPUS)]
    for name in steady:
        cluster.apply(pod(name, most, [PYTHON, "/programs/steady.py", "45"], programs))
    cluster.kubectl("wait", *(f"pod/{name}" for name in steady), "--for=condition=Ready", "--timeout=60s")
    manifest = pod("faults", 8, ["/programs/retained", "restarted", "/state/faults", str(4 << 30), str(times)], programs)
    manifest["spec"]["containers"][0]["volumeMounts"].append({"name": "state", "mountPath": "/state"})
    manifest["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
    cluster.apply(manifest)
    phase, _, log = cluster.answer("faults", 90)
    images = log.count('"checksum"')
    table.add(f"{times} faults on one GPU, restarted in place", 8, f"{images} images found their memory", wrong=f"{phase}: {log[-800:]}" if phase != "Succeeded" else None)
    cluster.kubectl("delete", "pod", "faults", "--now", "--wait=true")
    for number, name in enumerate(steady):
        finish(cluster, table, gaps, f"a pod computed beside the faults, GPU {number}", name, most, 90, lambda answer: f"{answer['wrong']} wrong" if answer["wrong"] or not answer["rounds"] else None)
    cluster.kubectl("delete", "gpumemorybudget", "default")


def agent_processor(cluster, table, seconds=20):
    """Measures the processor time of the agent's container while the GPUs are idle."""

    def ticks():
        spent = 0
        for process in cluster.processes("bursar-agent"):
            try:
                with open(f"/proc/{process}/stat", encoding="ascii") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            spent += int(fields[11]) + int(fields[12])
        return spent

    before = ticks()
    time.sleep(seconds)
    percent = (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds * 100
    table.add("processor of an idle agent with two GPUs", "", f"{percent:.2f} %", wrong=percent > 5)


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--state")
    parser.add_argument("--peers")
    parser.add_argument("--retained")
    parser.add_argument("--only", nargs="+")
    arguments = parser.parse_args()

    def chosen(title):
        return not arguments.only or any(word in title for word in arguments.only)

    table = Table("program", "quota GiB", "answer")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        for name in "ranks.py", "steady.py", "quota.py", "peer_copy.py":
            shutil.copy(os.path.join(HERE, "programs", name), programs)
        for name in "peers", "retained":
            if program := getattr(arguments, name):
                shutil.copy(program, f"{programs}/{name}")
                os.chmod(f"{programs}/{name}", 0o755)
        refused = without_bursar(table, programs, "refused", arguments.seconds) if chosen(REFUSED) else None
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            gaps = Gaps(cluster)
            begun = time.time()
            table.say("the cluster is up, findings are killed")
            commands = {"peer copies by PyTorch": [PYTHON, "/programs/peer_copy.py"]}
            if arguments.peers:
                commands["peer copies by the runtime"] = ["/programs/peers"]
            for number, (title, command) in enumerate(commands.items()):
                if not chosen(title):
                    continue
                manifest = pod(f"peers-{number}", 24, command, programs)
                manifest["metadata"]["annotations"] = {"bursar.dev/gpus": str(GPUS)}
                cluster.apply(manifest)
                finish(cluster, table, gaps, title, f"peers-{number}", 24, 90, copied)
            if chosen("processor"):
                agent_processor(cluster, table)
            if chosen("faults") and arguments.retained:
                faults_beside(cluster, table, gaps, programs)
            if chosen("waits and drains"):
                waits_and_drains(cluster, table, gaps, programs)
            programs_over_two(cluster, table, gaps, programs, arguments.seconds, refused, chosen)
            gaps.look()
            findings = [finding for finding in cluster.findings() if finding[0] > begun]
            table.add("containers told as not enforced", "", len(gaps.not_enforced), wrong=str(gaps.not_enforced) if gaps.not_enforced else None)
            table.add("findings about honest programs", "", len(findings), wrong=str(findings) if findings else None)
            if findings or gaps.not_enforced:
                print(cluster.complaint()[-8000:])
            # Last, because the audit reports the machine's own programs.
            if chosen(ALL_REDUCE):
                all_reduce(cluster, table, programs, arguments.pairs, arguments.state)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
