"""Shows on a real GPU the cost of retained memory, and that it survives faults and kills.

usage: retained.py PROGRAMS [--gpu UUID] [--rounds N] [--gib N] [--python PATH] [--against EARLIER]
                   [--only lease against faults kills scrub-check example]

PROGRAMS is a folder with bursar-fdstore, bursar-provisioner, fake_agent, retained and the wheel of the package bursar;
docs/internals/benchmarks.md describes how to make it. EARLIER is such a folder of an earlier commit, whose programs may have their
names of today only: `against` lets the leases of both take turns. Needs an NVIDIA driver, and for `example` a Python with torch; no network,
no root, no cluster: fake_agent acts for the agent, with the real fd store and provisioner. The script prints one table,
and exits with 1 if a row fails.
"""

import argparse
import contextlib
import glob
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile

from comparison import ratio_of
from table import Table, milliseconds, percentile

GIB = 1 << 30
# The goals of rows in milliseconds. The first is that of a lease of 64 GiB.
LEASE_BEYOND_DRIVER = 0.65
FIRST_KERNEL_P99 = 400.0
# The most that a lease may take of its time in the earlier commit.
AGAINST = 1.03
FAULTS = ("fault", "trap", "misaligned")
STEPS = ("exec", "init", "context", "attach", "verify", "whole")
TORCH = "/opt/torch/.venv/bin/python3"


class Machine:
    """The programs and their environment: a fd store, a provisioner, and a substitute for the agent."""

    def __init__(self, programs, gpu):
        self.programs = os.path.abspath(programs)
        self.gpu = gpu
        self.socket = None

    def program(self, name):
        """Returns a program's path."""
        return os.path.join(self.programs, name)

    @contextlib.contextmanager
    def fake_agent(self):
        """Runs fd store, provisioner and fake agent; clients connect to `socket`."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
            fd_store = os.path.join(folder, "fdstore")
            running.enter_context(ended(subprocess.Popen([self.program("bursar-fdstore"), fd_store], stderr=subprocess.DEVNULL)))
            wait_for(fd_store, "*.sock")
            self.socket = os.path.join(folder, "agent.sock")
            command = [self.program("fake_agent"), self.socket, fd_store, self.program("bursar-provisioner"), self.gpu]
            agent = running.enter_context(ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            if agent.stdout.readline() != "ready\n":
                raise RuntimeError("the fake agent did not start")
            yield

    def lines(self, *arguments):
        """Runs `retained` to its end, and returns its output lines."""
        command = [self.program("retained"), *map(str, arguments)]
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        return [json.loads(line) for line in output.splitlines()]

    def start(self, *arguments):
        """Starts `retained` for a dialogue."""
        command = [self.program("retained"), *map(str, arguments)]
        return Talker(subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


class Talker:
    """A process that answers each line with a line of JSON."""

    def __init__(self, process):
        self.process = process

    def hear(self):
        """Returns the next line."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with {self.process.wait()}")
        return json.loads(line)

    def say(self, line):
        """Sends a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        """Closes the input, waits for the exit, and returns the last line."""
        output, _ = self.process.communicate(timeout=60)
        return [json.loads(line) for line in output.splitlines()]


@contextlib.contextmanager
def ended(process):
    """A process that ends with the block."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(folder, pattern):
    """Waits until a server listens at a socket whose name matches."""
    deadline = time.monotonic() + 10
    while True:
        for path in glob.glob(os.path.join(folder, pattern)):
            with socket.socket(socket.AF_UNIX) as client:
                if client.connect_ex(path) == 0:
                    return
        if time.monotonic() > deadline:
            raise RuntimeError(f"no server listens at {folder}/{pattern}")
        time.sleep(0.01)


