"""Measures what the driver takes for small allocations, graphs, heaps, variables and contexts.

The rows belong to facts.py, which runs them. A client's process executes the methods of `Costs`,
and the script reads the used bytes of the GPU between them.
"""

import ctypes
import struct

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 2 * MIB
# cuda.h: CU_LIMIT_STACK_SIZE and its neighbours, CU_AD_FORMAT_FLOAT, CUDA_ARRAY3D_DEFERRED_MAPPING,
# CU_MEM_ATTACH_GLOBAL, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_DEV_RESOURCE_TYPE_SM and
# CU_GREEN_CTX_DEFAULT_STREAM.
STACK, PRINTF_FIFO, MALLOC_HEAP, PENDING_LAUNCHES = 0, 1, 2, 4
FLOAT, DEFERRED, ATTACH_GLOBAL, LAZY_PEERS, MULTIPROCESSORS, DEFAULT_STREAM = 0x20, 0x80, 1, 1, 1, 1
NON_BLOCKING, DISABLE_TIMING, INVALID_HANDLE = 1, 2, 400
# Sizes whose distance from each other shows how the driver rounds small pieces.
ROUNDED = (1, 512, 513, 4096, 5000, 65536, 70000, 131072, 300000, 524288, 600000, MIB, MIB + 1)

