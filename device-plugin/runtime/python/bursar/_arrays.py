"""Adapts NumPy and PyTorch to one interface.

`has` recognises a library's arrays, `tensor` describes one, `copy` copies its bytes to a part of a lease, and `views` creates
all arrays over a lease. A library is imported only once one of its arrays is seen or requested.
"""

import sys

from bursar import _index

# Alignment of storages: that of the largest item, complex128.
ALIGNMENT = 16


class NumPy:
    """NumPy, for device memory that the host can access: over a simulated driver, and managed memory."""

    @staticmethod
    def has(array):
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(array, numpy.ndarray)

    @staticmethod
    def tensor(array):
        if array.dtype.hasobject or array.dtype.fields or not array.dtype.isnative:
            raise TypeError(f"failed to store an array: dtype {array.dtype} is not supported; convert it")
        address = array.__array_interface__["data"][0]
        return _index.Tensor(array.dtype.name, array.shape, array.strides, address, array.itemsize)

    @staticmethod
    def copy(array, low, high, lease, at):
        lease.write_from(at, low, high - low)

    @staticmethod
    def views(owner, address, layouts, device):
        import numpy

        return {
            name: numpy.asarray(_Memory(owner, address + layout.offset, layout, numpy.dtype(layout.dtype).str))
            for name, layout in layouts.items()
        }


class _Memory:
    """Array interface over a lease. NumPy's array refers to this object, and this object to the lease."""

    def __init__(self, owner, address, layout, typestr):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": typestr,
            "data": (address, True),
        }


class Torch:
    """PyTorch, from any device to the device of the lease."""

    @staticmethod
    def has(array):
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    @staticmethod
    def tensor(array):
        if array.layout is not _torch().strided or array.is_meta or array.is_conj() or array.is_neg():
            raise TypeError(f"failed to store a tensor: {array.layout} on {array.device} is not supported; convert it")
        size = array.element_size()
        if array.data_ptr() % size:
            raise TypeError("failed to store a tensor: its address is not aligned to its items; pass a clone")
        strides = tuple(stride * size for stride in array.stride())
        return _index.Tensor(str(array.dtype).removeprefix("torch."), tuple(array.shape), strides, array.data_ptr(), size)

    @staticmethod
    def copy(array, low, high, lease, at):
        torch = _torch()
        storage = array.detach().untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=array.device)
        source.set_(storage, low - storage.data_ptr(), (high - low,), (1,))
        _bytes(None, lease.look().address + at, high - low, lease.device).copy_(source)

    @staticmethod
    def views(owner, address, layouts, device):
        torch = _torch()
        place, tensors = _bytes(owner, address, 1, device).device, {}
        for name, layout in layouts.items():
            size = torch.empty(0, dtype=getattr(torch, layout.dtype)).element_size()
            if any(number % size for number in (layout.offset, *layout.strides)):
                raise TypeError(f"failed to attach {name}: PyTorch has no unaligned items; commit a contiguous copy")
            tensors[name] = _index.Tensor(layout.dtype, layout.shape, layout.strides, layout.offset, size)
        extents = {name: tensor.extent() for name, tensor in tensors.items()}
        parts = _index.merged(extents)
        starts = [low // ALIGNMENT * ALIGNMENT for low, _, _ in parts]
        # Only tensors that share bytes share a storage, because PyTorch saves and copies whole storages.
        storages = [
            _bytes(owner, address + start, high - start, device).untyped_storage()
            for start, (_, high, _) in zip(starts, parts)
        ]
        views = {}
        for name, tensor in tensors.items():
            dtype = getattr(torch, tensor.dtype)
            if extents[name] is None:
                views[name] = torch.empty(tensor.shape, dtype=dtype, device=place)
                continue
            number = _index.containing(parts, tensor.address)
            offset = (tensor.address - starts[number]) // tensor.itemsize
            strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
            view = torch.empty(0, dtype=dtype, device=place)
            views[name] = view.set_(storages[number], offset, tensor.shape, strides)
        return views


class _DeviceBytes:
    """Device bytes with `__cuda_array_interface__`. They are declared writable, because PyTorch accepts no others."""

    def __init__(self, owner, address, size):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "data": (address, False),
            "stream": None,
        }


def _bytes(owner, address, size, device):
    return _torch().as_tensor(_DeviceBytes(owner, address, size), device=f"cuda:{device}")


def _torch():
    import torch

    return torch


LIBRARIES = (Torch, NumPy)


def of(array):
    """Returns the library of an array."""
    for library in LIBRARIES:
        if library.has(array):
            return library
    raise TypeError(f"failed to store {type(array).__name__}: not a tensor; pass arrays of PyTorch or NumPy")


def default():
    """Returns the default library: the first one that the program imported."""
    for library, name in ((Torch, "torch"), (NumPy, "numpy")):
        if name in sys.modules:
            return library
    raise TypeError("failed to attach tensors: no array library is imported; import torch or numpy first")