def lease(machine, table, options):
    """Measures the cost of a lease beyond the driver's calls, and the kernel's minimum to wake two processes."""
    woken = [row["ns"] for row in machine.lines("wakes", 20)]
    table.add("(b) a connection, two that sleep, and back", milliseconds(woken), "")
    for gib in options.sizes:
        with machine.fake_agent():
            rounds = machine.lines("lease", machine.socket, gib * GIB, 30)
        bare = [row["bare_ns"] for row in rounds]
        leases = [row["lease_ns"] for row in rounds]
        beyond = [lease - bare for lease, bare in zip(leases, bare)]
        table.add(f"(b) {gib} GiB: cuMemCreate and map", milliseconds(bare), "")
        table.add(f"(b) {gib} GiB: lease and map, by turns", milliseconds(leases), "")
        late = gib == 64 and statistics.median(beyond) > LEASE_BEYOND_DRIVER * 1e6
        wanted = f"p50 <= {LEASE_BEYOND_DRIVER} ms" if gib == 64 else ""
        table.add(f"(b) {gib} GiB: the lease's time beyond the driver's", milliseconds(beyond), wanted, wrong=late)


def against(machine, table, options):
    """Compares leases with those of an earlier commit, by turns."""
    if options.earlier is None:
        raise RuntimeError("failed to compare leases: no --against; pass the programs of an earlier commit")
    machines = [machine, options.earlier]
    for gib in options.sizes:
        times = [[], []]
        for turn in range(options.turns):
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                with machines[place].fake_agent():
                    rounds = machines[place].lines("lease", machines[place].socket, gib * GIB, 30)
                times[place].append(statistics.median(row["lease_ns"] for row in rounds))
        ratio = ratio_of(times[1], times[0], options.turns)
        now, earlier = (statistics.median(side) / 1e6 for side in times)
        title, text = f"(b) {gib} GiB: lease, against the earlier commit", f"{ratio}; medians {now:.3f} and {earlier:.3f} ms"
        table.add(title, text, f"<= {AGAINST}", **ratio.at_most(AGAINST))


def images(machine, table, options, name, orders):
    """Ends images of a process repeatedly in one way, and reads what the next image finds."""
    size = options.gib * GIB
    with machine.fake_agent():
        neighbour = machine.start("neighbour", min(size, GIB))
        neighbour.hear()
        client = machine.start("image", machine.socket, size)
        checksum = client.hear()["checksum"]
        found = []
        for order in orders:
            client.say(order)
            if order == "kill":
                since = time.monotonic_ns()
                client.process.wait()
                client = machine.start("image", machine.socket, size, since)
            found.append(client.hear())
        client.end()
        beside = neighbour.end()[-1]
    wrong = sum(not row["found"] or row["checksum"] != checksum for row in found)
    table.add(f"(c) {name}: images that found {options.gib} GiB as committed", f"{len(found) - wrong} of {len(found)}", "all", wrong=wrong > 0)
    for step in STEPS:
        times = [row[f"{step}_ns"] for row in found]
        whole = step == "whole"
        late = whole and percentile(times, 99) > FIRST_KERNEL_P99 * 1e6
        wanted = f"p99 <= {FIRST_KERNEL_P99:.0f} ms" if whole else ""
        what = "to the first correct kernel" if whole else step
        table.add(f"(c) {name}: {what}", milliseconds(times), wanted, wrong=late)
    text = f"{beside['errors']} errors in {beside['rounds']}, slowest {beside['slowest_ns'] / 1e6:.1f} ms"
    table.add(f"(c) {name}: a neighbour's checksums", text, "0 errors", wrong=beside["errors"] > 0 or beside["rounds"] == 0)


def faults(machine, table, options):
    """Answers real faults by an exec of the same program, as the shim does."""
    images(machine, table, options, "faults", [options.faults[round_ % len(options.faults)] for round_ in range(options.rounds)])


def kills(machine, table, options):
    """Answers SIGKILLs by a new process."""
    images(machine, table, options, "SIGKILLs", ["kill"] * options.rounds)


