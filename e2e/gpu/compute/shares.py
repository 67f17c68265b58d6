#!/usr/bin/env python3
"""Measures the shares of tenants in one GPU's time, and who can change them by the time slices of channel groups.

usage: sudo shares.py [--only PHASE,...] [--seconds N] [--out FOLDER]

Needs one otherwise unused NVIDIA GPU, root, nvcc and nvidia-ml-py (pynvml). The script changes no setting of the GPU:
a channel group's time slice belongs to the process and ends with it.

Every row is a window of time over processes that run throughout. Its columns:
  share   of each tenant, its finished work over what the idle GPU finishes in that time (1.00 is the whole GPU)
  sum     of the shares: the rest to 1.00 is the cost of time slicing
  probe   latency of a short kernel of one warp from a process of its own, launch to return: p50 / p99 / maximum, ms
  status  the driver's answer, which decides no verdict

Phases:
  attack    a tenant changes its own slice, as each of `rm.ACTORS`, by every command that an own group takes
  baseline  the driver's default, with NVML's per-process utilisation beside the true shares
  agent     a root process changes other processes' slices through their open /dev/nvidiactl
  contest   a tenant and a root process set the tenant's slice against each other
  weights   shares by weight, for 2 to 4 tenants of 1 to 4 processes; the cost of a restart of the run list
  conserve  how soon others take the time of a tenant that pauses
  outside   the groups that a root process finds without the tenants' help, beside those that libcuda made
  kinds     graphs, cooperative launches, long kernels, copies, a fault, a new process, a debugger, an agent that ends
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import rm
from comparison import child
from discover import Client, discover
from loads import COOPERATIVE, COPY, FAULT, GRAPH, PLAIN, Load, restart_run_list, set_slices, slice_of

HERE = pathlib.Path(__file__).parent
ROUND_US = 20_000
TORCH = "/opt/torch/.venv/bin/python3"
rows = []


def say(text):
    print(f"[{time.monotonic() - BEGUN:5.1f}s] {text}", flush=True)


def milliseconds(values):
    if not values:
        return "none"
    ordered = sorted(values)
    at = lambda part: ordered[max(0, -(-len(ordered) * part // 100) - 1)] / 1e6
    return f"{at(50):.2f} / {at(99):.2f} / {at(100):.2f}"


def window(title, tenants, probe=None, seconds=2.0, status="", nvml=None, settle=0.3):
    """Adds a row with the shares of tenants (lists of loads) over the next seconds, and returns the shares."""
    time.sleep(settle)
    wall_us, begun = int(time.time() * 1e6), time.monotonic_ns()
    time.sleep(seconds)
    ended = time.monotonic_ns()
    shares = [sum(load.done(begun, ended) for load in tenant) * 1000 / (ended - begun) for tenant in tenants]
    latency = milliseconds(probe.latencies(begun, ended)) if probe else ""
    nvml_shares = nvml.shares(tenants, wall_us) if nvml else ""
    cells = (title, " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", latency, nvml_shares, str(status))
    rows.append(cells)
    say(" | ".join(cells))
    return shares


class Nvml:
    """Reads NVML's per-process utilisation, by both of its calls."""

    def __init__(self):
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        say(f"{pynvml.nvmlDeviceGetName(self.device)}, driver {pynvml.nvmlSystemGetDriverVersion()}")

    def shares(self, tenants, since_us):
        """Returns each tenant's mean smUtil by both calls, and the samples of a process."""
        return "; ".join(
            self._shares(call, tenants, since_us)
            for call in (self.nvml.nvmlDeviceGetProcessUtilization, self.nvml.nvmlDeviceGetProcessesUtilizationInfo)
        )

    def _shares(self, call, tenants, since_us):
        try:
            samples = [one for one in call(self.device, since_us) if one.timeStamp > since_us]
        except self.nvml.NVMLError as error:
            return str(error)
        by_pid = {}
        for one in samples:
            by_pid.setdefault(one.pid, []).append(one.smUtil)
        means = []
        for tenant in tenants:
            found = [by_pid[load.pid] for load in tenant if load.pid in by_pid]
            means.append("+".join(f"{sum(values) / len(values):.0f}" for values in found) or "none")
        count = max((len(values) for values in by_pid.values()), default=0)
        return f"{' '.join(means)} ({count} samples)"


