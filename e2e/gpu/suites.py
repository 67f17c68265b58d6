"""Compares on a real GPU the outcomes of public test suites in a pod with those on the machine itself.

usage: suites.py ARCHIVE FOLDER [--only SUITE ...] [--rounds N] [--workers N] [--seconds N] [--environment NAME=VALUE]
                 [--beside SECONDS]
       suites.py native FOLDER ...

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver and gcc, and a Python with cupy, numba-cuda,
pytest, pytest-xdist and pytest-benchmark; no network. The caller fills FOLDER, and nothing of it belongs to Bursar:

    cupy/         `tests` and `pyproject.toml` of cupy's source distribution, of the version that is installed
    numba-cuda/   `testing` of NVIDIA/numba-cuda; the tests are in its wheel
    rmm/          `python/rmm/rmm/tests` of rapidsai/rmm, of the version of the wheels
    hami-core/    `src` and `test` of Project-HAMi/HAMi-core, and its commit in `VERSION`
    site/         installed by `pip install --no-deps --target`: rmm-cu13, librmm-cu13, rapids-logger, filecheck
    numpy/        installed likewise for numba-cuda alone: numpy 2.3, where the Python has a newer one

The script runs each suite as its authors wrote it, on the machine first and then in pods, and compares the outcome of
each test. No cluster runs beside the first half, because the audit reports programs of the machine that use its GPUs.
With `native` the script ends after that half. With `--beside` a pod replays captured graphs for SECONDS beside the
second one. The script prints each suite's version and one table. It exits with 1 if an outcome differs, if a suite
has no tests, or for a finding, and with 2 without the archive or for an empty folder.
"""

import argparse
import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

import image
from cluster import CUDA, FINDINGS, PYTHON, REFERENCE, Cluster, pod
from comparison import child
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
QUOTA_GIB = 32
# A test's outcome by the element of its JUnit report; one without these passed.
NOT_PASSED = ("failure", "error", "skipped")
Suite = collections.namedtuple("Suite", "name version command folder")


def pytest(options, *arguments):
    """Returns the command of a suite that pytest runs; it writes its report to the variable REPORT."""
    workers = f"-n {options.workers}" if options.workers else ""
    return f"{PYTHON} -m pytest -q -p no:cacheprovider {workers} --junitxml=$REPORT {' '.join(arguments)}"


def suites(options, programs):
    """Returns the suites: what each prints as its version, and its command."""
    cupy, numba, rmm, hami = (f"{options.folder}/{name}" for name in ("cupy", "numba-cuda", "rmm", "hami-core"))
    for part in "cuda_tests", "core_tests":
        tests = f"{cupy}/tests/cupy_tests/{part}"
        command = pytest(options, "-c", f"{cupy}/pyproject.toml", "-m", "'not slow'", tests)
        yield Suite(f"cupy {part}", module_version("cupy"), f"cd /tmp && {command}", tests)
    tests = f"{numba}/testing"
    # A class's tests stay together, as the suite demands. Its conftest.py lies beside no test, so it is loaded as a
    # plugin, and once. The suite makes an error of a warning of NumPy 2.5.
    loaded = "-p", "conftest", "--noconftest"
    numpy = f"export PYTHONPATH={options.folder}/numpy:$PYTHONPATH"
    command = f"{numpy}; cd {tests} && {pytest(options, *loaded, '--dist', 'loadscope')}"
    yield Suite("numba-cuda", f"{numpy.replace('export ', '')} {module_version('numba_cuda')}", command, tests)
    tests = f"{rmm}/python/rmm/rmm/tests"
    yield Suite("rmm", module_version("rmm"), f"cd /tmp && {pytest(options, tests)}", tests)
    run = f"for one in {programs}/hami/*; do timeout 60 $one > /dev/null 2>&1; echo $(basename $one) $?; done > $REPORT"
    yield Suite("hami-core", f"cat {hami}/VERSION", run, f"{hami}/test")


def module_version(module):
    """Returns the command that prints a Python module's version."""
    return f"{PYTHON} -c 'import {module}; print({module}.__version__)'"


