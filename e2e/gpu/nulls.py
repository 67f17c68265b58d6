#!/usr/bin/env python3
"""Calls each function that a shim hooks with NULL in place of an output.

usage: nulls.py [--from N]

Prints `ready`, then a line `FUNCTION OUTPUT CODE EXPECTED` for each row, then `end`. The script does the same over the
real driver, the simulated one and the shims, so that one table (`CODES`) holds for all of them: `facts.py` compares it
with a real GPU, and tests compare it with the simulated driver and the shims. A call that crashes ends the output, and
the caller starts the script again behind that row. A function that the driver lacks is `absent`.
"""

import ctypes
import functools
import os
import struct
import subprocess
import sys

DEVICE, MIB, RELAXED, DESCRIPTOR, DMA_BUF = 0, 1 << 20, 2, 1, 1
SIZE, ZERO, FLAGS, NOTHING = ctypes.c_size_t(2 * MIB), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_void_p()
# The simulated driver's modules all have these functions, and a variable if the image begins so.
IMAGE = b"managed 4096\0" if "SIMGPU_DIR" in os.environ else b"""
.version 7.0
.target sm_75
.address_size 64
.visible .global .attribute(.managed) .align 4 .b8 managed[4096];
.visible .entry spin(.param .u64 nanoseconds)
{
    ret;
}
\0"""
# The table of the driver's functions that the CUDA runtime asks for.
RUNTIME_TABLE = bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9")
# A place that is large enough for each output, and the first version of NVML's structures there.
PLACE = ctypes.create_string_buffer(1 << 16)

# The outputs for which driver 580 does not return CUDA_ERROR_INVALID_VALUE or NVML_ERROR_INVALID_ARGUMENT.
CODES = {
    **{("cuMemGetInfo_v2", output): "0" for output in ("free", "total", "both")},
    **{
        (f"cu{name}", output): "0"
        for name in ("ModuleGetGlobal_v2", "LibraryGetGlobal", "LibraryGetManaged")
        for output in ("pointer", "bytes")
    },
    **{(f"cuStreamEndCapture{form}", "graph"): "0" for form in ("", "_ptsz")},
    **{(f"cuGetProcAddress{form}", "function"): "crash" for form in ("", "_ptsz", "_v2", "_v2_ptsz")},
    **{(f"cuGetProcAddress_v2{form}", "status"): "0" for form in ("", "_ptsz")},
    # No process of these kinds runs, so there is nothing to write.
    **{
        (f"nvmlDeviceGet{kind}RunningProcesses{form}", "list"): "0"
        for kind in ("Graphics", "MPSCompute")
        for form in ("", "_v2", "_v3")
    },
    # NVML_ERROR_INSUFFICIENT_SIZE.
    ("nvmlDeviceGetAccountingPids", "pids"): "7",
    ("nvmlDeviceGetProcessUtilization", "samples"): "7",
    ("nvmlDeviceGetProcessesUtilizationInfo", "entries"): "7",
}


def expected(function, output):
    """Returns the code of driver 580 for a row."""
    return CODES.get((function, output), "2" if function.startswith("nvml") else "1")


