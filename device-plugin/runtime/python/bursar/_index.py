"""Computes the layout of named tensors in a lease, and stores it as an index at the end of the lease.

Tensors that share storage share it in the lease too: overlapping byte ranges are merged, and each merged range is stored
once. Strides do not change. The checksum covers the index, which is the last part of the lease: JSON, its length as eight
little-endian bytes, and eight magic bytes.
"""

import json
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


def plan(tensors):
    """Computes the ranges to copy, the index, and the size of the lease."""
    reached = {name: tensor.extent() for name, tensor in tensors.items()}
    ranges, end = [], 0
    for (low, high), name in sorted((extent, name) for name, extent in reached.items() if extent):
        if ranges and low < ranges[-1].high:
            last = ranges[-1]
            high = max(high, last.high)
            ranges[-1] = Range(last.name, last.low, high, last.offset)
        else:
            offset = -(-end // ALIGNMENT) * ALIGNMENT + low % ALIGNMENT
            ranges.append(Range(name, low, high, offset))
        end = ranges[-1].offset + ranges[-1].high - ranges[-1].low
    entries = {}
    for name, tensor in tensors.items():
        offset = 0
        if reached[name]:
            inside = next(part for part in ranges if part.low <= reached[name][0] < part.high)
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
