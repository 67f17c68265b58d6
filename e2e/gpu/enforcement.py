"""Shows on a real GPU that quotas hold for programs, and measures the cost.

usage: enforcement.py ARCHIVE [--rounds N] [--only NAME...]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver, nvcc and gcc, and a Python with torch, triton,
cupy, jax and numba; no network. The script starts a cluster of one node with Bursar, runs each program in a pod of
its own, and prints one table. It exits with 1 if a row fails.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile
import time

import image
from cluster import CUDA, PYTHON, REFERENCE, Cluster, pod
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = 2
MIB_OF_GIB = 1024


def filled(gib):
    """Checks that a program saw its quota, got all of it but a context and its allocator's reserve, and computed."""

    def judge(answer):
        quota = gib * MIB_OF_GIB
        if answer["sees_mib"] != quota:
            return f"sees {answer['sees_mib']} MiB of {quota}"
        if not quota * 3 // 4 - 1024 <= answer["got_mib"] <= quota:
            return f"got {answer['got_mib']} MiB of {quota}"
        if not answer["ran_on"]:
            return "did not compute after it was refused"
        return None

    return judge


def part_of(gib):
    """Checks as [`filled`] does, for an allocator that manages and reports a part of its quota."""

    def judge(answer):
        quota = gib * MIB_OF_GIB
        if not 0 < answer["got_mib"] <= answer["sees_mib"] <= quota:
            return f"got {answer['got_mib']} of {answer['sees_mib']} MiB, with a quota of {quota}"
        return None if answer["ran_on"] else "did not compute after it was refused"

    return judge


def within(gib):
    """Checks that NVML showed at most the quota and 2 % of it for a program that was refused at last."""

    def judge(answer):
        most = gib * MIB_OF_GIB * 51 // 50
        if answer["refused"] != OUT_OF_MEMORY or not answer["taken"]:
            return "was not refused"
        return None if 0 < answer["listed_mib"] <= most else f"NVML lists {answer['listed_mib']} MiB of at most {most}"

    return judge


def listed_mib():
    """Returns the most that the driver lists for a process, on the host."""
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return max((int(used) for used in listed if used.isdigit()), default=0)


def held(cluster, name):
    """Waits until a program has answered, and returns what the driver lists for it then."""
    deadline = time.monotonic() + 120
    while "rest_mib" not in cluster.kubectl("logs", name, check=False, stderr=subprocess.DEVNULL):
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.2)
    return listed_mib()


def field(name, *allowed):
    """Checks that a field of the answer has one of these values."""
    return lambda answer: None if answer[name] in allowed else f"{name} is {answer[name]}, not {allowed}"


def all_of(*judges):
    """Combines checks, all of which must pass."""
    return lambda answer: next((reason for reason in (judge(answer) for judge in judges) if reason), None)


