#!/usr/bin/env python3
"""Shows on a real GPU that pods' weights in its compute time hold, by the holder's own process.

usage: sudo weights.py FOLDER [--only PHASE,...] [--seconds N] [--windows N]

FOLDER has `holder` (`cargo build --release -p bursar-compute --example holder`) and `bursar-provisioner`. Needs one
otherwise unused NVIDIA GPU, root, nvcc and a Python with torch. The script changes no setting of the GPU. It tells the
holder which processes belong to which pod, and which of them launch work, as the agent does.

Phases:
  effect   two loads at 8,000 : 500 us, then swapped: at least 8 : 1 by finished work
  kinds    pairs of programs at 75 : 25: part of each in the sum of both shares, beside the driver's default slices
  fours    four pods of 40, 30, 20 and 10
  active   a pod of four processes of which one computes, beside a pod of one, 50 : 50
  pause    a tenant pauses and goes on: the other one has its time 15 ms later, and gives it back as soon
  crowd    25 processes of a pod beside a pod of one: the holder's processor time, and what it costs a
           neighbour's allocations
  contest  a tenant sets its slice to 100 ms at intervals, 50 : 50
  ends     a tenant is killed; the holder is killed, and started again
"""

import argparse
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import rm
from comparison import child
from loads import Load
from shares import Repeat, build
from table import Table

HERE = pathlib.Path(__file__).parent
PYTHON = "/opt/torch/.venv/bin/python3"
END, PAUSE, READY, FINISHED = range(4)
PAIRS = (("gemm", "gemm"), ("gemm", "copy"), ("gemm", "decode"), ("copy", "decode"), ("attention", "decode"), ("training", "gemm"))
# The most that a part may differ from its weight's: beside a program of its kind, and of another kind.
SAME, OTHER = 0.03, 0.05
EFFECT = 8


def device_node(gpu):
    """The GPU's device node, by the number that the kernel module tells."""
    for about in pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information"):
        words = dict(line.split(":", 1) for line in about.read_text().splitlines() if ":" in line)
        if words["GPU UUID"].strip() == gpu:
            return f"/dev/nvidia{words['Device Minor'].strip()}"
    raise RuntimeError(f"failed to find the device node of {gpu}")


