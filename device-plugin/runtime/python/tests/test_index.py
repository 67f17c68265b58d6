"""Where tensors are laid out: no driver needed. Run by tests/python.rs of libbursar's package."""

import random
import types
import unittest
from unittest import mock

from bursar import _arrays, _index


def tensor(address, shape=(4,), itemsize=4, strides=None, dtype="float32"):
    if strides is None:
        strides, step = [], itemsize
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    return _index.Tensor(dtype, tuple(shape), tuple(strides), address, itemsize)


def lease(tensors):
    """A lease as bytes, written and read as the package does; memory is a function of the address."""
    ranges, tail, size = _index.plan(tensors)
    size += 12345
    memory = bytearray(size)
    for part in ranges:
        data = bytes(address * 7 % 251 for address in range(part.low, part.high))
        memory[part.offset : part.offset + len(data)] = data
    memory[size - len(tail) :] = tail
    return memory, _index.read(size, lambda at, count: bytes(memory[at : at + count])), ranges


class View:
    """A tensor of PyTorch's as far as it is set."""

    device = "cuda:0"

    def __init__(self, *storage):
        self.storage = storage

    def element_size(self):
        return 4

    def untyped_storage(self):
        return self.storage

    def set_(self, *parts):
        return parts


def views(layouts):
    """The storage (address and size), offset, shape and strides of each tensor over a lease at address 4096."""
    torch = types.SimpleNamespace(float32=None, empty=lambda *shape, dtype, device=None: View())
    storage = lambda owner, address, size, device: View(address, size)
    with mock.patch.object(_arrays, "_torch", lambda: torch), mock.patch.object(_arrays, "_bytes", storage):
        return _arrays.Torch.views(None, 4096, layouts, 0)


class Layouts(unittest.TestCase):
    def test_what_overlaps_is_stored_once_and_stays_shared(self):
        whole, part = tensor(4096, (100,)), tensor(4096 + 40, (10,))
        memory, layouts, ranges = lease({"part": part, "whole": whole, "tied": whole})
        self.assertEqual(len(ranges), 1)
        self.assertEqual(layouts["whole"], layouts["tied"])
        self.assertEqual(layouts["part"].offset - layouts["whole"].offset, 40)

    def test_neighbours_that_do_not_overlap_are_apart_and_aligned_as_they_were(self):
        _, layouts, ranges = lease({"a": tensor(4096, (4,)), "b": tensor(4096 + 16, (4,))})
        self.assertEqual(len(ranges), 2)
        self.assertEqual(layouts["a"].offset % 512, 0)
        self.assertEqual(layouts["b"].offset % 512, 16)

    def test_strides_stay_as_they_are_backward_ones_too(self):
        turned = tensor(8192 + 396, (100,), strides=(-4,))
        spread = tensor(65536, (3, 2), strides=(4, 100))
        _, layouts, ranges = lease({"turned": turned, "spread": spread, "one": tensor(3, ())})
        self.assertEqual(layouts["turned"].strides, (-4,))
        self.assertEqual(layouts["turned"].offset, ranges[1].offset + 396)
        self.assertEqual(layouts["spread"].strides, (4, 100))
        self.assertEqual(layouts["one"].shape, ())

    def test_nothing_is_stored_of_what_has_no_elements(self):
        _, layouts, ranges = lease({"empty": tensor(0, (0, 3))})
        self.assertEqual((layouts["empty"].shape, ranges), ((0, 3), []))

    def test_every_byte_of_every_tensor_is_found_again(self):
        rng = random.Random(1)
        for _ in range(200):
            tensors = {}
            for number in range(rng.randrange(1, 12)):
                itemsize = rng.choice([1, 2, 4, 8])
                shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
                tensors[f"t{number}"] = tensor(rng.randrange(1000, 4000) * 8, shape, itemsize)
            memory, layouts, _ = lease(tensors)
            for name, written in tensors.items():
                low, high = written.extent()
                at = layouts[name].offset
                expected = bytes(address * 7 % 251 for address in range(low, high))
                self.assertEqual(memory[at : at + high - low], expected, name)
                self.assertEqual(at % written.itemsize, written.address % written.itemsize)

    def test_a_lease_of_somebody_else_is_no_index(self):
        for tail in (bytes(16), (1 << 40).to_bytes(8, "little") + _index.MAGIC):
            memory = bytes(4096) + tail
            with self.assertRaises(ValueError):
                _index.read(len(memory), lambda at, count: memory[at : at + count])

    def test_ranges_merge_only_when_they_overlap(self):
        extents = {"b": (40, 80), "a": (0, 50), "apart": (80, 90), "tied": (80, 90), "empty": None}
        parts = _index.merged(extents)
        self.assertEqual(parts, [(0, 80, "a"), (80, 90, "apart")])
        self.assertEqual([_index.containing(parts, at) for at in (0, 79, 80, 89)], [0, 0, 1, 1])

    def test_tensor_has_a_storage_of_its_own_bytes(self):
        whole = tensor(4096, (100,))
        _, layouts, _ = lease({"whole": whole, "tied": whole, "part": tensor(4100, (10,)), "odd": tensor(65540, (3, 2))})
        found = views(layouts)
        self.assertEqual(found["whole"], ((4096, 400), 0, (100,), (1,)))
        self.assertIs(found["whole"][0], found["tied"][0])
        self.assertIs(found["whole"][0], found["part"][0])
        self.assertEqual(found["part"][1:], (1, (10,), (1,)))
        # A storage begins at an aligned address, here 4 bytes before its tensor.
        self.assertEqual(found["odd"], ((4096 + 512, 28), 1, (3, 2), (2, 1)))

    def test_torch_refuses_a_tensor_when_it_is_not_aligned(self):
        for layout in (_index.Layout("float32", (2,), (4,), 1), _index.Layout("float32", (2,), (5,), 0)):
            with self.assertRaisesRegex(TypeError, "contiguous"):
                views({"x": layout})
        unaligned = mock.Mock(layout="strided", is_meta=False, data_ptr=lambda: 4097, element_size=lambda: 4)
        unaligned.stride.return_value, unaligned.shape = (1,), (2,)
        unaligned.is_conj.return_value = unaligned.is_neg.return_value = False
        with mock.patch.object(_arrays, "_torch", lambda: types.SimpleNamespace(strided="strided")):
            with self.assertRaisesRegex(TypeError, "aligned"):
                _arrays.Torch.tensor(unaligned)


if __name__ == "__main__":
    unittest.main()