def rows(rounds):
    """Returns every program: its name, quota in GiB, command, variables and check."""
    quota = ["/programs/quota.py"]
    direct = "/programs/direct"
    alloc = "PYTORCH_CUDA_ALLOC_CONF"
    yield "torch", 4, [PYTHON, *quota, "torch"], {}, filled(4)
    yield "torch, expandable segments", 4, [PYTHON, *quota, "torch"], {alloc: "expandable_segments:True"}, filled(4)
    yield "torch, cudaMallocAsync", 4, [PYTHON, *quota, "torch"], {alloc: "backend:cudaMallocAsync"}, filled(4)
    yield "triton", 4, [PYTHON, *quota, "triton"], {}, filled(4)
    yield "cupy", 4, [PYTHON, *quota, "cupy"], {}, filled(4)
    yield "cupy, async pool", 4, [PYTHON, *quota, "cupy-async"], {}, filled(4)
    yield "jax", 4, [PYTHON, *quota, "jax"], {}, part_of(4)
    yield "numba", 4, [PYTHON, *quota, "numba"], {"CUDA_HOME": CUDA}, filled(4)
    yield "static cudart", 4, ["/programs/static"], {}, filled(4)
    for how in ("linear", "odd", "async", "vmm", "array"):
        yield f"direct, {how}", 4, [direct, "greedy", how], {}, filled(4)
    yield "what pools grow by", 24, [direct, "pool-growth", "2000"], {}, field("over", 0)
    yield "two processes", 4, [PYTHON, "/programs/siblings.py", direct], {}, filled(4)
    yield "VMM sleep and wake x 100", 4, [direct, "sleep-wake", "2048"], {}, field("rounds", 100)
    yield "graph that fits", 4, [direct, "graph", "1024"], {}, field("answer", 0)
    yield "graph that does not", 4, [direct, "graph", "4096"], {}, field("answer", OUT_OF_MEMORY)
    for title, how in ("fork, SIGKILL", "orphan"), ("exporter dies, parked", "parked"), ("exporter dies, imported", "imported"):
        judge = all_of(field("while_held", OUT_OF_MEMORY), field("after", 0))
        yield f"F13: {title}", 8, [direct, how, "5120"], {}, judge
    for size in ("512", "4096", "65536", "1048576", "0"):
        for how in ("thirds", "chunks", "random"):
            name = "mixed" if size == "0" else size
            yield f"pieces, {name}, {how}", 4, ["/programs/pieces", size, how], {}, within(4)
    for what in ("nodes", "heap", "variables"):
        yield f"pieces, {what}", 4, ["/programs/pieces", what], {}, within(4)
    yield "F14: 16 KiB stack, 4 GiB", 4, [direct, "stack", "16384"], {}, field("answer", OUT_OF_MEMORY)
    yield "F14: 16 KiB stack, 8 GiB", 8, [direct, "stack", "16384"], {}, field("answer", 0)
    yield "F14: 64 KiB locals, 4 GiB", 4, [direct, "locals", "/programs/kernels.cubin"], {}, all_of(
        field("took_mib", 0), lambda answer: None if answer["launch"] else "it was launched"
    )
    yield "F14: 64 KiB locals, 20 GiB", 20, [direct, "locals", "/programs/kernels.cubin"], {}, field("launch", 0)
    overhead = [PYTHON, "/programs/compare.py", "/programs/overhead", "/programs/kernels.cubin", str(rounds)]
    most = {"async": 1.05, "linear": 1.01, "launch": 1.01, "small": 1.05, "threads": 1.05, "start": 1.02}
    yield "overhead", 8, overhead, {}, all_of(
        *(
            lambda answer, figure=figure, bound=bound: None
            if answer[figure]["high"] <= bound
            else f"{figure} {answer[figure]['low']}x to {answer[figure]['high']}x, goal {bound}x"
            for figure, bound in most.items()
        )
    )


def together(cluster, programs):
    """Runs two pods with PyTorch on the GPU at the same time: one computes, the other allocates until it is refused.

    Returns rows as [`rows`] does for the table, and prints the demo's table.
    """
    cluster.apply(pod("steady", 16, [PYTHON, "/programs/steady.py", "30"], programs))
    deadline = time.monotonic() + 60
    while "begun" not in cluster.kubectl("logs", "steady", check=False, stderr=subprocess.DEVNULL):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    cluster.apply(pod("greedy", 4, [PYTHON, "/programs/quota.py", "torch"], programs))
    phase, greedy, log = cluster.answer("greedy", 60)
    steady_phase = cluster.kubectl("get", "pod", "steady", "--output", "jsonpath={.status.phase}")
    wrong = filled(4)(greedy) if phase == "Succeeded" and greedy else f"{phase}: {log[-1500:]}"
    if wrong is None and steady_phase != "Running":
        wrong = f"the other pod was {steady_phase} by then"
    yield "beside it: torch takes all it can get", 4, show(greedy), wrong
    phase, steady, log = cluster.answer("steady", 60)
    wrong = f"{phase}: {log[-1500:]}" if phase != "Succeeded" or steady is None else field("wrong", 0)(steady)
    yield "torch computes all the while", 16, show(steady), wrong
    print("\n| NODE | GPU | POD | QUOTA | SEES | TOOK | WHAT IT WAS TOLD |\n|---|---|---|---|---|---|---|")
    for name, gib, answer in ("steady", 16, steady), ("greedy", 4, greedy):
        node = cluster.kubectl("get", "pod", name, "--output", "jsonpath={.spec.nodeName}")
        cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
        if answer:
            cells = node, answer["gpu"], name, f"{gib} GiB", f"{answer['sees_mib']} MiB", f"{answer['got_mib']} MiB"
            print("| " + " | ".join((*cells, answer.get("told", ""))) + " |")


