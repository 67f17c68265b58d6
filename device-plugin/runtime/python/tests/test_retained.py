"""The package over the simulated driver with NumPy: BURSAR_TEST_SOCKET is where the agent listens.

Run by tests/python.rs of libbursar's package, which starts the agent's stand-in and installs the wheel.
"""

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import bursar
import numpy
from bursar._arrays import NumPy

SOCKET = os.environ["BURSAR_TEST_SOCKET"]
# The key of the agent's stand-in.
PUBLIC_KEY = "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"


def retained(name, timeout=20.0, **parts):
    return bursar.retained(name, bursar.key(**parts), socket=SOCKET, timeout=timeout)


def weights():
    base = numpy.arange(10_000, dtype=numpy.float32)
    return {
        "matrix": base.reshape(100, 100),
        "transposed": base.reshape(100, 100).T,
        "tail": base[9_000:],
        "every third": base[1:-1:3],
        "backward": base[::-2],
        "tokens": numpy.array([[1, 2], [3, 4]], dtype=numpy.int64),
        "mask": numpy.array([True, False]),
        "scalar": numpy.array(3.5),
        "empty": numpy.zeros((0, 7), dtype=numpy.uint8),
    }


def child(code, **options):
    """Runs Python in another process, with `retained` as here."""
    prelude = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_retained import *\n"
    return subprocess.run([sys.executable, "-c", prelude + code], timeout=60, check=False, **options)


def spoil(content):
    """Changes a byte behind everybody's back: the simulated driver's memory is in files."""
    folder = os.path.join(os.environ["SIMGPU_DIR"], "state/mem")
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "r+b") as memory:
            at = memory.read().find(content)
            if at >= 0:
                memory.seek(at)
                memory.write(b"\0")
                return
    raise LookupError(content)