class Objects:
    """The driver in this process, with the objects that the calls need."""

    def __init__(self):
        self.cuda, self.nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        self.gpu = ctypes.c_void_p()
        codes = [self.nvml.nvmlInit_v2(), self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.gpu))]
        codes += [self.cuda.cuInit(0)]
        self.context = self.new("cuDevicePrimaryCtxRetain", DEVICE)
        codes += [self.cuda.cuCtxSetCurrent(self.context)]
        assert not any(codes), codes

    def new(self, name, *arguments):
        """Calls a function whose first argument is what it makes."""
        made = ctypes.c_void_p()
        code = getattr(self.cuda, name)(ctypes.byref(made), *arguments)
        assert code == 0, f"{name} returned {code}"
        return made

    # `CUmemAllocationProp` or `CUmemPoolProps`: exportable memory of the device.
    properties = struct.pack("<iiii", 1, DESCRIPTOR, 1, DEVICE) + bytes(80)
    location = struct.pack("<ii", 1, DEVICE)
    # `CUDA_ARRAY_DESCRIPTOR` and `CUDA_ARRAY3D_DESCRIPTOR`: 64 x 64 floats.
    flat = struct.pack("<QQII", 64, 64, 0x20, 1)
    shape = struct.pack("<QQQIII4x", 64, 64, 0, 0x20, 1, 0)

    @functools.cached_property
    def pointer(self):
        return self.new("cuMemAlloc_v2", SIZE)

    @functools.cached_property
    def handle(self):
        return self.new("cuMemCreate", SIZE, self.properties, FLAGS)

    @functools.cached_property
    def mapped(self):
        address = self.new("cuMemAddressReserve", SIZE, ZERO, FLAGS, FLAGS)
        assert self.cuda.cuMemMap(address, SIZE, ZERO, self.handle, FLAGS) == 0
        return address

    @functools.cached_property
    def pool(self):
        return self.new("cuMemPoolCreate", self.properties)

    @functools.cached_property
    def module(self):
        return self.new("cuModuleLoadData", ctypes.c_char_p(IMAGE))

    @functools.cached_property
    def library(self):
        return self.new("cuLibraryLoadData", ctypes.c_char_p(IMAGE), *[NOTHING] * 2, 0, *[NOTHING] * 2, 0)

    @functools.cached_property
    def kernel(self):
        return self.new("cuLibraryGetKernel", self.library, b"spin")

    @functools.cached_property
    def graph(self):
        return self.new("cuGraphCreate", 0)

    @functools.cached_property
    def resources(self):
        """All of the device's SMs, for a green context."""
        found = ctypes.create_string_buffer(1024)
        if self.cuda.cuDeviceGetDevResource(DEVICE, found, 1):
            return NOTHING
        return self.new("cuDevResourceGenerateDesc", found, 1)

    @property
    def captured(self):
        """A new stream that is being captured."""
        stream = self.new("cuStreamCreate", 1)
        assert self.cuda.cuStreamBeginCapture_v2(stream, RELAXED) == 0
        return stream

    def structure(self, size, version, *fields):
        """Writes the version of a structure of NVML, and its fields, to the place."""
        ctypes.memset(PLACE, 0, 64)
        ctypes.memmove(PLACE, struct.pack("<I", size | version << 24) + b"".join(fields), 4 + sum(map(len, fields)))
        return PLACE


def count(number):
    """Returns the address of a number of places."""
    return ctypes.byref(ctypes.c_uint(number))