def compile_programs(into):
    """Builds the C and CUDA programs, and copies the Python ones beside them."""
    source = os.path.join(HERE, "programs")
    include, link = f"-I{CUDA}/include", [f"-L{CUDA}/lib64/stubs", "-lcuda"]
    for command in (
        ["gcc", "-O2", include, f"{source}/direct.c", "-o", f"{into}/direct", *link],
        ["gcc", "-O2", include, f"{source}/pieces.c", "-o", f"{into}/pieces", *link],
        ["gcc", "-O2", include, f"{source}/overhead.c", "-o", f"{into}/overhead", *link, "-ldl", "-lpthread"],
        ["nvcc", "-arch=native", "-cudart=static", f"{source}/static.cu", "-o", f"{into}/static"],
        ["nvcc", "-arch=native", "-cubin", f"{source}/kernels.cu", "-o", f"{into}/kernels.cubin"],
    ):
        subprocess.run(command, check=True)
    for path in (*glob.glob(f"{source}/*.py"), os.path.join(HERE, "comparison.py")):
        with open(path, "rb") as read, open(f"{into}/{os.path.basename(path)}", "wb") as write:
            write.write(read.read())


def show(answer):
    """Formats an answer as a cell of the table."""
    if answer is None:
        return "no answer"
    return ", ".join(
        f"{key.removesuffix('_mib')} {value['ratio']}x ({value['low']} to {value['high']}, {value['native']:.0f} ns)"
        if isinstance(value, dict)
        else f"{key.removesuffix('_mib')} {value}"
        for key, value in answer.items()
    )


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    table = Table("program", "quota GiB", "answer")
    with tempfile.TemporaryDirectory() as scratch:
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        os.chmod(scratch, 0o755)
        compile_programs(programs)
        archive = image.write(REFERENCE, scratch)
        table.say(f"compiled; the image has {os.path.getsize(archive) >> 20} MiB")
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            cluster.kill_findings()
            compared = None
            table.say("the cluster is up, findings are killed")
            for number, (title, gib, command, env, judge) in enumerate(rows(arguments.rounds)):
                if arguments.only and not any(title.startswith(only) for only in arguments.only):
                    continue
                name = f"row-{number}"
                compared = name if title == "overhead" else compared
                cluster.apply(pod(name, gib, command, programs, env.items()))
                listed = held(cluster, name) if title.startswith("pieces") else None
                phase, answer, log = cluster.answer(name, 180)
                if listed is not None and answer is not None:
                    answer["listed_mib"] = listed
                try:
                    wrong = f"{phase}: {log[-1500:]}" if phase != "Succeeded" or answer is None else judge(answer)
                except KeyError as missing:
                    wrong = f"no {missing} in its answer"
                table.add(title, gib, show(answer), wrong=wrong)
                cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
            if not arguments.only or "together" in arguments.only:
                for *cells, wrong in together(cluster, programs):
                    table.add(*cells, wrong=wrong)
            smi = pod("smi", 4, ["/opt/nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader"], programs)
            cluster.apply(smi)
            phase, _, log = cluster.answer("smi", 60)
            shown = log.strip().replace("\n", " ")[-200:]
            right = phase == "Succeeded" and shown.startswith("4096 MiB")
            table.add("nvidia-smi", 4, shown, wrong=None if right else phase)
            # The second half of the comparison calls the driver without the shim.
            findings = cluster.findings(but=compared)
            table.add("findings about honest programs", "", len(findings), wrong=str(findings) if findings else None)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