HEAD = ".version 7.0\n.target sm_75\n.address_size 64\n"
MODULES = {
    "empty": ".visible .entry empty() { ret; }",
    "wide": ".visible .entry wide(.param .align 8 .b8 data[4000]) { ret; }",
    "fill": """.visible .entry fill(.param .u64 at) {
        .reg .u64 %at;
        ld.param.u64 %at, [at];
        cvta.to.global.u64 %at, %at;
        st.global.u32 [%at], 1;
        ret; }""",
    "heap": """.extern .func (.param .b64 result) malloc (.param .b64 size);
        .visible .entry heap() {
        .reg .b64 %at;
        .reg .pred %none;
        { .param .b64 size;
          st.param.b64 [size], 16;
          .param .b64 result;
          call.uni (result), malloc, (size);
          ld.param.b64 %at, [result]; }
        setp.eq.u64 %none, %at, 0;
        @%none bra done;
        st.u32 [%at], 1;
        done: ret; }""",
    "print": """.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 arguments);
        .global .align 1 .b8 text[1] = {0};
        .visible .entry print() {
        .reg .b64 %text;
        .reg .b32 %count;
        mov.u64 %text, text;
        cvta.global.u64 %text, %text;
        { .param .b64 format;
          st.param.b64 [format], %text;
          .param .b64 arguments;
          st.param.b64 [arguments], 0;
          .param .b32 result;
          call.uni (result), vprintf, (format, arguments);
          ld.param.b32 %count, [result]; }
        ret; }""",
    "locals": """.visible .entry locals(.param .u64 at) {
        .local .align 4 .b8 depot[65536];
        .reg .b64 %base, %here, %there, %at;
        .reg .b32 %index, %word;
        .reg .pred %none;
        mov.u64 %base, depot;
        mov.u32 %index, %tid.x;
        mul.wide.u32 %here, %index, 4;
        add.u64 %here, %base, %here;
        st.local.u32 [%here], %index;
        ld.param.u64 %at, [at];
        setp.eq.u64 %none, %at, 0;
        @%none bra done;
        and.b64 %there, %at, 65532;
        add.u64 %there, %base, %there;
        ld.local.u32 %word, [%there];
        st.global.u32 [%at], %word;
        done: ret; }""",
    "variables": "".join(f".visible .global .align 8 .b8 part{i}[{GIB}];\n" for i in range(3))
    + """.visible .entry variables() {
        .reg .b64 %at;
        mov.u64 %at, part0;
        st.global.u32 [%at], 1;
        ret; }""",
}


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle` of cuda.h, which its functions take by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Costs:
    """Calls the driver in a client's process; a base of facts.py's `Calls`."""

    def __init__(self):
        self.pieces, self.arrays, self.modules, self.contexts, self.executables = [], [], {}, [], []
        self.graph = self.green = None

    def synchronise(self):
        self._call("cuCtxSynchronize")

    def allocate_many(self, size, count, alternate=False):
        """Allocates pieces, in both contexts by turns if it is asked to."""
        for number in range(count):
            if alternate:
                self._call("cuCtxSetCurrent", self._either(number))
            self.pieces.append((number & 1 if alternate else 0, size, self.allocate(size)))
        self._call("cuCtxSetCurrent", self.current)

    def _either(self, number):
        return self.contexts[0] if number & 1 else self.current

    def allocate_sizes(self):
        """Allocates a piece of each multiple of 512 bytes up to 1 MiB."""
        for size in range(512, MIB + 1, 512):
            self.allocate_many(size, 1)

    def layout(self):
        """Returns how many chunks the pieces lie in, how many of these hold pieces of several
        sizes and of several contexts, how many pieces straddle, and the requested bytes."""
        sizes, owners, straddling = {}, {}, 0
        for owner, size, at in self.pieces:
            sizes.setdefault(at // CHUNK, set()).add(size)
            owners.setdefault(at // CHUNK, set()).add(owner)
            straddling += at // CHUNK != (at + size - 1) // CHUNK
        mixed, shared = (sum(len(each) > 1 for each in by.values()) for by in (sizes, owners))
        return len(sizes), mixed, shared, straddling, sum(size for _, size, _ in self.pieces)

    def rounding(self, size, count):
        """Returns the least distance of neighbouring pieces, and the most pieces of a chunk."""
        self.pieces = []
        self.allocate_many(size, count)
        chunks, addresses = {}, sorted(at for *_, at in self.pieces)
        for at in addresses:
            chunks[at // CHUNK] = chunks.get(at // CHUNK, 0) + 1
        least = min(after - before for before, after in zip(addresses, addresses[1:]))
        self.free_pieces("none")
        return least, max(chunks.values()), len(chunks)

    def free_pieces(self, kept):
        """Frees pieces: all but the "first" of each chunk, every "second" one, or all but "none"."""
        seen, left = set(), []
        for number, piece in enumerate(self.pieces):
            chunk = piece[2] // CHUNK
            keep = kept == "first" and chunk not in seen or kept == "second" and number & 1
            seen.add(chunk)
            if keep:
                left.append(piece)
                continue
            self._call("cuMemFree_v2", ctypes.c_uint64(piece[2]))
        self.pieces = left

    def pitched(self, count):
        """Allocates small pitched pieces, and returns how many of them lie in chunks of others."""
        known = {at // CHUNK for *_, at in self.pieces}
        pitch, inside, size = ctypes.c_size_t(), 0, [ctypes.c_size_t(each) for each in (100, 10)]
        for _ in range(count):
            at = self._new("cuMemAllocPitch_v2", ctypes.byref(pitch), *size, 4)
            inside += at.value // CHUNK in known
        return inside, pitch.value

    def another_context(self):
        """Creates a context, and leaves the first one current."""
        self.contexts.append(self._new("cuCtxCreate_v2", 0, 0, kind=ctypes.c_void_p))
        self._call("cuCtxSynchronize")
        self._call("cuCtxSetCurrent", self.current)

    def destroy_context(self):
        self._call("cuCtxDestroy_v2", self.contexts.pop())
        self._call("cuCtxSetCurrent", self.current)

    def free_elsewhere(self, size, seconds):
        """Frees memory on the stream of a context that is not current, behind a kernel.

        Returns the codes of the free, and of the event's record and query in the current context
        and in the stream's.
        """
        pointer = ctypes.c_uint64(self.allocate(size))
        stream = self.stream = self._new("cuStreamCreate", NON_BLOCKING, kind=ctypes.c_void_p)
        self._spin(int(seconds * 1e9), stream)
        self._call("cuCtxSetCurrent", self.contexts[0])
        codes = [self.driver.cuMemFreeAsync(pointer, stream)]
        event = self._new("cuEventCreate", DISABLE_TIMING, kind=ctypes.c_void_p)
        codes.append(self.driver.cuEventRecord(event, stream))
        codes.append(self.driver.cuStreamQuery(stream))
        self._call("cuCtxSetCurrent", self.current)
        event = self._new("cuEventCreate", DISABLE_TIMING, kind=ctypes.c_void_p)
        codes.append(self.driver.cuEventRecord(event, stream))
        codes.append(self.driver.cuEventQuery(event))
        return codes

    def synchronise_stream(self):
        self._call("cuStreamSynchronize", self.stream)

    def build_graph(self, kind, count, width):
        """Makes a graph of so many chains of nodes of one kind."""
        self.graph = self._new("cuGraphCreate", 0, kind=ctypes.c_void_p)
        kernel = None if kind == "memset" else self.kernel(kind)
        if kind == "memset":
            parameters = struct.pack("<QQIIQQ", self.allocate(512), 512, 0, 4, 1, 1)
            call, rest = "cuGraphAddMemsetNode", (parameters, self.current)
        else:
            self.wide = ctypes.create_string_buffer(4000)
            values = (ctypes.c_void_p * 1)(ctypes.addressof(self.wide))
            pointer = ctypes.addressof(values) if kind == "wide" else 0
            parameters = struct.pack("<Q7I4xQQ", kernel.value, 1, 1, 1, 1, 1, 1, 0, pointer, 0)
            call, rest = "cuGraphAddKernelNode", (parameters,)
        add, nodes = getattr(self.driver, call), []
        for number in range(count):
            node = ctypes.c_void_p()
            last = ctypes.byref(nodes[number - width]) if number >= width else None
            after = last, ctypes.c_size_t(1 if last else 0)
            nodes.append(node)
            if code := add(ctypes.byref(node), self.graph, *after, *rest):
                raise RuntimeError(f"{call} returned {code}")

    def instantiate(self, count=1):
        for _ in range(count):
            made = self._new("cuGraphInstantiateWithFlags", self.graph, ctypes.c_uint64(0), kind=ctypes.c_void_p)
            self.executables.append(made)

    def launch_graphs(self):
        for one in self.executables:
            self._call("cuGraphLaunch", one, None)
        self.synchronise()

    def destroy_executables(self):
        for one in self.executables:
            self._call("cuGraphExecDestroy", one)
        self.executables = []
        self.synchronise()

    def trim(self):
        self._call("cuDeviceGraphMemTrim", 0)
        self.synchronise()

    def limit(self, which, value):
        """Sets a limit, and returns the code and what the driver then returns as the limit."""
        code, got = self.driver.cuCtxSetLimit(which, ctypes.c_size_t(value)), ctypes.c_size_t()
        self._call("cuCtxGetLimit", ctypes.byref(got), which)
        return code, got.value

    def load(self, name):
        text = ctypes.create_string_buffer((HEAD + MODULES[name]).encode())
        self.modules[name] = self._new("cuModuleLoadData", text, kind=ctypes.c_void_p)
        self.synchronise()

    def kernel(self, name):
        if name not in self.modules:
            self.load(name)
        return self._new("cuModuleGetFunction", self.modules[name], name.encode(), kind=ctypes.c_void_p)

    def launch(self, name, argument=0, count=1):
        """Launches a kernel that takes an address or nothing."""
        kernel = self.kernel(name)
        for number in range(count):
            address = ctypes.c_uint64(self.pieces[number][2] if count > 1 else argument)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(address))
            self._call("cuLaunchKernel", kernel, *[1] * 6, 0, None, arguments, None)
        self.synchronise()

    def look_up(self, module, name):
        size = ctypes.c_size_t()
        self._new("cuModuleGetGlobal_v2", ctypes.byref(size), self.modules[module], name.encode())
        return size.value

    def unload(self, name):
        self._call("cuModuleUnload", self.modules.pop(name))
        self.synchronise()

    def _array(self, width, height, flags):
        described = struct.pack("<QQQIII4x", width, height, 0, FLOAT, 1, flags)
        return self._new("cuArray3DCreate_v2", described, kind=ctypes.c_void_p)

    def array_requirement(self, width, height):
        """Returns the size that the driver states for the array with deferred mapping."""
        array, stated = self._array(width, height, DEFERRED), (ctypes.c_size_t * 8)()
        self._call("cuArrayGetMemoryRequirements", stated, array, 0)
        self._call("cuArrayDestroy", array)
        return stated[0], stated[1]

    def create_arrays(self, width, height, count):
        self.arrays += [self._array(width, height, 0) for _ in range(count)]

    def destroy_arrays(self, keep_each):
        """Destroys all arrays, but each so-many-th one if that is not 0."""
        for number, array in enumerate(self.arrays):
            if not keep_each or number % keep_each:
                self._call("cuArrayDestroy", array)
        self.arrays = self.arrays[::keep_each] if keep_each else []

    def export_pieces(self):
        """Exports the pieces by IPC."""
        return [bytes(self._new("cuIpcGetMemHandle", ctypes.c_uint64(at), kind=IpcHandle).bytes).hex() for *_, at in self.pieces]

    def open_pieces(self, handles):
        """Opens exported pieces, and returns how many addresses and chunks they have here."""
        opened = []
        for each in handles:
            handle = IpcHandle((ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(each)))
            opened.append(self._new("cuIpcOpenMemHandle_v2", handle, LAZY_PEERS).value)
        return len(set(opened)), len({at // CHUNK for at in opened})

    def allocate_managed(self, size, count):
        for _ in range(count):
            at = self._new("cuMemAllocManaged", ctypes.c_size_t(size), ATTACH_GLOBAL)
            self.pieces.append((0, size, at.value))

    def allocate_host(self, size):
        self.pinned = self._new("cuMemHostAlloc", ctypes.c_size_t(size), 0)

    def streams(self, count):
        for _ in range(count):
            self._new("cuStreamCreate", NON_BLOCKING, kind=ctypes.c_void_p)
        self.synchronise()

    def _id(self, context):
        found = ctypes.c_uint64()
        self._call("cuCtxGetId", context, ctypes.byref(found))
        return found.value

    def green_context(self, size):
        """Allocates under a green context; returns whether its id is the primary one's, and the
        id that is current."""
        resource, described = ctypes.create_string_buffer(1024), ctypes.c_void_p()
        self._call("cuDeviceGetDevResource", 0, resource, MULTIPROCESSORS)
        self._call("cuDevResourceGenerateDesc", ctypes.byref(described), resource, 1)
        self.green = self._new("cuGreenCtxCreate", described, 0, DEFAULT_STREAM, kind=ctypes.c_void_p)
        context = self._new("cuCtxFromGreenCtx", self.green, kind=ctypes.c_void_p)
        self._call("cuCtxSetCurrent", context)
        self.allocate(size)
        ids = self._id(self.current), self._id(context), self._id(None)
        self._call("cuCtxSetCurrent", self.current)
        return ids

    def destroy_green(self):
        self._call("cuGreenCtxDestroy", self.green)

    def reset_primary(self):
        self._call("cuDevicePrimaryCtxReset_v2", 0)


class Meter:
    """Reads how many MiB the GPU's use changed since the last reading."""

    def __init__(self, gpu):
        self.gpu, self.last = gpu, gpu.settled()

    def __call__(self):
        before, self.last = self.last, self.gpu.settled()
        return round((self.last - before) / MIB)


def mib(*values):
    """Formats MiB."""
    return ", ".join(f"{value:+,.0f}" for value in values) + " MiB"


def near(value, expected, slack=4):
    """Returns whether MiB are as expected, or as nearly as page tables let them be."""
    return abs(value - expected) <= max(slack, expected / 50)


def small(gpu, table, Client):
    """F22: pieces of at most 1 MiB."""
    with Client("context") as client:
        took = Meter(gpu)
        client.ask("allocate", 1)
        first = took()
        table.add("F22", "the first byte of a context takes 2 MiB", mib(first), wrong=not near(first, 2, 0))
        client.ask("allocate_many", 65536, 32_000)
        filled = took()
        client.ask("free_pieces", "first")
        fragmented = took()
        client.ask("allocate_many", 65536, 16_000)
        refilled = took()
        client.ask("allocate_many", 4096, 1000)
        other = took()
        client.ask("free_pieces", "none")
        emptied = took()
        claim = "pieces fill chunks of 2 MiB, which stay while one piece lives, and holes fill first"
        wrong = not (near(filled, 2000) and near(fragmented, 0) and near(refilled, 0))
        table.add("F22", claim, f"{mib(filled)}; all but one of each freed {mib(fragmented)}; refilled {mib(refilled)}", wrong=wrong)
        table.add("F22", "pieces of 4 KiB fill holes among those of 64 KiB", mib(other), wrong=not near(other, 0))
        table.add("F22", "the driver keeps no empty chunk", mib(emptied), wrong=not near(emptied, -filled - other))
    with Client("context", "another_context") as client:
        took = Meter(gpu)
        for size in (512, 3000, 65536, 700_000):
            client.ask("allocate_many", size, 500, True)
        grown = took()
        chunks, mixed, shared, straddling, asked = client.ask("layout")
        cell = f"{chunks} chunks, {mib(grown)}; {mixed} of several sizes, {shared} of both contexts, {straddling} straddle"
        claim = "a piece lies within one aligned chunk of 2 MiB, which belongs to one context"
        table.add("F22", claim, cell, wrong=bool(shared or straddling) or not near(grown, 2 * chunks))
        inside, pitch = client.ask("pitched", 50)
        grown, first = took(), chunks
        cell = f"{inside} of 50 in known ones, {mib(grown)}, pitch {pitch}"
        table.add("F22", "pitched pieces fill the same chunks", cell, wrong=inside != 50 or grown != 0)
        client.ask("free_pieces", "first")
        freed = took()
        client.ask("destroy_context")
        ended = took()
        claim = "a free under another context is one of the piece's, and a context's end frees its chunks"
        cell = f"all but one of each chunk freed {mib(freed)}, the context destroyed {mib(ended)}"
        table.add("F22", claim, cell, wrong=freed != 0 or ended > -first // 2)
    with Client("context") as client:
        took = Meter(gpu)
        client.ask("allocate_sizes")
        grown = took()
        chunks, mixed, _, straddling, asked = client.ask("layout")
        cell = f"{chunks} chunks of which {mixed} of several sizes, {mib(grown)} for {asked // MIB} MiB, {straddling} straddle"
        claim = "pieces of 2,048 sizes share the chunks in which they lie"
        table.add("F22", claim, cell, wrong=not mixed or not near(grown, 2 * chunks))
        client.ask("free_pieces", "none")
        found, right = [], True
        for size in ROUNDED:
            rounded = -(-size // 512) * 512 if size <= MIB else CHUNK
            least, most, chunks = client.ask("rounding", size, max(12, 3 * CHUNK // max(size, 512)))
            right &= least == rounded and most == CHUNK // rounded
            found.append(f"{size}: {least}, {most}")
        claim = "a piece takes a multiple of 512 bytes, and above 1 MiB one of 2 MiB"
        table.add("F22", claim, "; ".join(found), wrong=not right)


def exported(gpu, table, Client):
    """F23: an exported piece."""
    with Client("context") as owner, Client("context") as user:
        took = Meter(gpu)
        owner.ask("allocate_many", 65536, 3200)
        owner.ask("free_pieces", "first")
        filled = took()
        handles = owner.ask("export_pieces")
        before = gpu.charges().get(user.process.pid, 0)
        _, chunks = user.ask("open_pieces", handles)
        opened = took()
        beside = (gpu.charges().get(user.process.pid, 0) - before) / MIB
        owner.kill()
        owner.process.wait()
        context = took()
        after = (gpu.charges().get(user.process.pid, 0) - before) / MIB
        cell = f"{len(handles)} pieces in {mib(filled)}, opened {mib(opened)} in {chunks} chunks, the exporter's end "
        cell += f"{mib(context)}; NVML charges the importer {mib(beside)} before and {mib(after)} after it"
        claim = "an exported piece shares its whole chunk, which outlives the exporter and is charged to the importer"
        table.add("F23", claim, cell, wrong=beside > 0 or not near(after, filled))


def graphs(gpu, table, Client):
    """F24: executable graphs without memory nodes."""
    rows = [("empty", 10_000, 1, 1), ("wide", 10_000, 1, 1), ("memset", 10_000, 1, 1), ("empty", 100_000, 1, 1)]
    rows += [("empty", 8192, width, 1) for width in (16, 64, 512, 8192)]
    rows += [("empty", nodes, 1, 1000) for nodes in (1, 10, 100)] + [("empty", 1000, 1, 100), ("empty", 100, 4, 100)]
    for kind, nodes, width, executables in rows:
        with Client("context") as client:
            client.ask("launch", "empty")
            took, cells = Meter(gpu), []
            client.ask("build_graph", kind, nodes, width)
            for request in ("instantiate", executables), ("launch_graphs",), ("destroy_executables",), ("instantiate", executables):
                client.ask(*request)
                cells.append(took())
            client.ask("destroy_executables")
            client.ask("trim")
            cells.append(took())
            each = cells[0] * MIB / executables
            # A graph's parts of 2 MiB have room for the next one.
            bound = width * 112 * 1024 + nodes * 2688 + CHUNK / executables
            claim = f"{executables:,} x {nodes:,} {kind!r} nodes in {width:,} chains"
            cell = f"{mib(*cells)} by instantiating, launching, their end, instantiating again, the end of all"
            wrong = any(cells[1:]) or kind == "empty" and not bound / 2 <= each + CHUNK and not each <= bound
            table.add("F24", claim, f"{cell}: {each / nodes:,.0f} bytes a node", wrong=wrong)


def heaps(gpu, table, Client):
    """F25: the heap of device-side malloc and its neighbours."""
    for name, which, value in ("heap", MALLOC_HEAP, 8 * GIB), ("print", PRINTF_FIFO, GIB), ("empty", PENDING_LAUNCHES, 1 << 20):
        with Client("context") as client:
            took = Meter(gpu)
            code, got = client.ask("limit", which, value)
            cells = [took()]
            client.ask("launch", "fill", client.ask("allocate", 512))
            cells.append(took())
            for request in "load", "launch":
                client.ask(request, name)
                cells.append(took())
            lower, now = client.ask("limit", which, value // 2)
            cells.append(took())
            client.ask("unload", name)
            cells.append(took())
            cell = f"{mib(*cells)} by the limit ({code}, {got:,}), another kernel and 2 MiB, load, launch, "
            cell += f"half the limit ({lower}, {now:,}), unload"
            if name == "heap":
                claim = "a heap of 8 GiB is taken whole by the first launch of a module that uses it, and kept"
                wrong = cells[0] or not near(cells[3], 8192) or cells[4] or cells[5]
            else:
                claim = f"a limit of {value:,} for {name!r} takes none of the GPU's memory"
                wrong = not all(near(cell, 0, 128) for cell in cells)
            table.add("F25", claim, cell, wrong=bool(wrong))
    with Client("context") as client:
        took, cells = Meter(gpu), []
        for name in "heap", "print":
            client.ask("launch", name)
            cells.append(took())
        table.add("F25", "a module with a heap and one with a FIFO, with the limits as they are", mib(*cells))


def variables(gpu, table, Client):
    """F26: variables of modules."""
    with Client("context") as client:
        took, cells = Meter(gpu), []
        for request in ("load", "empty"), ("load", "variables"), ("look_up", "variables", "part0"), ("launch", "variables"), ("unload", "variables"):
            client.ask(*request)
            cells.append(took())
        cell = f"{mib(*cells)} by an empty module, load, look-up, launch, unload"
        claim = "3 GiB of variables are taken when their module is loaded, and until it is unloaded"
        wrong = not near(cells[1], 3072) or cells[2] or cells[3] or not near(cells[4], -3072)
        table.add("F26", claim, cell, wrong=bool(wrong))


def foreign_stream(gpu, table, Client):
    """F27: a free on the stream of a context that is not current."""
    with Client("context", "kernels", "another_context") as client:
        took = Meter(gpu)
        codes = client.ask("free_elsewhere", 2 * GIB, 3)
        held = took()
        client.ask("synchronise_stream")
        freed = took()
        cell = f"codes {codes} of free, record, query there, record and query here; {mib(held)}, "
        cell += f"after the synchronisation {mib(freed)}"
        claim = "a record there is refused, one in the stream's context is not; the memory stays until the synchronisation"
        wrong = codes[:2] != [0, INVALID_HANDLE] or codes[3] or not near(held, 2048) or not near(freed, -2048)
        table.add("F27", claim, cell, wrong=bool(wrong))


def arrays(gpu, table, Client):
    """F28: arrays."""
    for width, height, count, holds in (16, 16, 1000, 2048), (64, 64, 1000, 128), (256, 256, 200, 8), (500, 300, 100, 2):
        with Client("context") as client:
            took, cells = Meter(gpu), []
            size, _ = client.ask("array_requirement", width, height)
            again = count * 9 // 10
            for request in (
                ("create_arrays", width, height, count), ("destroy_arrays", 32), ("create_arrays", width, height, again),
                ("allocate", 4096), ("destroy_arrays", 0),
            ):  # fmt: skip
                client.ask(*request)
                cells.append(took())
            cell = f"stated {size:,}; {mib(*cells)} by creation, end of 31 of 32, 9 of 10 again, 4 KiB of linear memory, end of all"
            refilled = 2 * -(-(again + -(-count // 32)) // holds)
            wrong = cells[0] != 2 * -(-count // holds) or sum(cells[:3]) > max(cells[0], refilled) or cells[3] != 2 or sum(cells) != 2
            table.add("F28", f"arrays of {width} x {height} floats: {holds:,} fill a chunk of arrays", cell, wrong=wrong)
    with Client("context") as client:
        client.ask("create_arrays", 64, 64, 1000)
        client.ask("destroy_arrays", 32)
        took = Meter(gpu)
        client.ask("create_arrays", 16, 16, 1000)
        grown = took()
        table.add("F28", "arrays of another size fill holes", mib(grown), wrong=grown != 0)


def others(gpu, table, Client):
    """F29: stacks, managed pieces, contexts, pinned memory and streams."""
    with Client("context") as client:
        took = Meter(gpu)
        client.ask("launch", "locals")
        launched = took()
        client.ask("limit", STACK, 0)
        freed = took()
        claim = "a stack limit of 0 frees what a kernel with 64 KiB of local memory took"
        table.add("F29", claim, mib(launched, freed), wrong=not 0 < launched <= -freed)
    with Client("context") as client:
        client.ask("launch", "fill", client.ask("allocate", 512))
        took, cells = Meter(gpu), []
        client.ask("allocate_managed", 4096, 1000)
        client.ask("launch", "fill", 0, 1000)
        cells.append(took())
        chunks = client.ask("layout")[0]
        for kept in "first", "none":
            client.ask("free_pieces", kept)
            cells.append(took())
        claim = "1,000 managed pieces of 4 KiB fill 2 chunks, which stay while one piece lives"
        cell = f"{chunks} chunks; {mib(*cells)} written, all but one a chunk freed, all freed"
        table.add("F29", claim, cell, wrong=(chunks, *cells[1:]) != (2, 0, -4))
    with Client("init") as client:
        took, cells = Meter(gpu), []
        for request in "context", "another_context", "another_context", "destroy_context", "destroy_context":
            client.ask(request)
            cells.append(took())
        table.add("F29", "a further context takes as much as the first", mib(*cells), wrong=not near(cells[2], cells[0], 16))
    with Client("context") as client:
        took = Meter(gpu)
        primary, green, current = client.ask("green_context", GIB)
        cells = [took()]
        for request in "destroy_green", "reset_primary":
            client.ask(request)
            cells.append(took())
        cell = f"ids {primary}, {green}; {mib(*cells)} by 1 GiB under it, its end, the primary one's reset"
        wrong = primary == green or green != current or cells[1] or cells[2] > -1024
        table.add("F29", "a green context has an id of its own, and its memory is the primary one's", cell, wrong=bool(wrong))
    with Client("context") as client:
        took = Meter(gpu)
        client.ask("streams", 1024)
        streams = took()
        client.ask("allocate_host", 8 * GIB)
        pinned = took()
        claim = "1,024 streams take 560 MiB, and 8 GiB of pinned memory 16 MiB"
        table.add("F29", claim, mib(streams, pinned), wrong=not near(streams, 560, 300) or not near(pinned, 16, 16))


FACTS = (small, exported, graphs, heaps, variables, foreign_stream, arrays, others)
