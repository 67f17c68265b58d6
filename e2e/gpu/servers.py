"""Shows on a real GPU what a quota costs a server of a language model, and two servers beside each other.

usage: servers.py ARCHIVE [--seconds N] [--pairs N]

ARCHIVE is the output of `cargo e2e pack`. Needs root, an NVIDIA driver and a Python with torch and transformers; no
network. The script starts a cluster of one node with Bursar. One server, and two at the same time, compute in pods and
directly on the machine by turns. At last a pod beside both servers allocates until it is refused. The script prints one
table, and exits with 1 if a row fails.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import image
from cluster import PYTHON, REFERENCE, Cluster, pod
from comparison import Comparison, child
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
QUOTA = 12
# The time from the start of a server to its first request.
START = 20
# The least part of the tokens that servers in pods make.
LEAST = 0.97


class Servers:
    """Runs servers in pods and directly on the machine."""

    def __init__(self, cluster, programs, seconds):
        self.cluster, self.programs, self.seconds = cluster, programs, seconds
        self.number = 0

    def command(self, begin, folder):
        return [PYTHON, f"{folder}/serve.py", str(self.seconds), "--begin", str(begin)]

    def native(self, count):
        """Returns the answers of `count` servers that run directly on the machine at the same time."""
        begin = time.time() + START
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        answers = []
        with contextlib.ExitStack() as children:
            command = self.command(begin, self.programs)
            servers = [children.enter_context(child(command, **output)) for _ in range(count)]
            for server in servers:
                output, failure = server.communicate(timeout=START + self.seconds + 60)
                if server.returncode != 0:
                    raise RuntimeError(failure[-800:])
                answers.append(json.loads(output.splitlines()[-1]))
        return answers

    def start(self, count):
        """Starts `count` servers in pods, and returns the pods' names."""
        begin, names = time.time() + START, []
        for _ in range(count):
            names.append(f"server-{self.number}")
            self.number += 1
            self.cluster.apply(pod(names[-1], QUOTA, self.command(begin, "/programs"), self.programs))
        return names

    def finish(self, names):
        """Returns the answers of the pods."""
        answers = []
        for name in names:
            phase, answer, log = self.cluster.answer(name, START + self.seconds + 60)
            if phase != "Succeeded" or answer is None:
                raise RuntimeError(f"{phase}: {log[-800:]}")
            self.cluster.kubectl("delete", "pod", name, "--now", "--wait=true")
            answers.append(answer)
        return answers


def wrong(answers):
    """Returns what is wrong with the answers of servers, or None."""
    return next((f"{answer['wrong']} wrong answers" for answer in answers if answer["wrong"]), None)


def tokens(answers):
    """Returns the tokens a second of all servers together."""
    return sum(answer["tokens_per_s"] for answer in answers)


def shown(answers):
    """Formats the answers as a cell."""
    return "; ".join(f"{answer['tokens_per_s']} tokens/s, p50 {answer['p50_ms']} ms, p99 {answer['p99_ms']} ms" for answer in answers)


def by_turns(table, servers, count, pairs):
    """Runs servers natively and in pods by turns, and adds the ratio of their tokens a second."""
    name = "one server" if count == 1 else f"{count} servers at the same time"

    def side(title, run):
        def answered():
            answers = run()
            table.add(f"{name}, {title}", shown(answers), wrong=wrong(answers))
            return {"tokens/s": tokens(answers)}

        return answered

    native = side("without Bursar", lambda: servers.native(count))
    bound = side(f"in pods of {QUOTA} GiB", lambda: servers.finish(servers.start(count)))
    ratio = Comparison(name, pairs).take(native, bound).ratio("tokens/s")
    table.add(f"{name}: tokens/s in pods over without Bursar", ratio, **ratio.at_least(LEAST))


def main():
    """Runs all rows, and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    table = Table("what", "measured")
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        programs = os.path.join(scratch, "programs")
        os.mkdir(programs)
        for name in "serve.py", "quota.py":
            shutil.copy(os.path.join(HERE, "programs", name), programs)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            table.say("the cluster is up")
            servers = Servers(cluster, programs, arguments.seconds)
            for count in 1, 2:
                by_turns(table, servers, count, arguments.pairs)
            names = servers.start(2)
            cluster.apply(pod("greedy", 4, [PYTHON, "/programs/quota.py", "torch"], programs))
            answers = servers.finish(names)
            phase, greedy, log = cluster.answer("greedy", 60)
            table.add("two servers beside a greedy pod", shown(answers), wrong=wrong(answers))
            refused = phase == "Succeeded" and greedy is not None and greedy["got_mib"] <= 4096
            table.add("the greedy pod of 4 GiB", json.dumps(greedy), wrong=None if refused else f"{phase}: {log[-800:]}")
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
