"""Where each named tensor lies in a lease: computed before it is written, and stored at its end.

What tensors share they share in the lease too: the bytes that each one reaches are joined where they overlap, and each
joined range is stored once. Strides stay as they are. The index is the last thing in the lease, so the checksum covers it:
JSON, its length as eight little-endian bytes, and eight bytes that say what it is.
"""

import json
from dataclasses import dataclass

MAGIC = b"bursar\x00\x01"
FOOTER = 16
# What ranges are aligned to, up to their own alignment in memory: what cudaMalloc gives, and more than any kernel asks.
ALIGNMENT = 512
# A damaged length must not be a large read.
MOST = 1 << 30


@dataclass(frozen=True)
class Layout:
    """A tensor's place and shape; strides and offset in bytes."""

    dtype: str
    shape: tuple
    strides: tuple
    offset: int


@dataclass(frozen=True)
class Tensor:
    """A tensor that is to be stored: its layout with the address in place of the offset."""

    dtype: str
    shape: tuple
    strides: tuple
    address: int
    itemsize: int

    def extent(self):
        """The first byte that it reaches, and the one behind the last; None where it has no elements."""
        if 0 in self.shape:
            return None
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.strides)]
        low = self.address + sum(span for span in spans if span < 0)
        high = self.address + sum(span for span in spans if span > 0) + self.itemsize
        return low, high


@dataclass(frozen=True)
class Range:
    """Bytes that are copied once: `name` is a tensor that reaches them."""

    name: str
    low: int
    high: int
    offset: int


def plan(tensors):
    """Lays tensors out: what to copy, the index, and how large the lease must be."""
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
    """The layouts in a lease of that many bytes. `read_at` copies from it. ValueError where it has no index."""
    footer = read_at(size - FOOTER, FOOTER)
    length = int.from_bytes(footer[:8], "little")
    if footer[8:] != MAGIC or length > min(size - FOOTER, MOST):
        raise ValueError("the lease was not written by this package")
    entries = json.loads(read_at(size - FOOTER - length, length))
    layouts = {}
    for name, (dtype, shape, strides, offset) in entries.items():
        layouts[name] = Layout(dtype, tuple(shape), tuple(strides), offset)
    return layouts