class Holder:
    """The holder's process."""

    def __init__(self, program, gpu, round_us):
        self.process = subprocess.Popen([program, gpu, device_node(gpu), str(round_us)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pods(self, pods):
        """Orders pods, (weight, pids) by UID, until all of their groups are searched for. Returns the report."""
        order = [{"uid": uid, "weight": weight, "processes": sorted(pids), "is_doubted": False} for uid, (weight, pids) in pods.items()]
        report = {"in_use": None}
        while report["in_use"] is None:
            self._send({"request": "pods", "pods": order})
            report = json.loads(self.process.stdout.readline())["report"]
        return report

    def active(self, pids):
        self._send({"request": "active", "processes": sorted(pids)})

    def _send(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def processor(self):
        """Returns the seconds of processor time until now."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.kill()
        self.process.wait()


class Program:
    """A program of `kinds.py`."""

    alive = []

    def __init__(self, kind, folder):
        self.kind, path = kind, folder / f"{kind}-{time.monotonic_ns()}"
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self.board = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.process = subprocess.Popen([PYTHON, HERE / "kinds.py", kind, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.pid = self.process.pid
        Program.alive.append(self)

    def wait(self):
        end = time.monotonic() + 60
        while not self.board[READY]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"failed to start {self.kind}")
            time.sleep(0.02)
        return self

    def pause(self, on=True):
        self.board[PAUSE] = int(on)

    def finished(self):
        return self.board[FINISHED]

    def end(self):
        Program.alive.remove(self)
        self.board[END] = 1
        self.board[PAUSE] = 0
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Board:
    """A program of `load.cu`, with the same methods."""

    def __init__(self, load):
        self.load, self.pid = load, load.pid

    def pause(self, on=True):
        self.load.pause(on)

    def finished(self):
        return self.load.done(Load.begun_ns, time.monotonic_ns() - 2_000_000)

    def end(self):
        if self.load in Load.alive:
            self.load.end()


def rates(programs, seconds, tell=lambda: None):
    """Returns each program's finished work a second over the next seconds."""
    before, begun = [program.finished() for program in programs], time.monotonic()
    end = begun + seconds
    while time.monotonic() < end:
        tell()
        time.sleep(min(0.05, max(0, end - time.monotonic())))
    took = time.monotonic() - begun
    return [(program.finished() - first) / took for program, first in zip(programs, before)]


class Stage:
    """Programs on the GPU, their own rates, and the holder."""

    def __init__(self, options, table, gpu, folder):
        self.options, self.table, self.gpu, self.folder = options, table, gpu, folder
        self.holder = None

    def hold(self, round_us, pods, active):
        """Starts a holder with these pods; `active` are the pids that launch work."""
        self.release()
        self.holder = Holder(self.options.folder / "holder", self.gpu, round_us)
        report = self.holder.pods(pods)
        self.holder.active(active)
        time.sleep(0.3)
        return report

    def release(self):
        if self.holder:
            self.holder.end()
            self.holder = None

    def measure(self, programs, alone, active, windows=None):
        """Returns the medians of shares and of the first one's part in windows."""
        windows = windows or self.options.windows
        tell = (lambda: self.holder.active(active)) if self.holder else lambda: None
        rows = [rates(programs, self.options.seconds, tell) for _ in range(windows)]
        shares = [[rate / one for rate, one in zip(row, alone)] for row in rows]
        return [statistics.median(column) for column in zip(*shares)], [[share / sum(row) for share in row] for row in shares]

    def default(self, pods):
        """Gives the groups the driver's own slices again."""
        self.hold(4000, {uid: (None, pids) for uid, (_, pids) in pods.items()}, [])
        self.release()


def effect(stage):
    """Lets two loads of the provisioner finish work at 8,000 : 500 us, both ways round."""
    command = [stage.options.folder / "bursar-provisioner", "compute-load", "--gpu", stage.gpu]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child(command, **pipes) as one, child(command, **pipes) as other:
        both = (one, other)

        def finished(process):
            return json.loads(process.stdout.readline())["finished"]

        for process in both:
            finished(process)

        def ratio(weights):
            pods = {str(at): (weight, [process.pid]) for at, (weight, process) in enumerate(zip(weights, both))}
            report = stage.hold(8500, pods, [process.pid for process in both])
            counts = [[], []]
            end = time.monotonic() + 1.2
            while time.monotonic() < end:
                stage.holder.active([process.pid for process in both])
                for at, process in enumerate(both):
                    counts[at].append((time.monotonic(), finished(process)))
            rates_ = []
            for rows in counts:
                # The first lines were written before these weights.
                (t0, first), (t1, last) = next(row for row in rows if row[0] > end - 0.8), rows[-1]
                rates_.append((last - first) / (t1 - t0))
            stage.release()
            return rates_, report

        for weights in (94, 6), (6, 94):
            found, report = ratio(weights)
            large, small = (found, found[::-1])[weights[0] < weights[1]]
            stage.table.add(f"effect, {weights[0]} : {weights[1]} of 8.5 ms", f"{found[0]:.0f} : {found[1]:.0f} a second", f"{large / max(small, 1):.1f} : 1", json.dumps(report), wrong=large < EFFECT * small)


def kinds(stage):
    """Compares pairs of programs at 75 : 25 with the driver's default."""
    programs, alone = {}, {}
    for kind in dict.fromkeys(kind for pair in PAIRS for kind in pair):
        programs[kind] = [Program(kind, stage.folder)]
    programs["gemm"].append(Program("gemm", stage.folder))
    everything = [program for several in programs.values() for program in several]
    for program in everything:
        program.wait().pause()
    time.sleep(0.5)
    for kind, several in programs.items():
        several[0].pause(False)
        time.sleep(0.3)
        alone[kind] = rates(several[:1], stage.options.seconds)[0]
        several[0].pause()
        time.sleep(0.2)
    stage.table.say(f"alone: {alone}")
    for one, other in PAIRS:
        pair = [programs[one][0], programs[other][-1 if one == other else 0]]
        own = [alone[one], alone[other]]
        pods = {"a": (75, [pair[0].pid]), "b": (25, [pair[1].pid])}
        active = [program.pid for program in pair]
        stage.default(pods)
        for program in pair:
            program.pause(False)
        time.sleep(0.3)
        shares, _ = stage.measure(pair, own, active)
        before = sum(shares)
        stage.table.add(f"{one} + {other}, driver's slices", " ".join(f"{share:.3f}" for share in shares), f"{before:.3f}", "")
        for round_us, least in (4000, 0.97), (20_000, 1.02):
            report = stage.hold(round_us, pods, active)
            shares, parts = stage.measure(pair, own, active)
            worst = max(abs(part[0] - 0.75) for part in parts)
            most = SAME if one == other else OTHER
            cells = " ".join(f"{share:.3f}" for share in shares)
            total = f"{sum(shares):.3f}, {sum(shares) / before:.3f} of the default's"
            wrong = worst > most or sum(shares) < least * before
            stage.table.add(f"{one} + {other}, 75 : 25 of {round_us // 1000} ms", cells, total, f"part {statistics.median(part[0] for part in parts):.3f}, at most {worst:.3f} off; {report['known']} groups, {report['in_use']} in use", wrong=wrong)
            stage.release()
        for program in pair:
            program.pause()
        time.sleep(0.2)
    for program in everything:
        program.end()


def fours(stage):
    """Gives four pods 40, 30, 20 and 10."""
    boards = [Board(load) for load in Load.several(4)]
    weights = (40, 30, 20, 10)
    pods = {str(at): (weight, [board.pid]) for at, (weight, board) in enumerate(zip(weights, boards))}
    active = [board.pid for board in boards]
    for round_us in 4000, 20_000:
        stage.hold(round_us, pods, active)
        spent = stage.holder.processor()
        shares, parts = stage.measure(boards, [1e6] * 4, active)
        spent = (stage.holder.processor() - spent) / stage.options.seconds / stage.options.windows
        worst = max(abs(part - weight / 100) for row in parts for part, weight in zip(row, weights))
        stage.table.add(f"40, 30, 20, 10 of {round_us // 1000} ms", " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", f"at most {worst:.3f} off; holder {spent:.1%} of a processor", wrong=worst > OTHER)
        stage.release()
    for board in boards:
        board.end()


def active(stage):
    """Lets one of four processes of a pod compute, beside a pod of one."""
    boards = [Board(load) for load in Load.several(5)]
    for board in boards[1:4]:
        board.pause()
    pods = {"four": (50, [board.pid for board in boards[:4]]), "one": (50, [boards[4].pid])}
    busy = [boards[0], boards[4]]
    pids = [board.pid for board in busy]
    stage.hold(20_000, pods, pids)
    shares, parts = stage.measure(busy, [1e6] * 2, pids)
    worst = max(abs(part[0] - 0.5) for part in parts)
    stage.table.add("1 of 4 busy beside 1, 50 : 50 of 20 ms", " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", f"at most {worst:.3f} off", wrong=worst > 0.05)
    boards[1].pause(False)
    two = boards[:2] + [boards[4]]
    pids = [board.pid for board in two]
    shares, parts = stage.measure(two, [1e6] * 3, pids)
    part = statistics.median(row[0] + row[1] for row in parts)
    stage.table.add("2 of 4 busy beside 1", " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", f"part of both {part:.3f}", wrong=abs(part - 0.5) > 0.05)
    boards[4].pause()
    pids = [board.pid for board in boards[:2]]
    shares, _ = stage.measure(boards[:2], [1e6] * 2, pids)
    stage.table.add("the other pod idle", " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", "", wrong=sum(shares) < 0.85)
    stage.release()
    for board in boards:
        board.end()


def pause(stage):
    """Pauses one of two equal tenants, and looks at both from 15 ms after that."""
    boards = [Board(load) for load in Load.several(2)]
    one, other = (board.load for board in boards)
    pods = {str(at): (50, [board.pid]) for at, board in enumerate(boards)}
    pids = [board.pid for board in boards]
    stage.hold(4000, pods, pids)
    rests, returns = [], []
    for _ in range(30):
        for is_paused, rows in (True, rests), (False, returns):
            one.pause(is_paused)
            begun = time.monotonic_ns()
            stage.holder.active(pids)
            time.sleep(0.15)
            window = begun + 15_000_000, begun + 135_000_000
            rows.append([load.done(*window) / 120_000 for load in (one, other)])
    used = statistics.median(row[1] for row in rests)
    back = statistics.median(row[0] / sum(row) for row in returns)
    stage.table.add("15 ms after a pause", f"{statistics.median(row[0] for row in rests):.3f} {used:.3f}", f"{used:.3f}", f"least {min(row[1] for row in rests):.3f}", wrong=used < 0.95)
    stage.table.add("15 ms after its end", " ".join(f"{statistics.median(column):.3f}" for column in zip(*returns)), "", f"part {back:.3f}", wrong=abs(back - 0.5) > 0.05)
    stage.release()
    for board in boards:
        board.end()


def crowd(stage):
    """Looks at 25 busy processes beside a neighbour that allocates."""
    boards = [Board(load) for load in Load.several(25)]
    pids = [board.pid for board in boards]
    neighbour = Load(kind="allocator").wait()
    pods = {"crowd": (50, pids), "neighbour": (50, [neighbour.pid])}
    active = pids + [neighbour.pid]
    times, spent, report = {True: [], False: []}, [], {}
    for turn in range(2 * stage.options.windows):
        is_held = turn % 2 == 0
        if is_held:
            report = stage.hold(4000, pods, active)
            before = stage.holder.processor()
        begun = time.monotonic_ns()
        while time.monotonic_ns() < begun + stage.options.seconds * 1e9:
            if is_held:
                stage.holder.active(active)
            time.sleep(0.1)
        if is_held:
            spent.append((stage.holder.processor() - before) / stage.options.seconds)
            stage.release()
        rows = sorted(neighbour.latencies(begun, time.monotonic_ns()))
        times[is_held].append((rows[len(rows) // 2] / 1000, rows[len(rows) * 99 // 100] / 1000))
    columns = {held: [statistics.median(column) for column in zip(*rows)] for held, rows in times.items()}
    stage.table.add("2 MiB by a neighbour, held over not", f"{columns[True][0] / columns[False][0]:.3f} of the median", f"{columns[True][1] / columns[False][1]:.3f} of the p99", f"{columns[False]} us without; holder {statistics.median(spent):.1%} of a processor, {report['known']} groups", wrong=columns[True][1] > 1.02 * columns[False][1])
    neighbour.end()
    for board in boards:
        board.end()


def contest(stage):
    """Lets a tenant set its own slice, and looks at its neighbour's part."""
    boards = [Board(load) for load in Load.several(2)]
    tenant = boards[0].load
    pods = {"tenant": (50, [tenant.pid]), "neighbour": (50, [boards[1].pid])}
    pids = [board.pid for board in boards]
    groups = tenant.groups()
    files = [tenant.file(group.fd) for group in groups]

    def own_slice():
        return sum(rm.control(fd, one.client, one.handle, rm.SET_TIMESLICE, rm.microseconds(100_000))[2] for fd, one in zip(files, groups))

    stage.hold(4000, pods, pids)
    for every in 1.0, 0.3, 0.1, 0.03, 0.025, 0.015, 0.01, 0.005, 0.002, 0.001:
        seconds = stage.options.seconds * stage.options.windows
        repeat = Repeat("no capability", own_slice, every, seconds)
        shares, parts = stage.measure(boards, [1e6] * 2, pids)
        str(repeat)
        part = statistics.median(row[1] for row in parts)
        least = min(row[1] for row in parts)
        # The holder keeps no part against such a tenant, and has to see it.
        seen = stage.holder.pods(pods)["changed"].get(str(tenant.pid), 0)
        stage.table.add(f"the tenant sets 100 ms each {every * 1000:g} ms", " ".join(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}", f"neighbour's part {part:.3f}, least {least:.3f}; {seen} changes seen", wrong=not seen)
    stage.release()
    for board in boards:
        board.end()


def used_mib():
    return int(subprocess.check_output(["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True))


def ends(stage):
    """Kills a tenant beside a holder, and the holder."""
    boards = [Board(load) for load in Load.several(3)]
    pods = {str(at): (weight, [board.pid]) for at, (weight, board) in enumerate(zip((60, 20, 20), boards))}
    pids = [board.pid for board in boards]
    stage.hold(4000, pods, pids)
    shares, _ = stage.measure(boards, [1e6] * 3, pids, windows=1)
    stage.release()
    time.sleep(0.5)
    kept, _ = stage.measure(boards, [1e6] * 3, pids, windows=1)
    stage.table.add("the holder is killed", " ".join(f"{share:.3f}" for share in kept), f"{sum(kept):.3f}", f"before {' '.join(f'{share:.3f}' for share in shares)}", wrong=max(abs(a - b) for a, b in zip(shares, kept)) > 0.03)
    report = stage.hold(4000, {**pods, "0": (20, [pids[0]]), "1": (60, [pids[1]])}, pids)
    swapped, _ = stage.measure(boards, [1e6] * 3, pids, windows=1)
    stage.table.add("a new holder swaps two weights", " ".join(f"{share:.3f}" for share in swapped), f"{sum(swapped):.3f}", json.dumps(report), wrong=abs(swapped[1] / sum(swapped) - 0.6) > 0.05)
    before, begun = used_mib(), time.monotonic()
    boards[2].load.process.kill()
    while used_mib() > before - 400 and time.monotonic() < begun + 10:
        stage.holder.active(pids[:2])
    took = time.monotonic() - begun
    stage.table.add("a tenant is killed beside the holder", "", "", f"its memory is free after {took:.2f} s", wrong=took > 5)
    stage.release()
    for board in boards:
        board.end()


def main():
    phases = {one.__name__: one for one in (effect, kinds, fours, active, pause, crowd, contest, ends)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(phases), help="phases, by commas")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--windows", type=int, default=10)
    options = parser.parse_args()
    table = Table("programs", "shares", "sum", "answer")
    gpu = subprocess.check_output(["nvidia-smi", "--id=0", "--query-gpu=uuid", "--format=csv,noheader"], text=True).strip()
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        Load.work = pathlib.Path(folder)
        Load.begun_ns = time.monotonic_ns()
        Load.program = build(Load.work)
        Load.per_us = float(subprocess.check_output([Load.program, "-", "calibrate"], text=True))
        table.say("built")
        stage = Stage(options, table, gpu, Load.work)
        for phase in options.only.split(","):
            try:
                phases[phase](stage)
            except Exception:
                table.add(f"{phase} stopped early", "", "", "", wrong=traceback.format_exc()[-600:])
            stage.release()
            for one in list(Load.alive) + list(Program.alive):
                one.end()
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