def calls():
    """Yields each row: the function, the output that is NULL, and the arguments."""
    none = ctypes.c_void_p()
    yield "cuMemGetInfo_v2", "free", lambda of: (none, PLACE)
    yield "cuMemGetInfo_v2", "total", lambda of: (PLACE, none)
    yield "cuMemGetInfo_v2", "both", lambda of: (none, none)
    yield "cuDeviceTotalMem_v2", "bytes", lambda of: (none, DEVICE)
    yield "cuDeviceGetAttribute", "value", lambda of: (none, 88, DEVICE)
    yield "cuMemAlloc_v2", "pointer", lambda of: (none, SIZE)
    yield "cuMemAllocPitch_v2", "pointer", lambda of: (none, PLACE, SIZE, ctypes.c_size_t(1), 4)
    yield "cuMemAllocPitch_v2", "pitch", lambda of: (PLACE, none, SIZE, ctypes.c_size_t(1), 4)
    yield "cuMemAllocManaged", "pointer", lambda of: (none, SIZE, 1)
    yield "cuArrayCreate_v2", "array", lambda of: (none, of.flat)
    yield "cuArray3DCreate_v2", "array", lambda of: (none, of.shape)
    yield "cuMipmappedArrayCreate", "array", lambda of: (none, of.shape, 2)
    yield "cuMemCreate", "handle", lambda of: (none, SIZE, of.properties, FLAGS)
    yield "cuMemRetainAllocationHandle", "handle", lambda of: (none, of.mapped)
    yield "cuMemExportToShareableHandle", "shared", lambda of: (none, of.handle, DESCRIPTOR, FLAGS)
    yield "cuMemMapArrayAsync", "list", lambda of: (none, 1, NOTHING)
    yield "cuMemMapArrayAsync_ptsz", "list", lambda of: (none, 1, NOTHING)
    yield "cuMemAllocAsync", "pointer", lambda of: (none, SIZE, NOTHING)
    yield "cuMemAllocAsync_ptsz", "pointer", lambda of: (none, SIZE, NOTHING)
    yield "cuMemAllocFromPoolAsync", "pointer", lambda of: (none, SIZE, of.pool, NOTHING)
    yield "cuMemAllocFromPoolAsync_ptsz", "pointer", lambda of: (none, SIZE, of.pool, NOTHING)
    yield "cuMemPoolCreate", "pool", lambda of: (none, of.properties)
    yield "cuMemGetDefaultMemPool", "pool", lambda of: (none, of.location, 1)
    yield "cuMemGetMemPool", "pool", lambda of: (none, of.location, 1)
    yield "cuMemSetMemPool", "location", lambda of: (none, 1, of.pool)
    yield "cuMemPoolExportToShareableHandle", "shared", lambda of: (none, of.pool, DESCRIPTOR, FLAGS)
    yield "cuCtxCreate", "context", lambda of: (none, 0, DEVICE)
    yield "cuCtxCreate_v2", "context", lambda of: (none, 0, DEVICE)
    yield "cuCtxCreate_v3", "context", lambda of: (none, NOTHING, 0, 0, DEVICE)
    yield "cuCtxCreate_v4", "context", lambda of: (none, NOTHING, 0, DEVICE)
    yield "cuDevicePrimaryCtxRetain", "context", lambda of: (none, DEVICE)
    yield "cuGreenCtxCreate", "context", lambda of: (none, of.resources, DEVICE, 1)
    yield "cuGetExportTable", "table", lambda of: (none, RUNTIME_TABLE)
    for name in "cuGraphInstantiate", "cuGraphInstantiate_v2":
        yield name, "graph", lambda of: (none, of.graph, NOTHING, NOTHING, ZERO)
    yield "cuGraphInstantiateWithFlags", "graph", lambda of: (none, of.graph, FLAGS)
    for name in "cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz":
        yield name, "graph", lambda of: (none, of.graph, bytes(32))
        yield name, "parameters", lambda of: (PLACE, of.graph, none)
    yield "cuStreamEndCapture", "graph", lambda of: (of.captured, none)
    yield "cuStreamEndCapture_ptsz", "graph", lambda of: (of.captured, none)
    yield "cuIpcGetMemHandle", "handle", lambda of: (none, of.pointer)
    yield "cuMemGetHandleForAddressRange", "shared", lambda of: (none, of.mapped, SIZE, DMA_BUF, FLAGS)
    yield "cuModuleGetFunction", "function", lambda of: (none, of.module, b"spin")
    yield "cuModuleEnumerateFunctions", "functions", lambda of: (none, 1, of.module)
    yield "cuKernelGetFunction", "function", lambda of: (none, of.kernel)
    yield "cuLibraryGetKernel", "kernel", lambda of: (none, of.library, b"spin")
    yield "cuLibraryEnumerateKernels", "kernels", lambda of: (none, 1, of.library)
    for name, owner in ("cuModuleGetGlobal_v2", "module"), ("cuLibraryGetGlobal", "library"), ("cuLibraryGetManaged", "library"):
        of_owner = functools.partial(lambda owner, first, second, of: (first, second, getattr(of, owner), b"managed"), owner)
        yield name, "pointer", functools.partial(of_owner, none, PLACE)
        yield name, "bytes", functools.partial(of_owner, PLACE, none)
        yield name, "both", functools.partial(of_owner, none, none)
    for name in "cuGetProcAddress", "cuGetProcAddress_ptsz":
        yield name, "function", lambda of: (b"cuMemAlloc", none, 12000, FLAGS)
    for name in "cuGetProcAddress_v2", "cuGetProcAddress_v2_ptsz":
        yield name, "function", lambda of: (b"cuMemAlloc", none, 12000, FLAGS, PLACE)
        yield name, "status", lambda of: (b"cuMemAlloc", PLACE, 12000, FLAGS, none)
    yield "nvmlDeviceGetMemoryInfo", "info", lambda of: (of.gpu, none)
    yield "nvmlDeviceGetMemoryInfo_v2", "info", lambda of: (of.gpu, none)
    yield "nvmlDeviceGetConfComputeProtectedMemoryUsage", "info", lambda of: (of.gpu, none)
    yield "nvmlDeviceGetAccountingMode", "mode", lambda of: (of.gpu, none)
    yield "nvmlDeviceGetAccountingPids", "count", lambda of: (of.gpu, none, PLACE)
    yield "nvmlDeviceGetAccountingPids", "pids", lambda of: (of.gpu, count(4), none)
    yield "nvmlDeviceGetAccountingStats", "stats", lambda of: (of.gpu, os.getpid(), none)
    yield "nvmlDeviceGetAccountingStats_v2", "stats", lambda of: (of.gpu, none)
    kinds = [f"{kind}RunningProcesses{form}" for kind in ("Compute", "Graphics", "MPSCompute") for form in ("", "_v2", "_v3")]
    for kind in (*kinds, "EncoderSessions", "FBCSessions"):
        yield f"nvmlDeviceGet{kind}", "count", lambda of: (of.gpu, none, PLACE)
        yield f"nvmlDeviceGet{kind}", "list", lambda of: (of.gpu, count(64), none)
    yield "nvmlDeviceGetRunningProcessDetailList", "list", lambda of: (of.gpu, none)
    details = struct.pack("<IIQ", 0, 64, 0)
    yield "nvmlDeviceGetRunningProcessDetailList", "entries", lambda of: (of.gpu, of.structure(24, 1, details))
    yield "nvmlDeviceGetProcessUtilization", "samples", lambda of: (of.gpu, none, count(64), FLAGS)
    yield "nvmlDeviceGetProcessUtilization", "count", lambda of: (of.gpu, PLACE, none, FLAGS)
    yield "nvmlDeviceGetProcessesUtilizationInfo", "list", lambda of: (of.gpu, none)
    infos = struct.pack("<IQQ", 64, 0, 0)
    yield "nvmlDeviceGetProcessesUtilizationInfo", "entries", lambda of: (of.gpu, of.structure(24, 1, infos))


def answer(objects, function, arguments):
    """Returns the code of a call; `absent` if the driver lacks the function."""
    library = objects.nvml if function.startswith("nvml") else objects.cuda
    if library is None or not hasattr(library, function):
        return "absent"
    try:
        arguments = arguments(objects)
    except (AssertionError, AttributeError) as error:
        return f"unprepared({error})".replace(" ", "_")
    return getattr(library, function)(*arguments)


def measure():
    """Returns the code of each row, as text; `crash` where the call ends the process."""
    rows, found = [row[:2] for row in calls()], {}
    while len(found) < len(rows):
        command = [sys.executable, os.path.abspath(__file__), "--from", str(len(found))]
        answers = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout.splitlines()
        for function, output, code, _ in (line.split() for line in answers if line.count(" ") == 3):
            found[function, output] = code
        if answers[-1:] != ["end"]:
            found[rows[len(found)]] = "crash"
    return found


def main():
    """Prints the rows from the given one on."""
    print("ready", flush=True)
    rows, objects = list(calls()), Objects()
    for function, output, arguments in rows[int(sys.argv[2]) if len(sys.argv) > 2 else 0 :]:
        print(function, output, answer(objects, function, arguments), expected(function, output), flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main()
