"""Tests the library of comparisons with programs whose figures are known."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from comparison import Comparison, child, output, quantile, ratio_of
from table import milliseconds

HERE = os.path.dirname(os.path.abspath(__file__))
PAIRS, NOISE, RUNS = 20, 0.02, 400


class Machine:
    """Runs programs of known duration, with noise, and gets slower with each run."""

    def __init__(self, seed, slower=0.0):
        self.random, self.slower, self.runs = random.Random(seed), slower, 0

    def program(self, duration):
        def run():
            self.runs += 1
            return {"ns": duration * self.random.gauss(1, NOISE) * (1 + self.slower) ** self.runs}

        return run


def compared(seed, second, slower=0.0, pairs=PAIRS):
    """Returns the ratio of a program that takes 100 and one that takes `second`."""
    machine = Machine(seed, slower)
    return Comparison("it", pairs).take(machine.program(100), machine.program(second)).ratio("ns")


class TestComparison(unittest.TestCase):
    def test_planted_difference_of_3_percent_is_found(self):
        found = [compared(seed, 103) for seed in range(RUNS)]
        self.assertGreater(sum("wrong" in ratio.at_most(1.0) for ratio in found), RUNS * 0.95)
        self.assertGreater(sum(ratio.low <= 1.03 <= ratio.high for ratio in found), RUNS * 0.92)

    def test_equal_programs_are_equal(self):
        for slower in 0.0, 0.01:
            found = [compared(seed, 100, slower) for seed in range(RUNS)]
            covered = sum(ratio.low <= 1 <= ratio.high for ratio in found)
            self.assertTrue(RUNS * 0.92 <= covered <= RUNS * 0.98, (slower, covered))
            self.assertGreater(sum(ratio.within(0.03) == {} for ratio in found), RUNS * 0.95)

    def test_number_of_pairs_is_kept_over_several_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            state, machine = f"{folder}/state.json", Machine(1)
            programs = machine.program(100), machine.program(100)
            begun = Comparison("it", PAIRS, state).take(*programs, seconds=0)
            self.assertEqual(begun.pairs, [])
            self.assertIn("unshown", begun.ratio("ns").at_most(2))
            while len(Comparison("it", PAIRS, state).take(*programs, seconds=1e-4).pairs) < PAIRS:
                pass
            runs = machine.runs
            whole = Comparison("it", PAIRS, state).take(*programs)
            self.assertEqual((len(whole.pairs), machine.runs, runs), (PAIRS, 2 * PAIRS, 2 * PAIRS))
            with self.assertRaisesRegex(ValueError, "not 21"):
                Comparison("it", PAIRS + 1, state)
            with open(state, encoding="utf-8") as file:
                self.assertEqual(json.load(file)["it"]["planned"], PAIRS)

    def test_order_of_turns_is_a_b_b_a(self):
        order = []

        def program(name):
            return lambda: order.append(name) or {"ns": 1 if name == "A" else 2}

        ratio = Comparison("it", 4).take(program("A"), program("B")).ratio("ns")
        self.assertEqual("".join(order), "ABBAABBA")
        self.assertAlmostEqual(ratio.mean, 2)

    def test_figure_without_a_ratio_is_refused(self):
        for first, second in ({"ns": 0.0}, {"ns": 1.0}), ({"ns": 1.0}, {"us": 1.0}), ({}, {}):
            with self.assertRaisesRegex(ValueError, "no ratio"):
                Comparison("it", 4).take(lambda: first, lambda: second)
        with self.assertRaisesRegex(ValueError, "needs 4"):
            Comparison("it", 3)

    def test_undecided_interval_fails_and_says_so(self):
        ratio = compared(1, 103)
        self.assertIn("undecided", ratio.at_most(ratio.mean)["wrong"])
        self.assertNotIn("undecided", ratio.at_most(1.0)["wrong"])
        self.assertEqual(ratio.at_most(1.1), {})
        self.assertIn("wrong", ratio.within(0.001))

    def test_few_pairs_decide_nothing(self):
        ratio = ratio_of([1, 1, 1], [9, 9, 9])
        self.assertIn("undecided", ratio.at_most(2)["wrong"])
        self.assertNotIn("undecided", ratio_of([1] * 4, [9] * 4).at_most(2)["wrong"])

    def test_quantile_is_that_of_students_t(self):
        for freedom, expected in (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962):
            self.assertTrue(math.isclose(quantile(freedom), expected, rel_tol=2e-3), freedom)

    def test_few_values_have_a_maximum_and_no_percentile(self):
        few, many = [1e6, 3e6, 2e6], [number * 1e6 for number in range(1, 101)]
        shown = milliseconds(few), milliseconds(many)
        self.assertEqual(shown, ("p50 2.00, max 3.00 ms", "p50 50.00, p99 99.00 ms"))

    def test_children_end_with_the_comparison(self):
        program = "import sys; sys.path.insert(0, sys.argv[1]); import comparison, time\n"
        program += "with comparison.child(['sleep', '600']) as it:\n print(it.pid, flush=True)\n time.sleep(600)"
        parent = subprocess.Popen([sys.executable, "-c", program, HERE], stdout=subprocess.PIPE, text=True)
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        end = time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.01)
        self.assertFalse(os.path.exists(f"/proc/{pid}"))
        with child(["sleep", "600"]) as process:
            self.assertIsNone(process.poll())
        self.assertEqual(process.returncode, -signal.SIGKILL)
        with self.assertRaises(subprocess.TimeoutExpired):
            output(["sleep", "600"], 0.1)


if __name__ == "__main__":
    unittest.main()
