"""Measures on a real GPU the facts of docs/internals/facts.md that no other script measures.

usage: facts.py [--gpu UUID] [--only FACT...]

Needs an NVIDIA driver, and a machine on which no other process uses a GPU; no network and no CUDA
toolkit. The row of the XIDs needs root for /dev/kmsg, and the row of F9 needs a C compiler. The
script allocates at most 64 GiB on one GPU, changes no setting of it and ends within 3 minutes. It
prints one table, and exits with 1 if a claim is contradicted, and with 2 if it can measure nothing.
The bounds are wide, because the figures of docs/internals/facts.md are of one H200. A row that the
machine cannot show is "not shown here".
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

import costs
import nulls
from table import Table

MIB, GIB = 1 << 20, 1 << 30
LARGEST = 64 * GIB
LIMIT_S = 180
POOL_STEP = 32 * MIB
SPIN_NS = 800_000_000
ILLEGAL_ADDRESS, NOT_READY, CAPTURE_UNSUPPORTED = 700, 600, 900
# CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL and
# _RELAXED, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT of cuda.h.
DESCRIPTOR_HANDLE, NON_BLOCKING, GLOBAL, RELAXED, POOL_RESERVED, GRAPHS_RESERVED = 1, 1, 0, 2, 5, 2
# CU_EVENT_DISABLE_TIMING of cuda.h.
DISABLE_TIMING = 2
# PROC_PID_INIT_INO of Linux: the first pid namespace, whose process ids the kernel's log has.
FIRST_PID_NAMESPACE = 0xEFFFFFFC
SIMULATED = "SIMGPU_DIR" in os.environ
# The driver may take this much beside an allocation, for example for page tables.
SLACK = 64 * MIB
NO_TIMES = "the simulated driver does not take a real one's time"

# The simulated driver has functions of the same names and effects, whatever the image.
KERNELS = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %bound, %begun, %now;
    .reg .pred %more;
    ld.param.u64 %bound, [nanoseconds];
    mov.u64 %begun, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begun;
    setp.lt.u64 %more, %now, %bound;
    @%more bra again;
    ret;
}
.visible .entry fault()
{
    .reg .u64 %at;
    .reg .u32 %word;
    mov.u64 %at, 16;
    mov.u32 %word, 1;
    st.global.u32 [%at], %word;
    ret;
}
\0"""

# Calls from Python take longer than the query itself.
QUERY = r"""
#include <stddef.h>
#include <stdint.h>
#include <time.h>
double query(int (*range)(uint64_t *, size_t *, uint64_t), uint64_t pointer, int times) {
    struct timespec begun, ended;
    uint64_t base;
    size_t size;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int i = 0; i < times; i++)
        if (range(&base, &size, pointer)) return -1;
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return ((ended.tv_sec - begun.tv_sec) * 1e9 + (ended.tv_nsec - begun.tv_nsec)) / times;
}
"""


class Failure(Exception):
    """A call of the driver or of NVML that should have succeeded."""


class Late(Exception):
    """The script's time is over."""


class Descriptor(int):
    """An open file descriptor, which a client passes to the script."""