def compile_hami(folder, into):
    """Builds HAMi-core's test programs, as its own CMakeLists.txt does."""
    os.makedirs(f"{into}/hami")
    for name in sorted(os.listdir(f"{folder}/test")):
        program, kind = os.path.splitext(name)
        # One program allocates until it is killed, and one needs several GPUs.
        if kind not in (".c", ".cu") or program in ("test_alloc_hold", "test_multi_gpu_utilization"):
            continue
        compiler = ["gcc", "-w"] if kind == ".c" else [f"{CUDA}/bin/nvcc", "-w"]
        source = [f"{folder}/test/{name}", "-o", f"{into}/hami/{program}", f"-I{folder}/src", f"-I{CUDA}/include"]
        link = [f"-L{CUDA}/lib64", f"-L{CUDA}/lib64/stubs", "-lnvidia-ml", "-lcuda", "-lcudart", "-lpthread", "-lrt"]
        subprocess.run([*compiler, *source, *link], check=True)


def outcomes(report):
    """Returns the outcome of each test of a report: JUnit's, or lines of a program and its exit code."""
    if not os.path.exists(report):
        return {}
    with open(report) as file:
        text = file.read()
    if not text.startswith("<"):
        return {program: "passed" if code == "0" else f"exit {code}" for program, code in map(str.split, text.splitlines())}
    found = {}
    for case in xml.fromstring(text).iter("testcase"):
        kinds = [kind for kind in NOT_PASSED if case.find(kind) is not None]
        found[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def count(found):
    """Describes outcomes by their numbers."""
    kinds = collections.Counter(found.values())
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items(), key=lambda item: -item[1])) or "no tests"


class Runner:
    """Runs suites on the machine and in pods, with the same command and the same paths."""

    def __init__(self, options, scratch):
        self.options, self.scratch, self.cluster, self.number = options, scratch, None, 0

    def variables(self, report):
        path = os.pathsep.join(filter(None, [f"{self.options.folder}/site", os.environ.get("PYTHONPATH")]))
        # One cache for all runs, because a run without one compiles for minutes.
        cache = f"{self.scratch}/reports/cache"
        fixed = {"REPORT": report, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "CUPY_CACHE_DIR": cache}
        # A suite looks for the compiler in these variables first. A pod's PATH does not have the compiler's folder.
        fixed |= {"CUDA_PATH": CUDA, "CUDA_HOME": CUDA}
        return fixed | dict(pair.split("=", 1) for pair in self.options.environment)

    def run(self, suite, in_pod):
        """Runs a suite once. Returns its outcomes, the seconds that it took and the end of its output."""
        self.number += 1
        report = f"{self.scratch}/reports/{self.number}.xml"
        command = ["bash", "-c", f"echo version $({suite.version} 2>&1 | tail -1); {suite.command} 2>&1"]
        begun = time.monotonic()
        output = (self._in_pod if in_pod else self._native)(command, self.variables(report))
        return outcomes(report), time.monotonic() - begun, output

    def _native(self, command, variables):
        with tempfile.TemporaryFile("w+") as output:
            with child(command, env=os.environ | variables, stdout=output) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.options.seconds)
            output.seek(0)
            return output.read()

    def _in_pod(self, command, variables):
        name = f"suite-{self.number}"
        manifest = pod(name, QUOTA_GIB, command, f"{self.scratch}/programs", variables.items())
        for number, path in enumerate((self.options.folder, f"{self.scratch}/reports", f"{self.scratch}/programs")):
            mount = {"name": f"suite-{number}", "mountPath": path}
            manifest["spec"]["containers"][0]["volumeMounts"].append(mount)
            manifest["spec"]["volumes"].append({"name": mount["name"], "hostPath": {"path": path, "type": "Directory"}})
        self.cluster.apply(manifest)
        log = self.cluster.answer(name, self.options.seconds)[2]
        self.cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
        return log


def differences(native, in_pod):
    """Returns the tests whose outcomes on the machine and in the pod differ, with both."""
    names = sorted(native.keys() | in_pod.keys())
    return [f"{name}: {native.get(name)}, {in_pod.get(name)}" for name in names if native.get(name) != in_pod.get(name)]


