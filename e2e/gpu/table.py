"""The table that a script prints last, and what is wrong in it."""

import time


class Table:
    """Rows as they come, each with whether it is as it must be."""

    def __init__(self, *columns):
        self.begun = time.monotonic()
        self.columns = columns
        self.rows = []

    def say(self, text):
        """A line on the way, with the time since the start."""
        print(f"[{time.monotonic() - self.begun:5.1f}s] {text}", flush=True)

    def add(self, *cells, wrong=False):
        """One more row; `wrong` says what is not as it must be, or only that something is not."""
        if wrong is None or wrong is False:
            verdict = "right"
        else:
            verdict = "WRONG" if wrong is True else f"WRONG: {wrong}"
        self.rows.append((*cells, verdict))
        self.say(f"{cells[0]}: {self.rows[-1][-1]}")

    def show(self):
        """Prints all of it; the process's exit code."""
        print("\n| " + " | ".join((*self.columns, "verdict")) + " |")
        print("|---" * (len(self.columns) + 1) + "|")
        for row in self.rows:
            print("| " + " | ".join(str(cell).replace("\n", " ") for cell in row) + " |")
        wrong = sum(row[-1] != "right" for row in self.rows)
        print(f"{len(self.rows)} rows, {wrong} wrong, {time.monotonic() - self.begun:.0f} s")
        return 1 if wrong else 0


def percentile(values, part):
    """The smallest value that so many hundredths are not above."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]


def milliseconds(values):
    """p50 and p99 of nanoseconds, as text."""
    return f"{percentile(values, 50) / 1e6:.2f} / {percentile(values, 99) / 1e6:.2f} ms"