class Retained(unittest.TestCase):
    def test_what_was_committed_comes_back_after_a_kill_with_shapes_strides_and_aliases(self):
        code = """
with retained("killed", revision=1) as lease:
    assert not lease.ready
    lease.commit(weights())
    os.kill(os.getpid(), signal.SIGKILL)
"""
        self.assertEqual(child(code).returncode, -signal.SIGKILL)
        with retained("killed", revision=1) as lease:
            self.assertTrue(lease.ready)
            found = lease.attach()
        for name, expected in weights().items():
            numpy.testing.assert_array_equal(found[name], expected, strict=True)
            self.assertEqual(found[name].strides, expected.strides, name)
        self.assertTrue(numpy.shares_memory(found["matrix"], found["tail"]))
        self.assertEqual(found["tail"].ctypes.data - found["matrix"].ctypes.data, 36_000)

    def test_another_key_is_another_content(self):
        for revision in (1, 2):
            with retained("keys", revision=revision) as lease:
                lease.commit({"revision": numpy.array([revision])})
        for revision in (1, 2):
            with retained("keys", revision=revision) as lease:
                self.assertEqual(lease.attach()["revision"][0], revision)
        self.assertEqual(bursar.key(a=1, b=2), bursar.key(b=2, a=1))
        self.assertNotEqual(bursar.key(a=1), bursar.key(a="1"))

    def test_key_is_the_same_in_each_process(self):
        code = """
print(bursar.key(adapters={"a", "b", "c", "d"}, layers=[frozenset("xyz")], revision={2, "2", None}).hex())
"""
        keys = set()
        for seed in ("1", "2", "3"):
            ended = child(code, stdout=subprocess.PIPE, env=os.environ | {"PYTHONHASHSEED": seed})
            keys.add(ended.stdout)
        self.assertEqual([len(key) for key in keys], [65])

    def test_key_is_refused_when_it_would_have_an_address(self):
        for part in (object(), {object()}, lambda: None):
            with self.assertRaisesRegex(TypeError, "pass its name"):
                bursar.key(part=part)
        bursar.key(dtype=numpy.dtype("float32"), path=pathlib.Path("/models"))

    def test_tensors_stay_good_after_the_block_and_are_read_only(self):
        with retained("after") as lease:
            committed = lease.commit({"x": numpy.full(1000, 7)})
            self.assertTrue(lease.ready)
        gc.collect()
        self.assertEqual(committed["x"].sum(), 7000)
        with self.assertRaises(ValueError):
            committed["x"][0] = 1

    def test_a_write_past_numpy_faults_the_writer_alone(self):
        with retained("fault") as lease:
            mine = lease.commit({"x": numpy.full(1000, 7)})["x"]
        code = """
import ctypes
with retained("fault") as lease:
    x = lease.attach()["x"]
    ctypes.memset(x.ctypes.data, 1, 8)
"""
        self.assertEqual(child(code).returncode, -signal.SIGSEGV)
        self.assertEqual(mine.sum(), 7000)
        with retained("fault") as lease:
            self.assertEqual(lease.attach()["x"].sum(), 7000)

    def test_what_is_found_spoilt_is_not_ready_and_can_be_committed_anew(self):
        mark = numpy.frombuffer(b"about to be spoilt", numpy.uint8)
        with retained("spoilt") as lease:
            lease.commit({"x": mark})
            first = lease.generation
        spoil(mark.tobytes())
        with retained("spoilt") as lease:
            self.assertFalse(lease.ready)
            lease.commit({"x": mark})
            self.assertGreater(lease.generation, first)
        with retained("spoilt") as lease:
            numpy.testing.assert_array_equal(lease.attach()["x"], mark)

    def test_arrays_are_copied_by_the_driver_for_no_host_reaches_a_gpus_memory(self):
        device, array = mock.Mock(), weights()["matrix"]
        low = array.ctypes.data
        NumPy.copy(array, low, low + array.nbytes, device, 4096)
        device.write_from.assert_called_once_with(4096, low, array.nbytes)

    def test_commit_succeeds_in_the_handler_of_a_failed_one(self):
        content = {"x": numpy.ones(3)}
        with retained("retry", timeout=1) as lease:
            try:
                with mock.patch.object(NumPy, "copy", side_effect=MemoryError):
                    lease.commit(content)
            except MemoryError:
                self.assertEqual(lease.commit(content)["x"].sum(), 3)

    def test_lease_that_was_not_opened_ends_without_a_message(self):
        code = """
for name, key in [(None, bursar.key()), ("x", "x" * 32)]:
    try:
        Lease(name, key, 0, 0, 0, SOCKET)
    except (AttributeError, TypeError):
        pass
"""
        ended = child("from bursar._library import Lease" + code, stderr=subprocess.PIPE)
        self.assertEqual((ended.returncode, ended.stderr), (0, b""))

    def test_a_process_that_ends_before_its_commit_leaves_nothing(self):
        code = """
from bursar._library import Lease
lease = Lease("half", bursar.key(), 1 << 20, 1.0, 0, SOCKET)
lease.write(0, b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""
        self.assertEqual(child(code).returncode, -signal.SIGKILL)
        with retained("half") as lease:
            self.assertFalse(lease.ready)
            lease.commit({"x": numpy.ones(3)})

    def test_of_processes_that_load_the_same_one_commits_and_all_have_it(self):
        code = """
with retained("race") as lease:
    x = (lease.attach() if lease.ready else lease.commit({"x": numpy.full(100_000, 5)}))["x"]
    print(x.sum(), lease.generation)