def outcomes_of(runner, suite, in_pod, table):
    """Runs a suite. Returns its version, the outcome of each test, and the seconds of each run."""
    found, version, times = {}, "unknown", []
    for _ in range(runner.options.rounds):
        once, seconds, output = runner.run(suite, in_pod)
        version = next((line[8:] for line in output.splitlines() if line.startswith("version ")), version)
        table.say(f"{suite.name} {version}, {'pod' if in_pod else 'native'}: {count(once)}, {seconds:.0f} s")
        times.append(f"{seconds:.0f}")
        if not once or runner.options.tail:
            print(output[-3000:], flush=True)
        # A test that has two outcomes on the machine has both there, in either order.
        for name, outcome in once.items():
            found[name] = "+".join(sorted({*found.get(name, outcome).split("+"), outcome}))
    return version, found, " ".join(times)


def compare(runner, native, table):
    """Runs the suites in pods, and adds a row for each that compares it with the machine's runs."""
    beside = runner.options.beside
    if beside:
        runner.cluster.replay_graphs(beside)
    for suite, (version, expected, before) in native.items():
        _, found, after = outcomes_of(runner, suite, True, table)
        different = differences(expected, found)
        print("\n".join(different), flush=True)
        wrong = f"{len(different)} differ: {'; '.join(different[:8])}" if different else None
        shown = count(expected), count(found), f"{before}; {after}"
        table.add(suite.name, version, *shown, wrong=wrong if expected else "no tests")
    if beside:
        answer, wrong = runner.cluster.replayed_graphs(beside)
        table.add("captured graphs", "", "", answer, beside, wrong=wrong)
    findings = runner.cluster.findings(reasons=(*FINDINGS, "GpuQuotaNotEnforced"))
    table.add("findings", "", "", len(findings), "", wrong=str(findings) if findings else None)


def parse(arguments=None):
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive")
    parser.add_argument("folder")
    parser.add_argument("--only", nargs="+", help="suites by name")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6, help="processes of a suite; 0 runs it in one")
    parser.add_argument("--seconds", type=int, default=600, help="the longest time of one run")
    parser.add_argument("--beside", type=int, default=0, help="seconds for which a pod replays graphs in the meantime")
    parser.add_argument("--environment", nargs="+", default=[], metavar="NAME=VALUE", help="variables of all suites")
    parser.add_argument("--tail", action="store_true", help="print the end of each output")
    options = parser.parse_args(arguments)
    options.folder = os.path.abspath(options.folder)
    return options


def prepare(options, scratch):
    """Returns the wanted suites, with their programs compiled; None where the archive or tests are missing."""
    programs = f"{scratch}/programs"
    os.chmod(scratch, 0o755)
    os.makedirs(f"{scratch}/reports")
    os.makedirs(programs, exist_ok=True)
    wanted = [suite for suite in suites(options, programs) if not options.only or suite.name in options.only]
    empty = [suite.folder for suite in wanted if not os.path.isdir(suite.folder) or not os.listdir(suite.folder)]
    if options.archive != "native" and not os.path.isfile(options.archive):
        print(f"failed to read {options.archive}: no such file; make it by `cargo e2e pack`", file=sys.stderr)
        return None
    if empty or not wanted:
        print(f"failed to find tests: {', '.join(empty) or 'no such suite'}; fill the folder first", file=sys.stderr)
        return None
    if any(suite.name == "hami-core" for suite in wanted):
        compile_hami(f"{options.folder}/hami-core", programs)
    return wanted


def main():
    """Runs all suites, and returns the exit code."""
    options, table = parse(), Table("suite", "version", "native", "in a pod", "seconds")
    with tempfile.TemporaryDirectory() as scratch:
        wanted = prepare(options, scratch)
        if wanted is None:
            return 2
        runner = Runner(options, scratch)
        native = {suite: outcomes_of(runner, suite, False, table) for suite in wanted}
        if options.archive == "native":
            for suite, (version, found, seconds) in native.items():
                table.add(suite.name, version, count(found), "not run", seconds, wrong=None if found else "no tests")
            return table.show()
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(options.archive), scratch) as runner.cluster:
            runner.cluster.load(archive)
            runner.cluster.kill_findings()
            compare(runner, native, table)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
