"""A kept lease with named tensors in it."""

import hashlib
import json

from bursar import _arrays, _index, _modules
from bursar._library import Corrupt, Error, Lease, Missing

PATIENCE = 600.0


class Mismatch(Error):
    """What is kept does not fit what it is attached to: the key does not say all that decides the content."""


def key(**parts):
    """The key of a content: a digest of all that decides it (model, revision, quantisation, rank, versions)."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).digest()


def kept(name, key, *, device=0, patience=PATIENCE, socket=None):
    """A lease, to be opened with `with`.

    `key` is 32 bytes, as `bursar.key` makes them. While another process loads the same content, and while the agent is being
    replaced, opening waits for up to `patience` seconds. `socket` is for tests: where the agent listens.
    """
    if len(key) != 32:
        raise ValueError(f"a key of {len(key)} bytes: bursar.key(...) makes one of 32")
    return Kept(name, bytes(key), device, patience, socket)


class Kept:
    """A lease of this process. Tensors of it stay good after the `with`, as long as one of them is referred to."""

    def __init__(self, name, key, device, patience, socket):
        self._open = lambda size: Lease(name, key, size, patience, device, socket)
        self._lease = None
        self.name = name

    def __enter__(self):
        try:
            self._lease = self._open(0)
        except (Missing, Corrupt):
            # What is corrupt is discarded by now: a commit begins it anew.
            self._lease = None
        return self

    def __exit__(self, *_):
        self._lease = None

    @property
    def ready(self):
        """Whether there is content to attach."""
        return self._lease is not None

    @property
    def generation(self):
        """The lease's generation: higher than that of any of this name and key before."""
        return self._ready().look().generation

    @property
    def bytes(self):
        """How much memory it takes."""
        return self._ready().look().bytes

    def tensors(self, library=None):
        """The tensors by name, read-only, without a copy. They are of the array library that the program imported."""
        lease = self._ready()
        library = library or _arrays.default()
        view = lease.look()
        layouts = _index.read(view.bytes, lease.read)
        return {
            name: library.view(lease, view.address, view.bytes, layout, lease.device)
            for name, layout in layouts.items()
        }

    def attach(self, target=None):
        """Puts what is kept in place of a module's tensors; without one, the same as `tensors`. Answers the tensors."""
        if target is None:
            return self.tensors()
        if not _modules.is_module(target):
            raise TypeError(f"{type(target).__name__} is no module to attach to: use tensors()")
        views = self.tensors(_arrays.Torch)
        wanted = _modules.tensors(target)
        _compare(wanted, views)
        _modules.attach(target, views)
        return views

    def commit(self, content):
        """Keeps tensors: a mapping of names to arrays, or a module, whose tensors are then those that are kept.

        Where another process was faster, its content is taken and this one's is dropped: a key says all that decides it.
        Answers the kept tensors.
        """
        if self._lease is not None:
            raise ValueError(f"lease {self.name!r} is ready: attach what it holds")
        module = content if _modules.is_module(content) else None
        arrays = dict(_modules.tensors(module) if module is not None else content)
        libraries = {name: _arrays.of(array) for name, array in arrays.items()}
        tensors = {name: libraries[name].tensor(array) for name, array in arrays.items()}
        ranges, tail, size = _index.plan(tensors)
        lease = self._open(size)
        view = lease.look()
        if not view.ready:
            for part in ranges:
                libraries[part.name].copy(arrays[part.name], part.low, part.high, lease, part.offset)
            lease.write(view.bytes - len(tail), tail)
            lease.commit()
        self._lease = lease
        if module is not None:
            return self.attach(module)
        return self.tensors(next(iter(libraries.values()), None))

    def discard(self):
        """Gives the lease up, for all of the namespace; its tensors must not be used any more."""
        lease, self._lease = self._ready(), None
        lease.discard()

    def _ready(self):
        if self._lease is None:
            raise ValueError(f"lease {self.name!r} holds nothing yet: commit what it is to hold")
        return self._lease


def _compare(wanted, views):
    missing, surplus = sorted(wanted.keys() - views.keys()), sorted(views.keys() - wanted.keys())
    if missing or surplus:
        raise Mismatch(f"not kept: {missing[:8]}; kept and not in the module: {surplus[:8]}")
    for name, tensor in wanted.items():
        view = views[name]
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise Mismatch(f"{name}: kept as {view.dtype}{list(view.shape)}, wanted {tensor.dtype}{list(tensor.shape)}")