"""
        answers = []
        run = lambda: answers.append(child(code, stdout=subprocess.PIPE).stdout)
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(answers)), 1, answers)
        self.assertTrue(answers[0].startswith(b"500000 "), answers)

    def test_signals_of_a_profiler_are_no_error(self):
        signals = []
        before = signal.signal(signal.SIGALRM, lambda *_: signals.append(None))
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            for round_ in range(200):
                with retained("signals", round=round_) as lease:
                    lease.commit({"x": numpy.full(3, round_)})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.assertGreater(len(signals), 100)

    def test_what_cannot_be_is_an_exception_with_its_name(self):
        with retained("errors") as lease:
            with self.assertRaises(ValueError):
                lease.attach()
            with self.assertRaises(TypeError):
                lease.commit({"x": "text"})
            with self.assertRaises(TypeError):
                lease.commit({"x": numpy.array([object()])})
            with self.assertRaises(bursar.DriverError) as raised:
                lease._open(1 << 50)
            self.assertEqual(raised.exception.code, 2)
        with self.assertRaises(ValueError):
            bursar.retained("x", b"short")
        for name in ("", "errors\0of others"):
            with self.assertRaises(ValueError):
                retained(name).__enter__()
        with self.assertRaises(bursar.Busy):
            bursar.retained("x", bursar.key(), socket="/nowhere", timeout=0).__enter__()
        with self.assertRaises(bursar.DriverError):
            bursar.retained("x", bursar.key(), socket=SOCKET, device=9).__enter__()

    def test_a_token_is_redeemed_on_its_node_and_verified_anywhere(self):
        gpunode = {
            "metadata": {"name": "node-1"},
            "status": {"tokenKey": {"algorithm": "Ed25519", "publicKey": PUBLIC_KEY}, "gpus": []},
        }
        with retained("tokens") as lease:
            with self.assertRaises(ValueError):
                bursar.seal(1, lease, socket=SOCKET)
            lease.commit({"x": numpy.ones(3)})
            of_lease = bursar.seal(8, lease, socket=SOCKET)
            generation = lease.generation
        own = bursar.seal(9, socket=SOCKET)
        memory = bursar.redeem(of_lease, socket=SOCKET)
        self.assertEqual((memory.node, memory.lease, memory.block), ("node-1", generation, 8))
        self.assertEqual(bursar.redeem(own, socket=SOCKET)._replace(block=8), memory._replace(lease=0))
        self.assertIsNone(bursar.verify(of_lease, gpunode).current)
        for now, current in [(memory.gpu_generation, True), (memory.gpu_generation + 1, False)]:
            gpunode["status"]["gpus"] = [{"uuid": memory.gpu, "generation": now}]
            self.assertEqual(bursar.verify(of_lease, json.dumps(gpunode)), memory._replace(current=current))
        changed = of_lease[:-1] + bytes([of_lease[-1] ^ 1])
        with self.assertRaises(bursar.Refused):
            bursar.verify(changed, gpunode)
        with self.assertRaises(bursar.Refused):
            bursar.redeem(changed, socket=SOCKET)
        gpunode["metadata"]["name"] = "node-2"
        with self.assertRaises(bursar.Refused):
            bursar.verify(of_lease, gpunode)
        del gpunode["status"]["tokenKey"]
        with self.assertRaises(bursar.Refused):
            bursar.verify(of_lease, gpunode)
        for wrong in (b"", b"x" * 512, b"x" * 513):
            with self.assertRaises(ValueError):
                bursar.redeem(wrong, socket=SOCKET)
        with self.assertRaises(bursar.Busy):
            bursar.redeem(own, socket="/nowhere")

    def test_a_lease_that_is_discarded_is_gone_and_its_successor_is_of_a_higher_generation(self):
        with retained("discard") as lease:
            lease.commit({"x": numpy.ones(3)})
            first = lease.generation
            lease.discard()
        with retained("discard") as lease:
            self.assertFalse(lease.ready)
            lease.commit({"x": numpy.ones(3)})
            self.assertGreater(lease.generation, first)

    def test_a_lease_that_is_written_is_waited_for_as_long_as_patience_lasts(self):
        from bursar._library import Lease

        writer = Lease("timeout", bursar.key(), 1 << 20, 1.0, 0, SOCKET)
        code = f"""
try:
    with retained("timeout", timeout=0.1) as lease:
        print("open")
except bursar.Busy:
    print("busy")
"""
        since = time.monotonic()
        self.assertEqual(child(code, stdout=subprocess.PIPE).stdout, b"busy\n")
        self.assertLess(time.monotonic() - since, 30)
        del writer

    def test_open_waits_for_a_writer_and_handles_signals(self):
        from bursar._library import Lease

        writer, events = Lease("signal", bursar.key(), 1 << 20, 1.0, 0, SOCKET), []
        before = signal.signal(signal.SIGALRM, lambda *_: events.append("signal"))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        ending = threading.Timer(3, lambda: events.append("end") or writer.close())
        ending.start()
        try:
            with retained("signal") as lease:
                self.assertEqual(lease.commit({"x": numpy.ones(3)})["x"].sum(), 3)
        finally:
            ending.join()
            signal.signal(signal.SIGALRM, before)
        self.assertEqual(events, ["signal", "end"])


if __name__ == "__main__":
    unittest.main()
