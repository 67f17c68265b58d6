"""Finds the channel groups of other processes from outside, by the handles that the driver confirms.

The resource manager numbers clients from RS_CLIENT_HANDLE_BASE, and libcuda numbers its objects from FIRST_OBJECT. So a
process that holds a duplicate of another one's /dev/nvidiactl for a moment can ask about each candidate. Nothing in the
other process takes part. Groups with other handles stay hidden; `groups_in_use` counts them.
"""

import ctypes
import os
import struct
import time

import rm

CLIENT_BASE = 0xC1D00000  # g_resserv_nvoc.h: RS_CLIENT_HANDLE_BASE
FIRST_OBJECT = 0x5C000000  # seen of libcuda 580
GET_HANDLE_INFO = 0xD02  # ctrl/ctrl0000/ctrl0000client.h: NvHandle hObject; NvU32 index; NvU64 data
PARENT, CLASS = 1, 2
FIFO_GET_INFO = 0x20801109  # ctrl/ctrl2080/ctrl2080fifo.h: NvU32 size; {NvU32 index, data}[256]; NvU32 engine
GROUPS_IN_USE = 9
ROOT, DEVICE, SUBDEVICE = 0x41, 0x80, 0x2080
COMPUTE_SUFFIX = 0xC0  # class/cl*c0.h: Hopper's compute object is 0xCBC0
MINOR_OF_NVIDIACTL = 255


def allocate(fd, client, parent, handle, kind, params=b""):
    """Allocates an object of this process, and returns its handle."""
    given = ctypes.create_string_buffer(params, max(len(params), 1))
    address = ctypes.addressof(given) if params else 0
    call = ctypes.create_string_buffer(
        struct.pack("<IIIIQQIIIxxxx", client, parent, handle, kind, address, 0, len(params), 0, 0), 48
    )
    request = 3 << 30 | 48 << 16 | ord("F") << 8 | 0x2B  # _IOWR('F', NV_ESC_RM_ALLOC, NVOS64_PARAMETERS)
    if rm.libc.ioctl(fd, ctypes.c_ulong(request), call) < 0:
        raise OSError(ctypes.get_errno(), "failed to allocate an object")
    status = struct.unpack_from("<I", call.raw, 40)[0]
    if status:
        raise OSError(0, f"failed to allocate {kind:#x}: {rm.status_name(status)}")
    return struct.unpack_from("<I", call.raw, 8)[0]


class Client:
    """This process's own client, with a subdevice of the first GPU."""

    def __init__(self):
        self.fd = os.open("/dev/nvidiactl", os.O_RDWR)
        self.handle = allocate(self.fd, 0, 0, 0, ROOT)
        device = allocate(self.fd, self.handle, self.handle, 0xB0B00080, DEVICE, bytes(56))
        self.subdevice = allocate(self.fd, self.handle, device, 0xB0B02080, SUBDEVICE, bytes(4))

    def groups_in_use(self):
        """Returns how many channel groups the engine that runs kernels has."""
        params = struct.pack("<III", 1, GROUPS_IN_USE, 0) + bytes(255 * 8) + struct.pack("<I", rm.ENGINE_GRAPHICS)
        status, answer, _ = rm.control(self.fd, self.handle, self.subdevice, FIFO_GET_INFO, params)
        return struct.unpack_from("<I", answer, 8)[0] if status == 0 else rm.status_name(status)

    def close(self):
        os.close(self.fd)


def _asked(fd, client, handle, what, spent):
    status, answer, took = rm.control(fd, client, client, GET_HANDLE_INFO, struct.pack("<IIQ", handle, what, 0))
    spent[status == 0].append(took)
    return struct.unpack_from("<I", answer, 8)[0] if status == 0 else None


def discover(pid, newest, oldest=CLIENT_BASE, objects=4096):
    """Returns the pid's groups as (fd, client, group), those with a compute object first, and the costs of the calls."""
    spent, begun = {True: [], False: []}, time.monotonic()
    computing, others, clients = set(), set(), {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            about = os.stat(f"/proc/{pid}/fd/{name}")
            if os.minor(about.st_rdev) != MINOR_OF_NVIDIACTL or not os.readlink(f"/proc/{pid}/fd/{name}").endswith("nvidiactl"):
                continue
            fd = rm.fetch(pid, int(name))
        except FileNotFoundError:
            continue
        try:
            for client in range(oldest, newest):
                if _asked(fd, client, client, CLASS, spent) is None:
                    continue
                clients[client] = int(name)
                kinds = {}
                for handle in range(FIRST_OBJECT, FIRST_OBJECT + objects):
                    kind = _asked(fd, client, handle, CLASS, spent)
                    if kind is not None:
                        kinds[handle] = kind
                others |= {(int(name), client, handle) for handle, kind in kinds.items() if kind == rm.CHANNEL_GROUP}
                for handle, kind in kinds.items():
                    if kind & 0xFF == COMPUTE_SUFFIX and kind > 0xFF:
                        channel = _asked(fd, client, handle, PARENT, spent)
                        group = channel and _asked(fd, client, channel, PARENT, spent)
                        if group:
                            computing.add((int(name), client, group))
        finally:
            os.close(fd)
    costs = ", ".join(
        f"{len(values)} {word}, median {sorted(values)[len(values) // 2] / 1000:.2f} us"
        for word, values in (("confirmed", spent[True]), ("refused", spent[False]))
        if values
    )
    return sorted(computing), sorted(others - computing), f"{len(clients)} clients; {costs}; {time.monotonic() - begun:.2f} s"
