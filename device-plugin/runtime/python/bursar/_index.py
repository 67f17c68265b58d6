"""Computes the layout of named tensors in a lease, and stores it as an index at the end of the lease.

Tensors that share storage share it in the lease too: overlapping byte ranges are merged, and each merged range is stored
once. Strides do not change. The checksum covers the index, which is the last part of the lease: JSON, its length as eight
little-endian bytes, and eight magic bytes.
"""

import bisect
import json
import math
from dataclasses import dataclass

MAGIC = b"bursar\x00\x01"
FOOTER = 16
# Alignment of ranges, up to their own alignment in memory: that of cudaMalloc, and more than any kernel needs.
ALIGNMENT = 512
# Bounds the read of a damaged length.
MOST = 1 << 30


@dataclass(frozen=True)
class Layout:
    """Place and shape of a tensor; strides and offset in bytes."""

    dtype: str
    shape: tuple
    strides: tuple
    offset: int


@dataclass(frozen=True)
class Tensor:
    """Tensor to store: its layout with the address in place of the offset."""

    dtype: str
    shape: tuple
    strides: tuple
    address: int
    itemsize: int

    def extent(self):
        """Returns the byte range of the tensor, end exclusive; None without elements."""
        if 0 in self.shape:
            return None
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.strides)]
        low = self.address + sum(span for span in spans if span < 0)
        high = self.address + sum(span for span in spans if span > 0) + self.itemsize
        return low, high


@dataclass(frozen=True)
class Range:
    """Bytes that are copied once, from the tensor `name`, which covers them."""

    name: str
    low: int
    high: int
    offset: int


def merged(extents):
    """Merges the byte ranges that overlap. Returns low, high and the first name of each, in order."""
    parts = []
    for (low, high), name in sorted((extent, name) for name, extent in extents.items() if extent):
        if parts and low < parts[-1][1]:
            first_low, first_high, first = parts[-1]
            parts[-1] = (first_low, max(high, first_high), first)
        else:
            parts.append((low, high, name))
    return parts


def containing(parts, at):
    """Returns the number of the merged range that contains a byte."""
    return bisect.bisect_right(parts, (at, math.inf)) - 1


def plan(tensors):
    """Computes the ranges to copy, the index, and the size of the lease."""
    extents = {name: tensor.extent() for name, tensor in tensors.items()}
    parts, ranges, end = merged(extents), [], 0
    for low, high, name in parts:
        offset = -(-end // ALIGNMENT) * ALIGNMENT + low % ALIGNMENT
        ranges.append(Range(name, low, high, offset))
        end = offset + high - low
    entries = {}
    for name, tensor in tensors.items():
        offset = 0
        if extents[name]:
            inside = ranges[containing(parts, tensor.address)]
            offset = inside.offset + tensor.address - inside.low
        entries[name] = [tensor.dtype, list(tensor.shape), list(tensor.strides), offset]
    index = json.dumps(entries, separators=(",", ":")).encode()
    tail = index + len(index).to_bytes(8, "little") + MAGIC
    return ranges, tail, end + len(tail)


def read(size, read_at):
    """Reads the layouts of a lease of `bytes` bytes through `read_at`. Raises ValueError without an index."""
    footer = read_at(size - FOOTER, FOOTER)
    length = int.from_bytes(footer[:8], "little")
    if footer[8:] != MAGIC or length > min(size - FOOTER, MOST):
        raise ValueError("failed to read the lease's index: this package did not write the lease; use another name")
    entries = json.loads(read_at(size - FOOTER - length, length))
    layouts = {}
    for name, (dtype, shape, strides, offset) in entries.items():
        layouts[name] = Layout(dtype, tuple(shape), tuple(strides), offset)
    return layouts
