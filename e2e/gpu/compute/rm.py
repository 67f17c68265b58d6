"""Sends control commands to NVIDIA's resource manager, as this process or with fewer capabilities.

Numbers and layouts are those of NVIDIA/open-gpu-kernel-modules 580.142; each names its header. They are no stable ABI.
"""

import ctypes
import json
import os
import struct
import time

SET_TIMESLICE = 0xA06C0103  # ctrl/ctrla06c.h: NvU64 timesliceUs
GET_TIMESLICE = 0xA06C0104  # ctrl/ctrla06c.h
SCHEDULE = 0xA06C0101  # ctrl/ctrla06c.h: NvBool bEnable, bSkipSubmit, bSkipEnable
PREEMPT = 0xA06C0105  # ctrl/ctrla06c.h: NvBool bWait, bManualTimeout; NvU32 timeoutUs
SET_INTERLEAVE_LEVEL = 0xA06C0107  # ctrl/ctrla06c.h: NvU32, 2 is high
RESTART_RUNLIST = 0xA06F0111  # ctrl/ctrla06f/ctrla06fgpfifo.h: NvBool bForceRestart, bBypassWait
ENGINE_GRAPHICS = 1  # NV2080_ENGINE_TYPE_GRAPHICS in class/cl2080.h: the engine that runs kernels
CHANNEL_GROUP = 0xA06C  # class/cla06c.h

ON, OFF = bytes((1, 0, 0)), bytes((0, 0, 0))
FORCE = bytes((1, 0))
WAIT = struct.pack("<BBxxI", 1, 0, 0)
HIGH = struct.pack("<I", 2)

STATUS = {0: "ok", 0x1B: "not permitted", 0x1F: "invalid argument", 0x23: "invalid client", 0x56: "not supported"}

SYS_NICE, SYS_ADMIN = 23, 21
# The default capabilities of a container of containerd.
CONTAINER = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
EVERY = tuple(range(41))
NOBODY = 65534
# name: uid, capabilities (None: unchanged), whether in a user namespace of its own (with all of them)
ACTORS = {
    "no capability": (NOBODY, (), False),
    "container's default": (0, CONTAINER, False),
    "user namespace": (NOBODY, (), True),
    "CAP_SYS_NICE": (NOBODY, (SYS_NICE,), False),
    "CAP_SYS_ADMIN": (NOBODY, (SYS_ADMIN,), False),
    "root": (0, None, False),
}

libc = ctypes.CDLL(None, use_errno=True)


def microseconds(value):
    """Encodes a time slice for SET_TIMESLICE."""
    return struct.pack("<Q", value)


def status_name(status):
    return STATUS.get(status, hex(status))


def _checked(result, what):
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"failed to {what}: {os.strerror(error)}")
    return result


def become(actor):
    """Gives this process the actor's user, capabilities and namespace, which an exec preserves."""
    uid, capabilities, own_namespace = ACTORS[actor]
    if capabilities is None:
        return
    for one in EVERY:
        if one not in capabilities:
            libc.prctl(24, one, 0, 0, 0)  # PR_CAPBSET_DROP
    if uid:
        _checked(libc.prctl(8, 1, 0, 0, 0), "keep capabilities")  # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _checked(libc.prctl(4, 1, 0, 0, 0), "stay dumpable")  # PR_SET_DUMPABLE, for /proc/self below
    mask = sum(1 << one for one in capabilities)
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    halves = [mask & 0xFFFFFFFF] * 3 + [mask >> 32] * 3
    _checked(libc.capset(header, struct.pack("<6I", *halves)), "set capabilities")
    if uid:
        for one in capabilities:
            _checked(libc.prctl(47, 2, one, 0, 0), "raise an ambient capability")  # PR_CAP_AMBIENT_RAISE
    if own_namespace:
        _checked(libc.unshare(0x10000000), "unshare the user namespace")  # CLONE_NEWUSER
        for file, text in ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1"):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)


def fetch(pid, fd):
    """Duplicates an open file of another process."""
    pidfd = os.pidfd_open(pid)
    try:
        return _checked(libc.syscall(438, pidfd, fd, 0), "duplicate a file of another process")  # pidfd_getfd
    finally:
        os.close(pidfd)


def control(fd, client, target, command, params):
    """Sends one command, and returns status, answer and nanoseconds."""
    answer = ctypes.create_string_buffer(params, len(params))
    call = ctypes.create_string_buffer(
        struct.pack("<IIIIQII", client, target, command, 0, ctypes.addressof(answer), len(params), 0), 32
    )
    request = 3 << 30 | 32 << 16 | ord("F") << 8 | 0x2A  # _IOWR('F', NV_ESC_RM_CONTROL, NVOS54_PARAMETERS)
    begun = time.monotonic_ns()
    _checked(libc.ioctl(fd, ctypes.c_ulong(request), call), "control the driver")
    return struct.unpack("<I", call.raw[28:32])[0], answer.raw, time.monotonic_ns() - begun


def in_child(actor, function):
    """Calls `function` in a child process that becomes the actor first, and returns its result (as JSON)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(actor)
            result = function()
        except Exception as error:  # the parent reports it
            result = [repr(error)]
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = json.load(pipe)
    os.waitpid(child, 0)
    return result
