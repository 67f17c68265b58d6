"""Calls the functions of bursar.h in libbursar.so, and raises exceptions for their statuses."""

import ctypes
import os
import time


class Error(Exception):
    """A call for retained memory failed."""


class Missing(Error):
    """There is no such lease."""


class Busy(Error):
    """Another process writes the lease, or the agent does not respond: retry."""


class Quota(Error):
    """The container's quota, or what the node lends of the GPU, has no room for the lease."""


class Corrupt(Error):
    """The content differs from the commit, or is lost; the lease was discarded."""


class Fenced(Error):
    """The right to commit has ended; the lease is discarded, unless another writer has it by now."""


class Refused(Error):
    """This node retains no memory, or not for this container, or no more of it."""


class DriverError(Error):
    """The driver failed; `code` is its CUresult, or 0."""

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


# Longest call that waits for a lease, in seconds: Python handles signals between calls.
_SLICE = 1.0
# The numbers of bursar_status.
_KINDS = {1: ValueError, 2: Missing, 3: Busy, 4: Quota, 5: Corrupt, 6: Fenced, 7: Refused}
_DRIVER = 8


class _OpenArgs(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("socket", ctypes.c_char_p),
        ("key", ctypes.c_uint8 * 32),
        ("bytes", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_uint64),
        ("device", ctypes.c_int32),
    ]


class Token(ctypes.Structure):
    """A memory token: bursar_token."""

    _fields_ = [("length", ctypes.c_uint64), ("bytes", ctypes.c_uint8 * 512)]

    @classmethod
    def of(cls, data):
        """Returns the structure for a token's bytes."""
        token = cls(length=len(data))
        if len(data) > len(token.bytes):
            raise ValueError(f"failed to read the token: it cannot have {len(data)} bytes; pass what bursar.seal returned")
        ctypes.memmove(token.bytes, bytes(data), len(data))
        return token


class Memory(ctypes.Structure):
    """What a token names: bursar_memory."""

    _fields_ = [
        ("container", ctypes.c_uint64),
        ("gpu_generation", ctypes.c_uint64),
        ("process_generation", ctypes.c_uint64),
        ("lease", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("node", ctypes.c_char * 256),
        ("gpu", ctypes.c_char * 256),
    ]


class View(ctypes.Structure):
    """Description of an open lease: bursar_lease_state."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("lease", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("ready", ctypes.c_int32),
    ]


def _load():
    library = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "libbursar.so"))
    lease = ctypes.c_void_p
    for name, arguments in {
        "bursar_retained_open": [ctypes.POINTER(_OpenArgs), ctypes.POINTER(lease)],
        "bursar_retained_describe": [lease, ctypes.POINTER(View)],
        "bursar_retained_read": [lease, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64],
        "bursar_retained_write": [lease, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64],
        "bursar_retained_commit": [lease],
        "bursar_retained_discard": [lease],
        "bursar_seal": [ctypes.c_char_p, ctypes.c_int32, lease, ctypes.c_uint64, ctypes.POINTER(Token)],
        "bursar_redeem": [ctypes.c_char_p, ctypes.POINTER(Token), ctypes.POINTER(Memory)],
        "bursar_verify": [ctypes.POINTER(Token), ctypes.POINTER(ctypes.c_uint8 * 32), ctypes.POINTER(Memory)],
    }.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.bursar_retained_close.argtypes = [lease]
    library.bursar_retained_close.restype = None
    library.bursar_error.restype = ctypes.c_char_p
    library.bursar_cuda.restype = ctypes.c_int32
    return library


_LIBRARY = _load()


def _check(status):
    if status == 0:
        return
    text = _LIBRARY.bursar_error().decode(errors="replace")
    if status == _DRIVER:
        raise DriverError(text, _LIBRARY.bursar_cuda())
    raise _KINDS.get(status, Error)(text)


def _path(socket):
    return None if socket is None else os.fsencode(socket)


def seal(socket, device, lease, block):
    """Returns the bytes of a token for a lease, or for memory of this process where `lease` is None."""
    token = Token()
    raw = None if lease is None else lease._raw
    _check(_LIBRARY.bursar_seal(_path(socket), device, raw, block, ctypes.byref(token)))
    return bytes(token.bytes[: token.length])


def redeem(socket, data):
    """Returns what the agent says that a token names."""
    memory = Memory()
    _check(_LIBRARY.bursar_redeem(_path(socket), ctypes.byref(Token.of(data)), ctypes.byref(memory)))
    return memory


def verify(data, key):
    """Returns what a token names that the node with this public key has signed."""
    memory = Memory()
    raw = (ctypes.c_uint8 * 32)(*key)
    _check(_LIBRARY.bursar_verify(ctypes.byref(Token.of(data)), ctypes.byref(raw), ctypes.byref(memory)))
    return memory


def _open(args, timeout):
    """Opens a lease, with up to `timeout` seconds of waiting."""
    deadline = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        wait = min(deadline - begin, _SLICE)
        args.timeout_ms = max(0, int(wait * 1000))
        raw = ctypes.c_void_p()
        try:
            _check(_LIBRARY.bursar_retained_open(ctypes.byref(args), ctypes.byref(raw)))
            return raw
        except Busy:
            # The library gives up early where no wait helps.
            if wait < _SLICE or time.monotonic() - begin < wait / 2:
                raise


class Lease:
    """Open lease, closed with its last reference. Every array over its memory refers to it."""

    def __init__(self, name, key, size, timeout, device, socket):
        self._raw = None
        if "\0" in name:
            raise ValueError(f"failed to open lease {name!r}: its name has a zero byte; use printable ASCII characters")
        args = _OpenArgs(
            name=name.encode(),
            socket=_path(socket),
            key=(ctypes.c_uint8 * 32)(*key),
            bytes=size,
            device=device,
        )
        self._raw = _open(args, timeout)
        self.device = device

    def __del__(self):
        self.close()

    def close(self):
        """Unmaps the lease, and discards one that was not committed. Arrays over it must not be used any more."""
        raw, self._raw = self._raw, None
        if raw is not None:
            _LIBRARY.bursar_retained_close(raw)

    def look(self):
        """Returns the lease's description."""
        view = View()
        _check(_LIBRARY.bursar_retained_describe(self._raw, ctypes.byref(view)))
        return view

    def read(self, at, size):
        """Copies a part of the lease to the host."""
        to = ctypes.create_string_buffer(size)
        _check(_LIBRARY.bursar_retained_read(self._raw, at, to, size))
        return to.raw

    def write(self, at, data):
        """Copies bytes of the host to a part of the lease."""
        self.write_from(at, data, len(data))

    def write_from(self, at, address, size):
        """Copies host memory to a part of the lease."""
        _check(_LIBRARY.bursar_retained_write(self._raw, at, address, size))

    def commit(self):
        """Commits the lease, which makes it read-only and visible to others."""
        _check(_LIBRARY.bursar_retained_commit(self._raw))

    def discard(self):
        """Discards the lease for the whole namespace. Arrays over it must not be used any more."""
        raw, self._raw = self._raw, None
        _check(_LIBRARY.bursar_retained_discard(raw))
