"""Starts tenant processes (`load.cu`), reads their finished work, and finds their channel groups."""

import mmap
import os
import subprocess
import time

import rm

SLOTS, LATENCIES = 600_000, 300_000
LATENCY_AT = 4096 + 4 * SLOTS
STOP, PAUSE, MODE, KERNEL_US, READY = 0, 1, 2, 3, 4
PLAIN, GRAPH, COOPERATIVE, COPY, FAULT = range(5)


class Group:
    """A channel group that runs kernels, by the handles of control commands."""

    def __init__(self, fd, client, handle, channel):
        self.fd, self.client, self.handle, self.channel = fd, client, handle, channel


class Load:
    """One tenant process."""

    program = work = per_us = None  # set once by shares.py
    begun_ns = 0
    alive = []

    def __init__(self, kind="loop", actor="container's default", birth_us=None, paused=False):
        self.name = f"{kind}{len(Load.alive)}-{time.monotonic_ns()}"
        self.path = Load.work / f"{self.name}.board"
        self.log = Load.work / f"{self.name}.handles"
        self.errors = Load.work / f"{self.name}.errors"
        with open(self.path, "wb") as file:
            file.truncate(LATENCY_AT + 16 * LATENCIES)
        self.log.touch()
        for file in self.path, self.log:
            file.chmod(0o666)
        with open(self.path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.words = memoryview(self.map).cast("I")
        self.words[PAUSE], self.words[KERNEL_US] = int(paused), 1000
        memoryview(self.map).cast("Q")[3] = Load.begun_ns
        environment = dict(os.environ, RM_LOG=str(self.log))
        if birth_us is not None:
            environment["RM_BIRTH_US"] = str(birth_us)
        self.process = subprocess.Popen(
            [Load.program, self.path, kind, str(Load.per_us)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.errors, "w"),
            text=True,
            env=environment,
            preexec_fn=lambda: rm.become(actor),
        )
        self.files = {}
        Load.alive.append(self)

    @staticmethod
    def several(count, **options):
        """Starts several processes at once and waits for all."""
        return [load.wait() for load in [Load(**options) for _ in range(count)]]

    def wait(self):
        """Waits until the process has a context and its first kernel has run."""
        end = time.monotonic() + 30
        while not self.words[READY]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"failed to start {self.name}: {self.errors.read_text()}")
            time.sleep(0.02)
        return self

    @property
    def pid(self):
        return self.process.pid

    def pause(self, on=True):
        self.words[PAUSE] = int(on)

    def mode(self, mode, kernel_us=1000):
        self.words[KERNEL_US], self.words[MODE] = kernel_us, mode

    def done(self, from_ns, to_ns):
        """Returns the work finished between two times."""
        slots = [1024 + (at - Load.begun_ns) // 1_000_000 for at in (from_ns, to_ns)]
        return sum(self.words[slots[0] : slots[1]])

    def latencies(self, from_ns, to_ns):
        """Returns the probe's latencies between two times, in nanoseconds."""
        pairs = memoryview(self.map).cast("B")[LATENCY_AT : LATENCY_AT + 16 * self.words[8]].cast("Q")
        return [pairs[at + 1] for at in range(0, len(pairs), 2) if from_ns <= pairs[at] < to_ns]

    def handles(self):
        """Returns all groups and channels that libcuda has allocated: fd, class, client, parent, handle, engine."""
        rows = []
        for line in self.log.read_text().splitlines():
            fd, *hexes, engine = line.split()
            rows.append((int(fd), *(int(one, 16) for one in hexes), int(engine)))
        return rows

    def groups(self):
        """Returns the groups that run kernels, each with one of its channels."""
        rows = self.handles()
        channels = {}
        for _, kind, client, parent, handle, _ in rows:
            if kind != rm.CHANNEL_GROUP:
                channels.setdefault((client, parent), handle)
        return [
            Group(fd, client, handle, channels[client, handle])
            for fd, kind, client, _, handle, engine in rows
            if kind == rm.CHANNEL_GROUP and engine == rm.ENGINE_GRAPHICS and (client, handle) in channels
        ]

    def ask(self, group, target, command, params):
        """Makes the process send a command with its own capabilities, and returns status and answer."""
        self.process.stdin.write(f"{group.fd} {group.client:x} {target:x} {command:x} {params.hex()}\n")
        self.process.stdin.flush()
        status, _, answer = self.process.stdout.readline().split()
        return int(status, 16), bytes.fromhex(answer)

    def file(self, fd):
        """Returns this process's duplicate of the load's open /dev/nvidiactl."""
        if fd not in self.files:
            self.files[fd] = rm.fetch(self.pid, fd)
        return self.files[fd]

    def end(self):
        """Ends the process, also after a failure."""
        Load.alive.remove(self)
        self.words[STOP] = 1
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for fd in self.files.values():
            os.close(fd)


def slice_of(load, group):
    """Returns the group's slice by the driver."""
    status, answer, _ = rm.control(load.file(group.fd), group.client, group.handle, rm.GET_TIMESLICE, bytes(8))
    return int.from_bytes(answer, "little") if status == 0 else rm.status_name(status)


def set_slices(pairs, restart=True):
    """Sets the slices of each load's groups, then restarts the run list once, and returns the statuses."""
    statuses = []
    for load, slice_us in pairs:
        for group in load.groups():
            answer = rm.control(load.file(group.fd), group.client, group.handle, rm.SET_TIMESLICE, rm.microseconds(slice_us))
            statuses.append(rm.status_name(answer[0]))
    if restart:
        statuses.append(rm.status_name(restart_run_list(pairs[0][0])[0]))
    return statuses


def restart_run_list(load):
    """Restarts the run list by one channel of the load, and returns status and nanoseconds."""
    group = load.groups()[0]
    status, _, took = rm.control(load.file(group.fd), group.client, group.channel, rm.RESTART_RUNLIST, rm.FORCE)
    return status, took