class Calls(costs.Costs):
    """Calls the driver in a client's process; each public function is one request of the script."""

    def __init__(self):
        super().__init__()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.current = ctypes.c_void_p()
        self.spin_kernel = self.fault_kernel = None

    def _call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise Failure(f"{name} returned {code}")

    def _new(self, name, *arguments, kind=ctypes.c_uint64):
        """Calls a function whose first argument is what it makes."""
        made = kind()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def init(self):
        self._call("cuInit", 0)

    def context(self):
        self.init()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self.current), 0)
        self._call("cuCtxSetCurrent", self.current)
        self._call("cuCtxSynchronize")

    def kernels(self):
        module = self._new("cuModuleLoadData", ctypes.c_char_p(KERNELS))
        self.spin_kernel = self._new("cuModuleGetFunction", module, b"spin")
        self.fault_kernel = self._new("cuModuleGetFunction", module, b"fault")
        self._spin(1000, None)
        self._call("cuCtxSynchronize")

    def _spin(self, nanoseconds, stream):
        bound = ctypes.c_uint64(nanoseconds)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(bound))
        self._call("cuLaunchKernel", self.spin_kernel, *[1] * 6, 0, stream, arguments, None)

    def spin(self, seconds):
        """Keeps the GPU busy, and returns whether it is."""
        self._spin(int(seconds * 1e9), None)
        time.sleep(0.2)
        return self.driver.cuStreamQuery(None) == NOT_READY

    def fault(self):
        """Accesses an illegal address, and returns the code of the next call that waits."""
        self._call("cuLaunchKernel", self.fault_kernel, *[1] * 6, 0, None, None, None)
        return self.driver.cuCtxSynchronize()

    def allocate(self, size):
        return self._new("cuMemAlloc_v2", ctypes.c_size_t(size)).value

    def touch_managed(self, size):
        """Allocates managed memory, uses it on the GPU and frees it."""
        pointer = self._new("cuMemAllocManaged", ctypes.c_size_t(size), 1)
        self._call("cuMemsetD8_v2", pointer, 1, ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        self._call("cuMemFree_v2", pointer)

    def create(self, size):
        """Creates memory that can be exported, and needs no context for it."""
        prop = struct.pack("<iiiiQQ", 1, DESCRIPTOR_HANDLE, 1, 0, 0, 0)
        return self._new("cuMemCreate", ctypes.c_size_t(size), prop, ctypes.c_uint64(0)).value

    def export(self, handle):
        name = "cuMemExportToShareableHandle"
        made = self._new(name, ctypes.c_uint64(handle), DESCRIPTOR_HANDLE, ctypes.c_uint64(0), kind=ctypes.c_int)
        return Descriptor(made.value)

    def attach(self, descriptor, size):
        """Imports memory and maps it, with the descriptor closed again."""
        name = "cuMemImportFromShareableHandle"
        handle = self._new(name, ctypes.c_void_p(descriptor), DESCRIPTOR_HANDLE)
        os.close(descriptor)
        zero, size = ctypes.c_uint64(0), ctypes.c_size_t(size)
        address = self._new("cuMemAddressReserve", size, ctypes.c_size_t(0), zero, zero)
        self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        self._call("cuMemSetAccess", address, size, struct.pack("<iii", 1, 0, 3), ctypes.c_size_t(1))

    def export_times(self, handle, rounds):
        """Returns medians in nanoseconds: the first export, the next one, and the last close."""
        times = []
        for _ in range(rounds):
            at = [time.perf_counter_ns()]
            first = self.export(handle)
            at.append(time.perf_counter_ns())
            second = self.export(handle)
            at.append(time.perf_counter_ns())
            os.close(second)
            before_close = time.perf_counter_ns()
            os.close(first)
            times.append((at[1] - at[0], at[2] - at[1], time.perf_counter_ns() - before_close))
        return [statistics.median(column) for column in zip(*times)]

    def query_times(self, library):
        """Returns nanoseconds of a range's query with few and many allocations, and of a pair."""
        timed = ctypes.CDLL(library).query
        timed.restype = ctypes.c_double
        taken = []
        for count in (1, 999):
            pointers = [self.allocate(2 * MIB) for _ in range(count)]
            for offset in (0, MIB):
                pointer = ctypes.c_uint64(pointers[-1] + offset)
                times = [timed(self.driver.cuMemGetAddressRange_v2, pointer, 10_000) for _ in range(9)]
                taken.append(statistics.median(times))
        pairs = []
        for _ in range(200):
            begun = time.perf_counter_ns()
            self._call("cuMemFree_v2", ctypes.c_uint64(self.allocate(2 * MIB)))
            pairs.append(time.perf_counter_ns() - begun)
        return min(taken), max(taken), statistics.median(pairs)

    def _pool_allocation(self, size, stream=None):
        return self._new("cuMemAllocAsync", ctypes.c_size_t(size), stream)

    def pool(self, size):
        """Returns the reserved bytes of the default pool around an allocation and its free."""
        pool = self._new("cuDeviceGetDefaultMemPool", 0, kind=ctypes.c_void_p)

        def reserved():
            value = ctypes.c_uint64()
            self._call("cuMemPoolGetAttribute", pool, POOL_RESERVED, ctypes.byref(value))
            return value.value

        self._call("cuCtxSynchronize")
        samples = [reserved()]
        pointer = self._pool_allocation(size)
        self._call("cuCtxSynchronize")
        samples.append(reserved())
        self._call("cuMemFreeAsync", pointer, None)
        # The free has long completed, but no call of the host has waited for it.
        time.sleep(0.3)
        samples.append(reserved())
        self._call("cuCtxSynchronize")
        return [*samples, reserved()]

    def _stream(self):
        return self._new("cuStreamCreate", NON_BLOCKING, kind=ctypes.c_void_p)

    def _graph(self, size):
        """Makes an executable graph of a memory node of that size; of a kernel if it is 0."""
        stream = self._stream()
        self._call("cuStreamBeginCapture_v2", stream, RELAXED)
        if size:
            self._call("cuMemFreeAsync", self._pool_allocation(size, stream), stream)
        else:
            self._spin(1000, stream)
        graph = ctypes.c_void_p()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return self._new("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0), kind=ctypes.c_void_p)

    def _capture(self):
        """Begins a capture that calls of all threads can invalidate, and returns its stream."""
        stream = self._stream()
        self._call("cuStreamBeginCapture_v2", stream, GLOBAL)
        return stream

    def _is_capture_active(self):
        """Returns whether a capture refuses `cuMemAlloc`. The call invalidates that capture."""
        pointer = ctypes.c_uint64()
        code = self.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(MIB))
        if code == 0:
            self._call("cuMemFree_v2", pointer)
        elif code != CAPTURE_UNSUPPORTED:
            raise Failure(f"cuMemAlloc_v2 returned {code}")
        return code != 0

    def ends_of_captures(self):
        """Returns whether a capture is active after the destruction of a stream that joined it, of
        the invalidated and the valid stream on which it began, and of its context."""
        active = []
        origin, joined = self._capture(), self._stream()
        event = self._new("cuEventCreate", DISABLE_TIMING, kind=ctypes.c_void_p)
        self._call("cuEventRecord", event, origin)
        self._call("cuStreamWaitEvent", joined, event, 0)
        self._call("cuStreamDestroy_v2", joined)
        active.append(self._is_capture_active())
        self._call("cuStreamDestroy_v2", origin)
        active.append(self._is_capture_active())
        self._call("cuStreamDestroy_v2", self._capture())
        active.append(self._is_capture_active())
        context = self._new("cuCtxCreate_v2", 0, 0, kind=ctypes.c_void_p)
        self._capture()
        self._call("cuCtxDestroy_v2", context)
        self._call("cuCtxSetCurrent", self.current)
        active.append(self._is_capture_active())
        return active

    def _launch(self, graph, stream):
        """Launches a graph, and returns how long the call took, in nanoseconds."""
        begun = time.perf_counter_ns()
        self._call("cuGraphLaunch", graph, stream)
        return time.perf_counter_ns() - begun

    def graph_pool(self, sizes):
        """Launches graphs back to back in one stream, and returns what the graph pool has then."""
        stream, graphs = self._stream(), [self._graph(size) for size in sizes]
        for graph in graphs:
            self._launch(graph, stream)
        self._call("cuCtxSynchronize")
        value = ctypes.c_uint64()
        self._call("cuDeviceGetGraphMemAttribute", 0, GRAPHS_RESERVED, ctypes.byref(value))
        for graph in graphs:
            self._call("cuGraphExecDestroy", graph)
        self._call("cuDeviceGraphMemTrim", 0)
        return value.value

    def graph_wait(self):
        """Launches a graph again while it waits in another stream.

        Returns how long that launch took, and medians of launches that other streams made
        meanwhile: of a graph without memory nodes, and of another graph with memory nodes. The
        last value is whether all of them ended before the first launch did.
        """
        first, second, third = (self._stream() for _ in range(3))
        graph, plain, other = (self._graph(size) for size in (MIB, 0, MIB))
        for launched, stream in ((graph, first), (graph, second), (plain, third), (other, third)):
            self._launch(launched, stream)
            self._call("cuCtxSynchronize")
        waited = []

        def launch_again():
            self._call("cuCtxSetCurrent", self.current)
            waited.append(self._launch(graph, second))

        self._spin(SPIN_NS, first)
        self._launch(graph, first)
        thread = threading.Thread(target=launch_again)
        thread.start()
        time.sleep(0.05)
        times = [[self._launch(one, third) for _ in range(9)] for one in (plain, other)]
        meanwhile = not waited
        thread.join()
        self._call("cuCtxSynchronize")
        return waited[0], *(statistics.median(each) for each in times), meanwhile


def serve(descriptor):
    """Executes requests until the script closes its end; the end of a client's process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    calls, script = Calls(), socket.socket(fileno=descriptor)
    while True:
        request, received, _, _ = socket.recv_fds(script, 1 << 16, 1)
        if not request:
            return
        name, *arguments = json.loads(request)
        answer, given = {}, []
        try:
            result = getattr(calls, name)(*received, *arguments)
            if isinstance(result, Descriptor):
                given = [result]
            else:
                answer["result"] = result
        except (Failure, AttributeError, OSError, RuntimeError) as error:
            answer["failure"] = str(error)
        socket.send_fds(script, [json.dumps(answer).encode()], given)
        for one in given:
            os.close(one)


class Client:
    """A process that uses the GPU at the script's request."""

    def __init__(self, *requests):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        command = [sys.executable, os.path.abspath(__file__), "--client", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            for request in requests:
                self.ask(request)
        except BaseException:
            self.__exit__()
            raise

    def ask(self, name, *arguments, descriptor=None):
        """Makes a request, and returns its result or the descriptor that came with it."""
        passed = [] if descriptor is None else [descriptor]
        socket.send_fds(self.socket, [json.dumps([name, *arguments]).encode()], passed)
        message, received, _, _ = socket.recv_fds(self.socket, 1 << 16, 1)
        if not message:
            raise Failure(f"the client ended within {name}")
        answer = json.loads(message)
        if "failure" in answer:
            raise Failure(answer["failure"])
        return received[0] if received else answer["result"]

    def kill(self):
        """Sends SIGKILL, and does not wait."""
        self.process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
            self.process.wait(10)


class ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_t` of nvml.h."""

    _fields_ = [(name, ctypes.c_uint) for name in ("pid", "padding")]
    _fields_ += [("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


class Gpu:
    """A GPU by NVML."""

    def __init__(self, uuid):
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        if uuid is None:
            self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))
        else:
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.handle))
        self.uuid, self.name = self._text("nvmlDeviceGetUUID", self.handle), self._text("nvmlDeviceGetName", self.handle)
        self.driver = self._text("nvmlSystemGetDriverVersion")
        self.others = set(self.charges())

    def _call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise Failure(f"{name} returned {code}")

    def _text(self, name, *arguments):
        text = ctypes.create_string_buffer(96)
        self._call(name, *arguments, text, 96)
        return text.value.decode()

    def _memory(self):
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        self._call("nvmlDeviceGetMemoryInfo", self.handle, memory)
        return memory

    def used(self):
        return self._memory()[2]

    def free(self):
        return self._memory()[1]

    def charges(self):
        """Returns what NVML charges each process with, by its pid in NVML's pid namespace."""
        count, infos = ctypes.c_uint(64), (ProcessInfo * 64)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, ctypes.byref(count), infos)
        return {info.pid: info.used for info in infos[: count.value]}

    def ours(self):
        """Returns the charges of processes that the script has started."""
        return [used for pid, used in self.charges().items() if pid not in self.others]

    def settled(self):
        """Waits until the used bytes no longer change, and returns them."""
        same_since, used, end = time.monotonic(), self.used(), time.monotonic() + 5
        while time.monotonic() < min(end, same_since + 0.3):
            time.sleep(0.01)
            if (now := self.used()) != used:
                same_since, used = time.monotonic(), now
        return used


def wait_until(holds, seconds):
    """Returns whether a condition came to hold in time."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.002)
    return held


def mib(size):
    """Formats bytes."""
    return f"{size / MIB:,.0f} MiB"


def of_range(value, least, most):
    """Describes the failure of a value that is outside its bounds."""
    return None if least <= value <= most else f"not within {least} and {most}"


def without_context(gpu, table):
    """F3: a process that owns memory and has no context."""
    before = gpu.settled()
    with Client("init") as owner, Client() as neighbour:
        took = gpu.settled() - before
        why = "the simulated driver takes it when memory is created" if SIMULATED else None
        table.add("F3", "`cuInit` takes 4 MiB", mib(took), wrong=of_range(took / MIB, 1, 32), unshown=why)
        handle = owner.ask("create", GIB)
        unlisted, grown = gpu.ours(), gpu.settled() - before
        neighbour.ask("context")
        # NVML lists a process with a context, so the other one's absence means something.
        control = len(gpu.ours()) == 1
        table.add(
            "F3",
            "NVML does not list a process that owns memory without a context",
            f"{len(unlisted)} listed, {mib(grown)} in use",
            wrong=bool(unlisted) or grown < GIB,
            unshown=None if control else "NVML does not list a process with a context either",
        )
        neighbour.ask("kernels")
        code = neighbour.ask("fault")
        owner.ask("create", 2 * MIB)
        os.close(owner.ask("export", handle))
        wrong = None if code == ILLEGAL_ADDRESS else f"code {code} instead of {ILLEGAL_ADDRESS}"
        claim = "no fault of a neighbour's kernel reaches it"
        table.add("F3", claim, f"fault {code}; it creates and exports on", wrong=wrong)
        first, further, close = owner.ask("export_times", handle, 25)
        table.add(
            "F3",
            "the first export takes 0.6 ms, its close 0.5 ms, an export beside an open one 18 us",
            f"{first / 1e6:.2f} ms, {close / 1e6:.2f} ms, {further / 1e3:.0f} us",
            wrong=of_range(first / further, 3, 1000) or of_range(close / first, 0.1, 10),
            unshown=NO_TIMES if SIMULATED else None,
        )


def charged(gpu, table):
    """F5: what NVML charges for shared memory, and for a context."""
    before = gpu.settled()
    with Client("init") as owner, Client("context") as user:
        gpu.settled()
        alone = gpu.ours()
        if len(alone) != 1 or not 0 < alone[0] < 1 << 60:
            why = f"NVML charges {alone} for one process with a context"
            return table.add("F5", "whom NVML charges for shared memory", "", unshown=why)
        context = alone[0]
        table.add("F5", "a context takes 518 MiB", mib(context), wrong=of_range(context / MIB, 64, 2048))
        descriptor = owner.ask("export", owner.ask("create", GIB))
        user.ask("attach", GIB, descriptor=descriptor)
        with_owner = [used - context for used in gpu.ours()]
        owner.kill()
        owner.process.wait()
        gpu.settled()
        with_descriptor, held = [used - context for used in gpu.ours()], gpu.used() - before
        table.add(
            "F5",
            "NVML charges no process while a descriptor is open elsewhere",
            f"{[used // MIB for used in with_owner]} MiB beside the owner, "
            f"{[used // MIB for used in with_descriptor]} MiB after its end, {mib(held)} in use",
            wrong=sum(with_owner) >= SLACK or sum(with_descriptor) >= SLACK or held < GIB,
        )
        os.close(descriptor)
        wait_until(lambda: sum(gpu.ours()) >= context + GIB, 2)
        with_none = [used - context for used in gpu.ours()]
        claim = "NVML charges the importer once none is"
        wrong = of_range(sum(with_none), GIB, GIB + SLACK)
        table.add("F5", claim, f"{[used // MIB for used in with_none]} MiB", wrong=wrong)
        known = sum(gpu.ours())
        rest = {gpu.used() - known for _ in range(300)}
        table.add(
            "F5",
            "used bytes less the known allocations are exact while nothing changes",
            f"{len(rest)} value in 300 readings, {mib(max(rest) - before)} beside what was used before",
            wrong=len(rest) != 1 or abs(max(rest) - before) > SLACK,
        )


class KernelLog:
    """The lines of the kernel's log since the script began."""

    def __init__(self):
        self.why, self.file = None, None
        if SIMULATED:
            self.why = "the simulated driver writes no kernel log"
        elif os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
            self.why = "the log has process ids of another pid namespace"
        else:
            try:
                self.file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self.file, 0, os.SEEK_END)
            except OSError as error:
                self.why = f"/dev/kmsg: {error.strerror}"

    def xids(self):
        """Returns the new XIDs 31 and 43, each with its process id."""
        found = []
        while self.file is not None and self.why is None:
            try:
                record = os.read(self.file, 8192).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue
            except OSError as error:
                self.why = f"/dev/kmsg: {error.strerror}"
                break
            if match := re.search(r"NVRM: Xid \([^)]*\): (31|43), pid='?(\d+)", record):
                found.append((int(match[1]), int(match[2])))
        return found


def killed(gpu, table):
    """F8: SIGKILL under a running kernel, and the XIDs of the kernel's log."""
    log, before = KernelLog(), gpu.settled()
    size = min(LARGEST, gpu.free() * 3 // 4 // GIB * GIB)
    with Client("context", "kernels") as holder, Client("context", "kernels") as faulty:
        faulty.ask("fault")
        pids = {faulty.process.pid: "fault", holder.process.pid: "SIGKILL"}
        faulty.kill()
        faulty.process.wait()
        holder.ask("allocate", size)
        busy, held = holder.ask("spin", 20), gpu.settled() - before
        begun = time.monotonic()
        holder.kill()
        is_free = wait_until(lambda: gpu.used() <= before + SLACK, 10)
        took, left = time.monotonic() - begun, gpu.used() - before
        holder.process.wait()
    right = busy and held >= size and is_free
    claim = "after SIGKILL under a running kernel, its memory is free again"
    cell = f"{mib(held)} before, {mib(max(0, left))} after" + ("" if busy else "; the kernel did not run")
    table.add("F8", claim, cell, wrong=not right)
    why = NO_TIMES if SIMULATED else None
    table.add("F8", "100 GiB within 112 ms", f"{took * 1e3:.0f} ms of {size // GIB} GiB", wrong=took > 1, unshown=why)
    time.sleep(0 if SIMULATED else 1)
    found = log.xids()
    strange = [(code, pid) for code, pid in found if pid not in pids]
    is_whole = {code for code, _ in found} == {31, 43}
    table.add(
        "F8",
        "XIDs 31 and 43 name the process id in the kernel's log",
        ", ".join(f"{code} after {pids.get(pid, pid)}" for code, pid in found),
        wrong=f"no such process: {strange}" if strange else None,
        unshown=log.why or (None if strange or is_whole else "the kernel's log has not both XIDs of these processes"),
    )


def query(gpu, table):
    """F9: the query of a pointer's range."""
    claim = "the query of a pointer's range (`cuMemGetAddressRange`) takes 60 to 127 ns"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return table.add("F9", claim, "", unshown="there is no C compiler")
    with tempfile.TemporaryDirectory() as folder, Client("context") as client:
        source, library = os.path.join(folder, "query.c"), os.path.join(folder, "query.so")
        with open(source, "w") as file:
            file.write(QUERY)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        least, most, pair = client.ask("query_times", library)
    cell = f"{least:.0f} to {most:.0f} ns; `cuMemAlloc` and `cuMemFree` {pair / 1e3:.0f} us"
    wrong = of_range(least, 1, 1000) or of_range(pair / most, 10, 1e6)
    table.add("F9", claim, cell, wrong=wrong, unshown=NO_TIMES if SIMULATED else None)


def pools(gpu, table):
    """F15: pools of streams and of graphs."""
    with Client("context", "kernels") as client:
        start, taken, freed, synchronised = client.ask("pool", 1)
        larger = client.ask("pool", 33 * MIB)[1]
        table.add(
            "F15",
            "a pool grows in steps of 32 MiB: 1 byte takes 32 MiB, 33 MiB take 64",
            f"{mib(taken - start)}, {mib(larger)}",
            wrong=(start, taken % POOL_STEP, larger % POOL_STEP) != (0, 0, 0)
            or of_range(taken, POOL_STEP, 2 * POOL_STEP)
            or of_range(larger, 2 * POOL_STEP, 4 * POOL_STEP),
        )
        table.add(
            "F15",
            "the pool shrinks only when the host synchronises",
            f"{mib(taken)}, {mib(freed)} 0.3 s after the free, {mib(synchronised)} after the synchronisation",
            wrong=freed != taken or synchronised >= taken,
        )
        small, two = client.ask("graph_pool", [1]), client.ask("graph_pool", [150 * MIB] * 2)
        claim = "a graph pool grows by the same steps; two graphs of 150 MiB in a stream take 160 MiB"
        wrong = small != POOL_STEP or two % POOL_STEP or not 150 * MIB <= two <= 224 * MIB
        table.add("F15", claim, f"{mib(small)} of 1 byte, {mib(two)} of the two", wrong=bool(wrong))
        waited, plain, other, meanwhile = client.ask("graph_wait")
        table.add(
            "F15",
            "a launch of a graph with memory nodes waits for its launch in another stream",
            f"{waited / 1e6:.0f} ms behind a kernel of {SPIN_NS / 1e6:.0f} ms",
            wrong=of_range(waited, 0.5 * SPIN_NS, 2 * SPIN_NS),
        )
        claim = "other threads launch meanwhile: a graph without memory nodes in 33 us, another with them in 321 us"
        wrong = None if meanwhile else "they waited too"
        wrong = wrong or of_range(plain / 1e3, 1, 5_000) or of_range(other / 1e3, 1, 50_000)
        why = NO_TIMES if SIMULATED else None
        table.add("F15", claim, f"{plain / 1e3:.0f} us, {other / 1e3:.0f} us", wrong=wrong, unshown=why)


def captures(gpu, table):
    """F21: what ends the capture of a stream."""
    with Client("context") as client:
        joined, *ended = client.ask("ends_of_captures")
    state = {True: "active", False: "ended"}
    claim = "a capture outlives a stream that joined it"
    table.add("F21", claim, state[joined], wrong=None if joined else "it ended")
    claim = "a capture ends with the stream on which it began, valid or not, and with its context"
    table.add("F21", claim, ", ".join(state[each] for each in ended), wrong="it is active" if any(ended) else None)


def unlisted(gpu, table):
    """F30: what the driver takes for itself and lists for no process."""
    before = gpu.settled()

    def rest():
        return gpu.settled() - before - sum(gpu.ours())

    with contextlib.ExitStack() as clients:
        contexts, amounts = [], {}
        for number in (1, 4, 8):
            contexts += [clients.enter_context(Client("context")) for _ in range(number - len(contexts))]
            amounts[number] = rest()
        claim = "NVML lists up to 9 MiB of a context for no process"
        cell = ", ".join(f"{mib(amount)} of {number}" for number, amount in amounts.items())
        is_less = all(0 <= amount <= 9 * MIB * number for number, amount in amounts.items())
        table.add("F30", claim, cell, wrong=not is_less)
        after = []
        for client in contexts[:2]:
            client.ask("touch_managed", MIB)
            after.append(rest() - amounts[8])
        contexts[0].kill()
        contexts[0].process.wait()
        after.append(rest() - amounts[8])
        claim = "managed memory that was freed leaves 128 MiB once for the GPU, while a context lives"
        is_once = after[0] > 64 * MIB and max(after) <= 128 * MIB and after[2] > 32 * MIB
        table.add("F30", claim, f"{mib(after[0])}, {mib(after[1])} of two, {mib(after[2])} after one's end", wrong=not is_once)
    left = gpu.settled() - before
    table.add("F30", "the last context's end frees it", mib(left), wrong=left > SLACK)


def null_outputs(gpu, table):
    """F31: what the driver and NVML do where an output is NULL."""
    measured = nulls.measure()
    other = [f"{' '.join(row)}: {code}" for row, code in measured.items() if code not in (nulls.expected(*row), "absent")]
    accepted = [" ".join(row) for row, code in measured.items() if code == "0"]
    claim = "the codes of nulls.py where an output of a hooked function is NULL"
    table.add("F31", claim, f"{len(measured)} outputs, accepted: {', '.join(accepted)}", wrong="; ".join(other[:9]) or None)


def end(*_):
    """Ends the measurement at its limit."""
    raise Late(f"no end within {LIMIT_S} s")


def main():
    """Measures all facts, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", help="its UUID; the first that NVML lists")
    parser.add_argument("--only", nargs="*", metavar="FACT", help="the numbers of the facts to measure, for example F22")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        return serve(options.client)
    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        gpu, table = Gpu(options.gpu), Table("fact", "claim", "measured")
    except (Failure, OSError) as error:
        print(f"failed to open a GPU: {error}", file=sys.stderr)
        return 2
    if gpu.others and not SIMULATED:
        print(f"processes {sorted(gpu.others)} use {gpu.name}; end them first", file=sys.stderr)
        return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
    driver = "the simulated driver" if SIMULATED else f"driver {gpu.driver}"
    table.say(f"{gpu.name}, {driver}, {gpu.free() // GIB} GiB free, {len(gpu.others)} other processes")
    try:
        # Its modules have no code, so that it can show none of these.
        costly = () if SIMULATED else costs.FACTS
        for fact in (without_context, charged, killed, query, pools, captures, unlisted, null_outputs, *costly):
            number = fact.__doc__.split(":")[0]
            if options.only and number not in options.only:
                continue
            try:
                fact(gpu, table, *([Client] if fact in costly else []))
            except (Failure, OSError, subprocess.CalledProcessError) as error:
                table.add(number, fact.__doc__, "", wrong=str(error))
    except Late as error:
        table.add("all", "", "", wrong=str(error))
    signal.alarm(0)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