def attack(_):
    """Lets a tenant change its own slice, and watches a neighbour and a probe."""
    victim = Load().wait()
    probe = Load(kind="probe").wait()
    for actor in rm.ACTORS:
        try:
            one_attacker(actor, victim, probe)
        except Exception:
            say(f"{actor}: {traceback.format_exc()}")
    for slice_us in 8000, 100_000:
        attacker = Load(actor="no capability", birth_us=slice_us).wait()
        errors = attacker.errors.read_text().strip().replace("\n", "; ")
        window(f"no capability, slice {slice_us} us at birth", [[attacker], [victim]], probe, SECONDS, errors)
        attacker.end()


def one_attacker(actor, victim, probe):
    attacker = Load(actor=actor).wait()
    tenants = [[attacker], [victim]]
    groups = attacker.groups()
    say(f"{actor}: slices {[slice_of(attacker, group) for group in groups]} us of {len(groups)} groups")

    def step(title, command, params, channel=False, watch=True):
        statuses = []
        for group in groups:
            target = group.channel if channel else group.handle
            statuses.append(rm.status_name(attacker.ask(group, target, command, params)[0]))
        if watch:
            window(f"{actor}: {title}", tenants, probe, SECONDS, ", ".join(statuses))

    window(f"{actor}: as started", tenants, probe, SECONDS)
    step("own slice 8000 us", rm.SET_TIMESLICE, rm.microseconds(8000))
    if actor == "no capability":
        step("own group scheduled again", rm.SCHEDULE, rm.ON)
        step("own group preempted", rm.PREEMPT, rm.WAIT)
        step("own interleave level high", rm.SET_INTERLEAVE_LEVEL, rm.HIGH)
        Load().wait().end()
        window(f"{actor}: another process came and went", tenants, probe, SECONDS)
    step("run list restarted", rm.RESTART_RUNLIST, rm.FORCE, channel=True)
    step("own slice 100000 us", rm.SET_TIMESLICE, rm.microseconds(100_000), watch=actor == "no capability")
    step("own slice 100000 us, run list restarted", rm.RESTART_RUNLIST, rm.FORCE, channel=True)
    if actor == "no capability":
        step("own group off", rm.SCHEDULE, rm.OFF)
        step("own group on again", rm.SCHEDULE, rm.ON)
    if actor == "CAP_SYS_NICE":
        step("own interleave level high", rm.SET_INTERLEAVE_LEVEL, rm.HIGH)
    attacker.end()


def baseline(nvml):
    """Measures the driver's default."""
    probe = Load(kind="probe").wait()
    pool = Load.several(5, paused=True)
    say(f"handles of one process (fd, class, client, parent, handle, engine): {pool[0].handles()}")
    run(pool, 1)
    window("1 process alone", [pool[:1]], probe, SECONDS)
    run(pool, 2)
    window("1 : 1 processes", [pool[:1], pool[1:2]], probe, LONG, nvml=nvml)
    run(pool, 5)
    window("1 : 4 processes", [pool[:1], pool[1:]], probe, LONG, nvml=nvml)
    run(pool, 2)
    pool[1].mode(PLAIN, 50_000)
    window("1 : 1, kernels of 1 ms : 50 ms", [pool[:1], pool[1:2]], probe, 2 * SECONDS, nvml=nvml)
    pool[1].mode(PLAIN, 50)
    window("1 : 1, kernels of 1 ms : 50 us", [pool[:1], pool[1:2]], probe, 2 * SECONDS)


def run(pool, count):
    """Runs the first `count` of the pool, and pauses the others."""
    for at, load in enumerate(pool):
        load.mode(PLAIN)
        load.pause(at >= count)


def agent(_):
    """Changes slices from another process, through the loads' own open files."""
    probe = Load(kind="probe").wait()
    a, b = Load.several(2)
    tenants = [[a], [b]]
    window("default", tenants, probe, SECONDS)
    group = b.groups()[0]
    statuses = set_slices([(a, 8000), (b, 500)], restart=False)
    window("root agent: 8000 : 500 us, no restart", tenants, probe, SECONDS, statuses)
    window("root agent: run list restarted", tenants, probe, 2 * SECONDS, rm.status_name(restart_run_list(a)[0]))
    window("root agent: 500 : 8000 us", tenants, probe, 2 * SECONDS, set_slices([(a, 500), (b, 8000)]))
    for actor in rm.ACTORS:
        set_slices([(a, 2000), (b, 2000)])
        for load in a, b:
            load.file(load.groups()[0].fd)

        def as_actor():
            return set_slices([(a, 8000), (b, 1000)])

        window(f"agent as {actor}: 8000 : 1000 us", tenants, probe, SECONDS, rm.in_child(actor, as_actor))
    stranger = os.open("/dev/nvidiactl", os.O_RDWR)
    status, *_ = rm.control(stranger, group.client, group.handle, rm.SET_TIMESLICE, rm.microseconds(100))
    say(f"root through a /dev/nvidiactl of its own: {rm.status_name(status)}")
    os.close(stranger)


