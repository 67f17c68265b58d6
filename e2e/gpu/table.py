"""Collects the rows of a script, and prints their table with the failures."""

import time

PERCENTILE_VALUES = 100


class Table:
    """Rows in order, each with its failure if there is one."""

    def __init__(self, *columns):
        self.begun = time.monotonic()
        self.columns = columns
        self.rows = []

    def say(self, text):
        """Prints a progress line with the time since the start."""
        print(f"[{time.monotonic() - self.begun:5.1f}s] {text}", flush=True)

    def add(self, *cells, wrong=False, unshown=None):
        """Adds a row; `wrong` describes its failure, or is only true.

        `unshown` says why this machine can show the row neither right nor wrong.
        """
        if unshown is not None:
            verdict = f"not shown here: {unshown}"
        elif wrong is None or wrong is False:
            verdict = "right"
        else:
            verdict = "WRONG" if wrong is True else f"WRONG: {wrong}"
        self.rows.append((*cells, verdict))
        self.say(f"{cells[0]}: {self.rows[-1][-1]}")

    def show(self):
        """Prints all rows, and returns the exit code."""
        print("\n| " + " | ".join((*self.columns, "verdict")) + " |")
        print("|---" * (len(self.columns) + 1) + "|")
        for row in self.rows:
            print("| " + " | ".join(str(cell).replace("\n", " ") for cell in row) + " |")
        wrong = sum(row[-1].startswith("WRONG") for row in self.rows)
        unshown = sum(row[-1].startswith("not shown here") for row in self.rows)
        counts = f"{len(self.rows)} rows, {wrong} wrong" + (f", {unshown} not shown here" if unshown else "")
        print(f"{counts}, {time.monotonic() - self.begun:.0f} s")
        return 1 if wrong else 0


def percentile(values, part):
    """Returns the smallest value that `percent` hundredths of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]


def milliseconds(values):
    """Formats nanoseconds: the median and the 99th percentile, which is the maximum of few values, and called so."""
    name = "p99" if len(values) >= PERCENTILE_VALUES else "max"
    return f"p50 {percentile(values, 50) / 1e6:.2f}, {name} {percentile(values, 99) / 1e6:.2f} ms"
