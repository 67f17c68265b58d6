"""Opens and commits a retained lease with named tensors."""

import hashlib
import json
import re

from bursar import _arrays, _index, _modules
from bursar._library import Corrupt, Error, Lease, Missing

TIMEOUT = 600.0


class Mismatch(Error):
    """The retained tensors do not fit the module, because the key does not cover everything that decides the content."""


def key(**parts):
    """Returns the key of a content: a digest of all that decides it (model, revision, quantisation, rank, versions)."""
    return hashlib.sha256(_text(parts).encode()).digest()


def _text(part):
    return json.dumps(part, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value):
    """Returns an object that JSON lacks as what is the same in each process."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(_text, value))
    text = str(value)
    if re.search(" at 0x[0-9a-f]+", text):
        raise TypeError(f"failed to make a key: {text} has another address in each process; pass its name or number")
    return text


def retained(name, key, *, device=0, timeout=TIMEOUT, socket=None):
    """Returns a lease to open with `with`.

    `key` is the 32 bytes of `bursar.key`. Opening waits up to `timeout` seconds while another process loads the same content
    or the agent restarts. `socket` is the agent's socket, for tests.
    """
    if len(key) != 32:
        raise ValueError(f"failed to open the lease: the key has {len(key)} bytes; pass the 32 bytes of bursar.key(...)")
    return RetainedLease(name, bytes(key), device, timeout, socket)


class RetainedLease:
    """Lease of this process. Its tensors stay valid after the `with` as long as one of them is referenced."""

    def __init__(self, name, key, device, timeout, socket):
        self._open = lambda size: Lease(name, key, size, timeout, device, socket)
        self._lease = None
        self.name = name

    def __enter__(self):
        try:
            self._lease = self._open(0)
        except (Missing, Corrupt):
            # A corrupt lease was discarded, so a commit creates it anew.
            self._lease = None
        return self

    def __exit__(self, *_):
        self._lease = None

    @property
    def ready(self):
        """Whether the lease is committed, so that its content can be attached."""
        return self._lease is not None

    @property
    def generation(self):
        """The lease's generation, higher than that of any earlier lease of this name and key."""
        return self._ready().look().generation

    @property
    def bytes(self):
        """The lease's size."""
        return self._ready().look().bytes

    def tensors(self, library=None):
        """Returns the read-only tensors by name, without a copy, as arrays of the library that the program imported."""
        lease = self._ready()
        library = library or _arrays.default()
        view = lease.look()
        return library.views(lease, view.address, _index.read(view.bytes, lease.read), lease.device)

    def attach(self, target=None):
        """Replaces a module's tensors by the retained ones and returns these. Without a module, as `tensors`."""
        if target is None:
            return self.tensors()
        if not _modules.is_module(target):
            raise TypeError(f"failed to attach to {type(target).__name__}: not a module; use tensors()")
        views = self.tensors(_arrays.Torch)
        wanted = _modules.tensors(target)
        _compare(wanted, views)
        _modules.attach(target, views)
        return views

    def commit(self, content):
        """Commits a mapping of names to arrays, or a module, whose tensors are then replaced by the retained ones.

        If another process was faster, its content is used instead, because the key covers everything that decides it.
        Returns the retained tensors.
        """
        if self._lease is not None:
            raise ValueError(f"failed to commit lease {self.name!r}: it is committed already; attach its tensors")
        module = content if _modules.is_module(content) else None
        arrays = dict(_modules.tensors(module) if module is not None else content)
        libraries = {name: _arrays.of(array) for name, array in arrays.items()}
        tensors = {name: libraries[name].tensor(array) for name, array in arrays.items()}
        ranges, tail, size = _index.plan(tensors)
        lease = self._open(size)
        try:
            view = lease.look()
            if not view.ready:
                for part in ranges:
                    libraries[part.name].copy(arrays[part.name], part.low, part.high, lease, part.offset)
                lease.write(view.bytes - len(tail), tail)
                lease.commit()
        except BaseException:
            # The traceback refers to the lease, and another commit would wait for its end.
            lease.close()
            raise
        self._lease = lease
        if module is not None:
            return self.attach(module)
        return self.tensors(next(iter(libraries.values()), None))

    def discard(self):
        """Discards the lease for the whole namespace. Its tensors must not be used any more."""
        lease, self._lease = self._ready(), None
        lease.discard()

    def _ready(self):
        if self._lease is None:
            raise ValueError(f"failed to use lease {self.name!r}: it has no content; commit first")
        return self._lease


def _compare(wanted, views):
    missing, surplus = sorted(wanted.keys() - views.keys()), sorted(views.keys() - wanted.keys())
    if missing or surplus:
        raise Mismatch(f"failed to attach the lease: it lacks {missing[:8]}, and the module lacks {surplus[:8]}; extend the key")
    for name, tensor in wanted.items():
        view = views[name]
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise Mismatch(
                f"failed to attach {name}: the lease has {view.dtype}{list(view.shape)}, "
                f"the module {tensor.dtype}{list(tensor.shape)}; extend the key"
            )