def weigh(tenants, weights, round_us=ROUND_US):
    """Divides a round by weight, and each tenant's part by its processes."""
    return set_slices(
        [
            (load, max(1, round_us * weight // sum(weights) // len(tenant)))
            for tenant, weight in zip(tenants, weights)
            for load in tenant
        ]
    )


def divide(pool, counts):
    """Returns the pool's loads by tenant, and pauses those without a tenant."""
    tenants, at = [], 0
    for count in counts:
        tenants.append(pool[at : at + count])
        at += count
    run(pool, at)
    return tenants


def weights(nvml):
    """Measures shares by weight."""
    probe = Load(kind="probe").wait()
    pool = Load.several(10, paused=True)
    tenants = divide(pool, (1, 1))
    window("default slices, 1 : 1", tenants, probe, SECONDS)
    for round_us in 2000, 4000, 10_000, 20_000, 40_000:
        status = weigh(tenants, (75, 25), round_us)
        window(f"75 : 25, round of {round_us} us", tenants, probe, SECONDS, status)
    for parts, counts in (
        ((75, 25), (1, 1)),
        ((75, 25), (1, 4)),
        ((75, 25), (4, 1)),
        ((90, 10), (2, 2)),
        ((50, 25, 25), (1, 1, 1)),
        ((50, 25, 25), (2, 4, 1)),
        ((40, 30, 20, 10), (1, 2, 3, 4)),
    ):
        tenants = divide(pool, counts)
        status = weigh(tenants, parts)
        bad = [one for one in status if one != "ok"]
        title = f"{' : '.join(map(str, parts))}, {'+'.join(map(str, counts))} processes"
        shares = window(title, tenants, probe, LONG, bad, nvml)
        wrong = [share / sum(shares) / part * sum(parts) - 1 for share, part in zip(shares, parts)]
        say(f"error of the shares: {' '.join(f'{one:+.1%}' for one in wrong)}")
    tenants = divide(pool, (1, 1))
    weigh(tenants, (50, 50))
    window("50 : 50", tenants, probe, 2 * SECONDS)
    for every in 0.1, 0.01:
        pool[0].file(pool[0].groups()[0].fd)
        restarts = Repeat("root", lambda: restart_run_list(pool[0])[1], every, 2 * SECONDS)
        window(f"50 : 50, run list restarted every {every} s", tenants, probe, 2 * SECONDS, restarts)


class Repeat:
    """A child process that calls a function repeatedly. As text, the durations of its calls."""

    def __init__(self, actor, function, every, seconds):
        read, write = os.pipe()
        self.child, self.pipe = os.fork(), read
        if self.child == 0:
            took, end = [], time.monotonic() + seconds + 0.3
            try:
                rm.become(actor)
                while time.monotonic() < end:
                    took.append(function())
                    time.sleep(every)
                text = f"{len(took)} calls of {milliseconds(took)} ms"
            except Exception as error:  # the parent reports it
                text = repr(error)
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)

    def __str__(self):
        with os.fdopen(self.pipe) as pipe:
            text = pipe.read()
        os.waitpid(self.child, 0)
        return text


def contest(_):
    """Lets a tenant set its slice to 100 ms each millisecond, while a root process sets it back."""
    probe = Load(kind="probe").wait()
    victim, attacker = Load.several(2)
    tenants = [[attacker], [victim]]
    groups = attacker.groups()
    files = [attacker.file(group.fd) for group in groups]

    def set_slice(slice_us):
        def once():
            calls = zip(files, groups)
            return sum(rm.control(fd, one.client, one.handle, rm.SET_TIMESLICE, rm.microseconds(slice_us))[2] for fd, one in calls)

        return once

    def read_slice():
        _, answer, took = rm.control(files[0], groups[0].client, groups[0].handle, rm.GET_TIMESLICE, bytes(8))
        return int.from_bytes(answer, "little"), took

    def hold_slice():
        value, took = read_slice()
        return took if value == 2000 else took + set_slice(2000)()

    def repeated(title, actor, function, every, seconds=SECONDS):
        window(title, tenants, probe, seconds, Repeat(actor, function, every, seconds))

    window("nobody sets a slice", tenants, probe, SECONDS)
    repeated("root reads the slice each 1 ms", "root", lambda: read_slice()[1], 0.001)
    repeated("root sets 2000 us each 1 ms", "root", set_slice(2000), 0.001)
    repeated("the tenant sets 100000 us each 1 ms", "no capability", set_slice(100_000), 0.001)
    for every in 0.1, 0.01, 0.001:
        tenant = Repeat("no capability", set_slice(100_000), 0.001, SECONDS)
        root = Repeat("root", set_slice(2000), every, SECONDS)
        title = f"the tenant sets 100000 us each 1 ms, root 2000 us each {every * 1000:g} ms"
        window(title, tenants, probe, SECONDS, Both(tenant, root))
    for every in 1.0, 0.3, 0.1, 0.03:
        tenant = Repeat("no capability", set_slice(100_000), every, 2 * SECONDS)
        root = Repeat("root", hold_slice, 0.01, 2 * SECONDS)
        title = f"the tenant sets 100000 us each {every * 1000:g} ms, root looks each 10 ms and sets 2000 us"
        window(title, tenants, probe, 2 * SECONDS, Both(tenant, root))


class Both:
    """The text of two repeats."""

    def __init__(self, tenant, root):
        self.tenant, self.root = tenant, root

    def __str__(self):
        return f"tenant: {self.tenant}; root: {self.root}"


def conserve(_):
    """Pauses one tenant and resumes it."""
    pool = Load.several(3)
    tenants = [[load] for load in pool]
    weigh(tenants, (50, 25, 25))
    window("50 : 25 : 25", tenants, None, SECONDS)
    others = pool[1:]
    for turn in range(5):
        paused = time.monotonic_ns()
        pool[0].pause()
        time.sleep(0.7)
        back = time.monotonic_ns()
        pool[0].pause(False)
        time.sleep(0.7)
        taken = first(paused, lambda at: sum(load.done(at, at + 50_000_000) for load in others) >= 0.95 * 50_000)
        given = first(back, lambda at: pool[0].done(at, at + 50_000_000) >= 0.45 * 50_000)
        say(f"turn {turn}: others had 95 % of the GPU {taken} ms after the pause, the tenant 45 % {given} ms after its return")
        rows.append((f"50 : 25 : 25, the first pauses, turn {turn}", "", "", "", "", f"taken in {taken} ms, back in {given} ms"))
    run(pool, 2)
    window("50 : 25, the third idle", tenants, None, SECONDS)


def first(from_ns, true):
    """Returns the milliseconds from a time to the first 50 ms for which `true` holds."""
    return next((at for at in range(600) if true(from_ns + at * 1_000_000)), "over 600")


def kinds(_):
    """Measures 75 : 25 while the second tenant does other things."""
    probe = Load(kind="probe").wait()
    a, b = Load.several(2)
    tenants = [[a], [b]]
    weigh(tenants, (75, 25))
    for title, mode, kernel_us in (
        ("graphs of 10 kernels", GRAPH, 1000),
        ("cooperative launches", COOPERATIVE, 1000),
        ("kernels of 50 ms", PLAIN, 50_000),
        ("kernels of 50 us", PLAIN, 50),
    ):
        b.mode(mode, kernel_us)
        window(f"75 : 25, the second runs {title}", tenants, probe, 2 * SECONDS)
    b.mode(COPY)
    window("75 : 25, the second copies from the host (MiB, no share)", tenants, probe, 2 * SECONDS)
    b.mode(PLAIN)
    window("75 : 25 once more", tenants, probe, SECONDS)
    c = Load().wait()
    window("75 : 25, a new process with the driver's default beside", [[a], [b], [c]], probe, SECONDS, slice_of(c, c.groups()[0]))
    c.mode(FAULT)
    c.process.wait(10)
    c.end()
    window("75 : 25 after that process's fault", tenants, probe, SECONDS)
    rm.in_child("root", lambda: set_slices([(a, 5000), (b, 15_000)]))
    window("25 : 75, set by an agent that ended", tenants, probe, SECONDS)
    debugger = subprocess.Popen(
        ["timeout", "40", "cuda-gdb", "-q", "-batch", "-p", str(b.pid), "-ex", "shell sleep 8", "-ex", "detach"],
        stdin=subprocess.DEVNULL,
        stdout=open(Load.work / "debugger", "w"),
        stderr=subprocess.STDOUT,
    )
    for at in range(4):
        window(f"25 : 75, cuda-gdb attaches to the second, {3 * (at + 1)} s", tenants, probe, 2.7)
    debugger.wait(45)
    say("cuda-gdb: " + (Load.work / "debugger").read_text()[-1200:])
    window("25 : 75, cuda-gdb gone", tenants, probe, SECONDS)


def scan(pid, newest, oldest, until):
    """Looks for the groups of a process until then."""
    while time.monotonic() < until:
        discover(pid, newest, oldest)


def outside(_):
    """Finds groups from outside, and compares them with what libcuda made by the preloaded log."""
    idle = Client()
    say(f"groups in use without a tenant: {idle.groups_in_use()}")
    probe = Load(kind="probe").wait()
    loads = Load.several(3)
    tenants = [[load] for load in loads]
    window("1 : 1 : 1", tenants, probe, SECONDS)
    newest = Client()
    say(f"clients {idle.handle:#x} to {newest.handle:#x}, groups in use {idle.groups_in_use()}")
    for load in loads:
        computing, others, costs = discover(load.pid, newest.handle, idle.handle)
        made = {(group.client, group.handle) for group in load.groups()}
        is_whole = {(client, group) for _, client, group in computing} == made
        rows.append((f"groups of {load.name}", "", "", "", "", f"{len(computing)} with kernels, {len(others)} others, as made: {is_whole}; {costs}"))
        say(" | ".join(rows[-1]))
    program = "import torch, time\na = torch.ones(4096, 4096, device='cuda')\nwhile True: (a @ a).sum().item()"
    with child([TORCH, "-c", program]) as torch:
        time.sleep(12)
        later = Client()
        computing, others, costs = discover(torch.pid, later.handle, idle.handle)
        handles = [f"{group:#x}" for *_, group in computing + others]
        rows.append(("groups of PyTorch", "", "", "", "", f"{len(computing)} with kernels, {len(others)} others: {handles}; {costs}"))
        say(" | ".join(rows[-1]))
        say(f"groups in use {idle.groups_in_use()}")
    for _ in range(3):
        window("1 : 1 : 1", tenants, probe, SECONDS)
        with ThreadPoolExecutor(1) as pool:
            until = time.monotonic() + SECONDS + 0.5
            scans = pool.submit(scan, loads[0].pid, newest.handle, idle.handle, until)
            window("1 : 1 : 1 while a root process scans all the time", tenants, probe, SECONDS)
            scans.result()
    for client in idle, newest, later:
        client.close()


def build(folder):
    """Compiles the load."""
    architecture = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], text=True
    ).split()[0]
    folder.chmod(0o755)
    program = folder / "load"
    subprocess.run(["gcc", "-O2", "-Wall", "-c", HERE / "rm.c", "-o", folder / "rm.o"], check=True)
    subprocess.run(
        ["nvcc", "-O2", "-std=c++17", f"-arch=sm_{architecture.replace('.', '')}", HERE / "load.cu", folder / "rm.o"]
        + ["-Xlinker", "--export-dynamic", "-o", program],
        check=True,
    )
    return program