def scrub_check(machine, table, options):
    """Checks that the driver clears freed memory before another tenant gets it."""
    command = [machine.program("bursar-provisioner"), "scrub-check", "--gpu", machine.gpu]
    output = subprocess.run(command, check=True, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout
    # The first line reports that the process has a context, for the agent to measure.
    verdict = json.loads(output.splitlines()[-1])
    table.add("(d) the scrub check's verdict", json.dumps(verdict), "Scrubbed", wrong=verdict["verdict"] != "Scrubbed")
    tenants = [machine.start("tenant", options.sizes[0] * GIB) for _ in range(2)]
    for tenant in tenants:
        tenant.hear()
    dirty = 0
    for round_ in range(10 * options.rounds):
        tenant = tenants[round_ % 2]
        tenant.say("next")
        dirty += not tenant.hear()["clean"]
    for tenant in tenants:
        tenant.end()
    what = f"(d) rounds of {options.sizes[0]} GiB between two tenants with an old word"
    table.add(what, f"{dirty} of {10 * options.rounds}", "0", wrong=dirty > 0)


def example(machine, table, options):
    """Runs the Python example under PyTorch across SIGKILL and an illegal address."""
    here = os.path.dirname(os.path.abspath(__file__))
    program = os.path.join(here, "../../device-plugin/runtime/python/examples/transformer.py")
    wheels = glob.glob(machine.program("bursar-*.whl"))
    with tempfile.TemporaryDirectory() as site, machine.fake_agent():
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(site)
        runs = []
        for then in ("kill", "fault", "exit"):
            command = [options.python, program, "--socket", machine.socket, "--then", then]
            environment = os.environ | {"PYTHONPATH": site}
            output = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, env=environment)
            runs.append([output.returncode] + [json.loads(line) for line in output.stdout.splitlines()])
    first, second, third = (run[1] for run in runs)
    same = len({run["answer"] for run in (first, second, third)}) == 1
    ways = [run["found"] for run in (first, second, third)] == [False, True, True]
    table.add("(f) weights found after SIGKILL, after a fault", f"{second['found']}, {third['found']}", "both", wrong=not ways)
    table.add("(f) the same answer to the bit, weights tied", f"{same}, {third['tied']}", "both", wrong=not (same and third["tied"]))
    views = [run["views"] for run in (first, second, third)]
    table.add("(f) views as they were made: committed, found, found", str(views), "all", wrong=not all(views))
    ended_as = (runs[0][0], runs[1][0])
    table.add("(f) a write to a retained weight", runs[1][-1].get("fault", "no fault")[:60], "a fault", wrong=ended_as != (-9, 3))
    for name, run in (("loaded and committed", first), ("attached", third)):
        text = f"{run['weights_ms']} ms of {run['mib']} MiB, context {run['context_ms']} ms"
        table.add(f"(f) weights {name}", text, "")


@contextlib.contextmanager
def executable(programs, gpu):
    """Copies the programs of a folder; copies are executable, even if the transfer has lost the modes."""
    with tempfile.TemporaryDirectory() as folder:
        for name in os.listdir(programs):
            shutil.copy(os.path.join(programs, name), folder)
            os.chmod(os.path.join(folder, name), 0o755)
        yield Machine(folder, gpu)


PARTS = {"lease": lease, "against": against, "faults": faults, "kills": kills, "scrub-check": scrub_check, "example": example}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs")
    parser.add_argument("--gpu", help="its UUID; the first that nvidia-smi lists")
    parser.add_argument("--rounds", type=int, default=100, help="faults, kills, and a tenth of the scrub check's rounds")
    parser.add_argument("--gib", type=int, default=40, help="how much is retained across faults and kills")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="GiB of the leases that are timed")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--python", default=TORCH if os.path.exists(TORCH) else sys.executable)
    parser.add_argument("--against", metavar="EARLIER", help="the folder of an earlier commit")
    parser.add_argument("--turns", type=int, default=8, help="of the comparison with an earlier commit")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "against"])
    options = parser.parse_args()
    if options.gpu is None:
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        options.gpu = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split()[0]
    with contextlib.ExitStack() as folders:
        machine = folders.enter_context(executable(options.programs, options.gpu))
        options.earlier = options.against and folders.enter_context(executable(options.against, options.gpu))
        table = Table("what", "measured", "wanted")
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
        for part in options.only:
            PARTS[part](machine, table, options)
    sys.exit(table.show())


if __name__ == "__main__":
    main()
