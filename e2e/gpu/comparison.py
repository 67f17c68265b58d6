"""Compares two programs by turns, and returns the ratio of their figures with an interval.

The turns are A B B A, because a machine that gets slower would otherwise favour one side. The number of pairs is fixed
before the first one, because who stops at a good figure finds one. All pairs are kept, in a file if there is one, so
that a comparison goes on over several machines. The ratio is the geometric mean of the pairs' ratios. The interval has
it with 95 % (Student's t of the logarithms).
"""

import collections
import contextlib
import ctypes
import json
import math
import os
import signal
import statistics
import subprocess
import time

PR_SET_PDEATHSIG = 1
LEAST_PAIRS = 4


class Ratio(collections.namedtuple("Ratio", "n planned mean low high")):
    """The second program's figure over the first one's."""

    def __str__(self):
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f}, n = {self.n})"

    def _verdict(self, is_right, is_wrong, goal):
        if self.n < self.planned:
            return {"unshown": f"{self.n} of {self.planned} pairs; the next run takes the others"}
        if is_right:
            return {}
        return {"wrong": f"goal {goal}" if is_wrong else f"undecided, goal {goal} is in the interval; plan more pairs"}

    def at_most(self, most):
        """Returns the verdict of `Table.add`: right only if the whole interval is at most `most`."""
        return self._verdict(self.high <= most, self.low > most, f"at most {most}")

    def at_least(self, least):
        """Returns the verdict of `Table.add`, for a ratio that should be large."""
        return self._verdict(self.low >= least, self.high < least, f"at least {least}")

    def within(self, part):
        """Returns the verdict of `Table.add`: right if the ratio differs from 1 by at most `part` either way."""
        is_right = 1 - part <= self.low and self.high <= 1 + part
        return self._verdict(is_right, self.low > 1 + part or self.high < 1 - part, f"1 within {part:.1%}")


def quantile(freedom):
    """Returns the 97.5th percentile of Student's t, by its expansion in the inverse degrees of freedom."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def ratio_of(first, second, planned=None):
    """Returns the ratio of the second program's values to the first one's, which were taken in pairs."""
    logs = [math.log(after / before) for before, after in zip(first, second, strict=True)]
    n, mean = len(logs), statistics.fmean(logs) if logs else math.nan
    error = quantile(n - 1) * statistics.stdev(logs) / math.sqrt(n) if n >= LEAST_PAIRS else math.inf
    return Ratio(n, planned or n, *(math.exp(mean + sign * error) for sign in (0, -1, 1)))


class Comparison:
    """The pairs of one comparison, each with all figures of both programs."""

    def __init__(self, name, pairs, state=None):
        """`state` is a file that keeps the pairs of all comparisons; without it they end with this object."""
        if pairs < LEAST_PAIRS:
            raise ValueError(f"{name}: {pairs} pairs; an interval needs {LEAST_PAIRS}")
        self.name, self.planned, self.state, self.pairs = name, pairs, state, []
        if kept := self._read().get(name):
            if kept["planned"] != pairs:
                raise ValueError(f"{name}: {state} has {kept['planned']} pairs, not {pairs}; remove the file first")
            self.pairs = kept["pairs"]

    def _read(self):
        if not self.state or not os.path.exists(self.state):
            return {}
        with open(self.state, encoding="utf-8") as file:
            return json.load(file)

    def _keep(self, pair):
        self.pairs.append(pair)
        if self.state:
            all_kept = self._read() | {self.name: {"planned": self.planned, "pairs": self.pairs}}
            with open(f"{self.state}.tmp", "w", encoding="utf-8") as file:
                json.dump(all_kept, file)
            os.replace(f"{self.state}.tmp", self.state)

    def take(self, first, second, seconds=math.inf):
        """Runs the pairs that are missing; none begins after `seconds`. A program returns its figures by name."""
        end = time.monotonic() + seconds
        while len(self.pairs) < self.planned and time.monotonic() < end:
            if len(self.pairs) % 2 == 0:
                pair = first(), second()
            else:
                pair = (second(), first())[::-1]
            positive = all(value > 0 for figures in pair for value in figures.values())
            if not pair[0] or pair[0].keys() != pair[1].keys() or not positive:
                raise ValueError(f"{self.name}: figures have no ratio: {pair}")
            self._keep(pair)
        return self

    def figures(self):
        """Returns the names of the figures."""
        return list(self.pairs[0][0]) if self.pairs else []

    def values(self, figure):
        """Returns all values of a figure, of both programs."""
        return [first[figure] for first, _ in self.pairs], [second[figure] for _, second in self.pairs]

    def ratio(self, figure):
        """Returns the ratio of a figure."""
        return ratio_of(*self.values(figure), self.planned)


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def child(command, **options):
    """Starts a program in a session of its own. It ends with the block, and with this process however that ends."""
    with subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def output(command, seconds, **options):
    """Runs a program for at most `seconds`, and returns its standard output. Its own children end with it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with child(command, **pipes) as process:
        text, errors = process.communicate(timeout=seconds)
    if process.returncode:
        raise RuntimeError(f"failed to run {command[0]}: {text[-500:]}{(errors or '')[-1500:]}")
    return text