def main():
    global BEGUN, SECONDS, LONG
    phases = {one.__name__: one for one in (attack, baseline, agent, contest, weights, conserve, outside, kinds)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(phases), help="phases, by commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a short window; a long one is five times it")
    parser.add_argument("--out", type=pathlib.Path, help="folder that gets rows.json")
    options = parser.parse_args()
    BEGUN, SECONDS, LONG = time.monotonic(), options.seconds, 5 * options.seconds

    say(" ".join(os.uname()))
    nvml = Nvml()
    Load.begun_ns = time.monotonic_ns()
    with tempfile.TemporaryDirectory(prefix="compute-shares-") as folder:
        Load.work = pathlib.Path(folder)
        Load.program = build(Load.work)
        Load.per_us = float(subprocess.check_output([Load.program, "-", "calibrate"], text=True))
        say(f"built; {Load.per_us} iterations a microsecond")
        for phase in options.only.split(","):
            rows.append((f"**{phase}**", "", "", "", "", ""))
            try:
                phases[phase](nvml)
            except Exception:
                say(f"{phase}: {traceback.format_exc()}")
                rows.append((f"{phase} stopped early", "", "", "", "", ""))
            for load in list(Load.alive):
                load.end()
            if options.out:
                (options.out / "rows.json").write_text(json.dumps(rows, indent=1))
    print("\n| window | shares | sum | probe p50 / p99 / max ms | NVML sm %, by both calls | status |\n|---|---|---|---|---|---|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |")
    say("done")


if __name__ == "__main__":
    main()
