"""Shows on a real GPU that vLLM serves under a quota as on a GPU of that size, what this costs, and how soon it is back.

usage: serve_vllm.py ARCHIVE SITE WHEEL [--work FOLDER] [--only quota|cost|examples|recovery|in-place...] [--seconds N] [--beside N] [--turns N]

ARCHIVE is the output of `cargo e2e pack`, SITE a folder with vLLM and the packages of serve_vllm.txt, WHEEL the package
bursar. Needs root, an NVIDIA driver, and a Python with torch and transformers; no network. The model is a Llama of 1.2
billion random weights, which the script makes once in FOLDER together with a tokenizer. Servers run in pods of a
cluster of one node with Bursar, whose audit kills, and directly on the machine. `examples` applies the
Deployments of docs/use/examples/vllm-two-models.yaml, with this machine's image, model and files. Each part prints its table, and the
script exits with 1 if a row fails. After N seconds what is left is not run, and fails. With `--beside` a pod replays captured
graphs for N seconds beside the servers, and the script waits for its end.

The file is not called vllm.py, since other scripts of this folder import vLLM.
"""

import argparse
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile

import image
from cluster import FINDINGS, PYTHON, REFERENCE, RESOURCE, Cluster, pod
from comparison import ratio_of
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = "vllm_model.py", "vllm_client.py", "vllm_extension.py", "vllm_in_place.py", "greedy.py"
GIB, MIB_OF_GIB = 1 << 30, 1024
# The quotas in GiB of a server alone and of one among several.
QUOTA, SHARE = 24, 16
UTILIZATION = 0.9
# The bounds in seconds of a start with an empty cache, and of one with vLLM's compiled graphs.
COLD, WARM = 240, 150
SLEEPS = 20
# The seconds for which a greedy neighbour allocates.
GREEDY = 12
LEAST, MOST = 0.99, 1.01
# Lines of vLLM's log.
KV_CACHE = r"Available KV cache memory: (-?[\d.]+) GiB"
KV_TOKENS = r"GPU KV cache size: ([\d,]+) tokens"
GRAPHS = r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB"
FROM_DISK = "Loading weights took"
TOO_FULL = r"Free memory on device .*/([\d.]+) GiB\) on startup is less than desired GPU memory utilization"
TOO_LONG = r"To serve at least one request with the model's max seq len|No available memory for the cache blocks"
NOT_RETAINED = r"failed to retain|weights are not retained|loaded without retained memory|cannot be attached"


class Failure(RuntimeError):
    """A server did not do what it should, with the end of its log."""


class Bench:
    """The folders, the cluster, and the time that is left."""

    def __init__(self, cluster, site, work, deadline):
        self.cluster, self.site, self.work, self.deadline = cluster, site, work, deadline
        self.model = os.path.join(work, "model/plain")
        self.quantized = os.path.join(work, "model/fp8")
        self.number = 0

    def bound(self, seconds):
        """Returns a wait of at most these seconds that ends before the deadline."""
        if self.left() < 1:
            raise Failure("no time was left")
        return min(seconds, self.left())

    def left(self):
        """Returns the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def name(self, prefix):
        """Returns a name for the next server."""
        self.number += 1
        return f"{prefix}-{self.number}"

    def environment(self, cache, bursar=False):
        """Returns the variables of a server: no network, no optional packages, and a cache that servers share."""
        path = [f"{self.work}/programs", *([f"{self.work}/bursar"] if bursar else []), self.site]
        return {
            "PYTHONPATH": ":".join(path),
            "PYTHONUNBUFFERED": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "VLLM_CACHE_ROOT": f"{cache}/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
        }

    def command(self, port, utilization, *more, model=None):
        """Returns the command of a server."""
        options = {
            "--model": model or self.model,
            "--served-model-name": "model",
            "--host": "0.0.0.0",
            "--port": port,
            "--max-model-len": 4096,
            "--max-num-seqs": 64,
            "--max-num-batched-tokens": 8192,
            "--gpu-memory-utilization": utilization,
            "--seed": 0,
            "--worker-extension-cls": "vllm_extension.Worker",
        }
        flat = [str(part) for option in options.items() for part in option]
        flags = ["--disable-uvicorn-access-log", "--no-enable-prefix-caching"]
        return [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flat, *flags, *map(str, more)]

    def manifest(self, name, gib, command, environment):
        """Makes a pod in which the folders have the same paths as on this machine."""
        manifest = pod(name, gib, command, f"{self.work}/programs", environment.items())
        (container,) = manifest["spec"]["containers"]
        for volume, path, read_only in ("site", self.site, True), ("work", self.work, False):
            container["volumeMounts"].append({"name": volume, "mountPath": path, "readOnly": read_only})
            manifest["spec"]["volumes"].append({"name": volume, "hostPath": {"path": path, "type": "Directory"}})
        return manifest

    def pod(self, name, gib, command, environment, restart="Never"):
        """Starts such a pod."""
        manifest = self.manifest(name, gib, command, environment)
        manifest["spec"]["restartPolicy"] = restart
        self.keep(f"{name}.json", json.dumps(manifest, indent=1))
        self.cluster.apply(manifest)

    def keep(self, name, text):
        """Writes a file for a later look."""
        with open(os.path.join(self.work, "logs", name), "w", encoding="utf-8") as file:
            file.write(text)


class Server:
    """A server, which a client asks over the network."""

    address, port, netns = "127.0.0.1", 8000, None

    def __init__(self, bench):
        self.bench = bench
        self.since = time.time()

    def fail(self, what):
        """Raises an error with the last lines of the log."""
        raise Failure(f"{what}\n" + "\n".join(self.log().splitlines()[-40:]))

    def client(self, *arguments):
        """Returns the command of a client."""
        netns = ["--netns", self.netns] if self.netns else []
        return [PYTHON, f"{self.bench.work}/programs/vllm_client.py", self.address, str(self.port), *netns, *map(str, arguments)]

    def ask(self, *arguments, bound=90):
        """Runs a client to its end, and returns its answer."""
        bound = self.bench.bound(bound)
        try:
            ran = subprocess.run(self.client(*arguments), text=True, capture_output=True, timeout=bound, check=False)
        except subprocess.TimeoutExpired:
            self.fail(f"{arguments} took more than {bound:.0f} s")
        if ran.returncode != 0:
            self.fail(f"{arguments}: {ran.stderr[-600:]}")
        return json.loads(ran.stdout.splitlines()[-1])

    def post(self, path, body=None, seconds=60):
        """Sends a request that has to succeed, and returns the response's text."""
        response = self.ask("post", path, json.dumps(body) if body else "", "--seconds", seconds, bound=seconds + 10)
        if response["status"] != 200:
            self.fail(f"{path}: {response}")
        return response["text"]

    def call(self, method, seconds=60):
        """Calls a method of vLLM's worker."""
        return json.loads(self.post("/collective_rpc", {"method": method}, seconds))["results"][0]

    def answer(self):
        """Returns the tokens of the fixed request."""
        response = self.ask("answer")
        if response["status"] != 200 or len(response["tokens"] or []) != 32:
            self.fail(f"no answer: {response}")
        return response["tokens"]

    def first(self, bound, since=None):
        """Waits for the first token, and returns the seconds from `since`, or from the start."""
        bound, since = self.bench.bound(bound), since or self.since
        client = subprocess.Popen(
            self.client("first", "--seconds", bound), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + bound + 5
        while client.poll() is None:
            if self.ended() or time.monotonic() > deadline:
                client.kill()
                client.wait()
                self.fail("the server ended" if self.ended() else f"no token after {bound:.0f} s")
            time.sleep(0.5)
        text = client.stdout.read()
        result = json.loads(text.splitlines()[-1]) if client.returncode == 0 else {"at": None, "failure": text[-600:]}
        if result["at"] is None:
            self.fail(f"no token after {bound:.0f} s: {result['failure']}")
        return result["at"] - since

    def found(self, pattern):
        """Returns a number of vLLM's log."""
        match = re.search(pattern, self.log())
        return float(match.group(1).replace(",", "")) if match else None


class Native(Server):
    """A server that runs directly on this machine."""

    def __init__(self, bench, port, utilization, *more):
        super().__init__(bench)
        self.port = port
        self.path = os.path.join(bench.work, "logs", bench.name("native") + ".log")
        environment = os.environ | bench.environment(f"{bench.work}/cache")
        with open(self.path, "wb") as out:
            self.process = subprocess.Popen(
                bench.command(port, utilization, *more),
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self):
        return self.process.poll() is not None

    def log(self):
        with open(self.path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pod(Server):
    """A server that runs in a pod."""

    def __init__(self, bench, name):
        super().__init__(bench)
        self.cluster = bench.cluster
        # The expected number of the container's restarts.
        self.pod, self.expected = name, 0
        with open(os.path.join(os.path.dirname(self.cluster.kubeconfig), "pid"), encoding="ascii") as file:
            self.netns = f"/proc/{file.read().strip()}/ns/net"
        deadline = time.monotonic() + bench.bound(60)
        while not (address := self.field("{.status.podIP}")):
            if time.monotonic() > deadline:
                self.fail(f"no address:\n{self.cluster.kubectl('describe', 'pod', self.pod, check=False)[-1500:]}")
            time.sleep(0.2)
        self.address = address

    @classmethod
    def start(cls, bench, gib, utilization, *more, cache=None, bursar=False, restart="Never", model=None):
        """Starts a pod with a server."""
        name = bench.name("server")
        environment = bench.environment(cache or f"{bench.work}/cache", bursar)
        bench.pod(name, gib, bench.command(cls.port, utilization, *more, model=model), environment, restart)
        return cls(bench, name)

    def field(self, path):
        """Returns a field of the pod."""
        return self.cluster.kubectl("get", "pod", self.pod, "--output", f"jsonpath={path}", check=False)

    def ended(self):
        return self.field("{.status.phase}") in ("Failed", "Succeeded") or self.restarts() > self.expected

    def log(self):
        """Returns the log of the container, of its previous run if it ended unexpectedly."""
        previous = ["--previous"] if self.restarts() > self.expected else []
        return self.cluster.kubectl("logs", self.pod, *previous, check=False, stderr=subprocess.STDOUT)

    def restarts(self):
        """Returns how often the kubelet restarted the container."""
        return int(self.field("{.status.containerStatuses[0].restartCount}") or 0)

    def end(self):
        self.bench.keep(f"{self.pod}.log", self.log())
        self.cluster.kubectl(
            "delete", "pod", self.pod, "--now", "--wait=true", "--timeout=30s", check=False, stderr=subprocess.STDOUT
        )

    def kill(self):
        """Ends the container's main process by SIGKILL, and returns the clock time."""
        uid = self.field("{.metadata.uid}") or "no uid"
        for status in glob.glob("/proc/[0-9]*/status"):
            folder = os.path.dirname(status)
            with contextlib.suppress(OSError):
                with open(f"{folder}/cgroup", encoding="ascii") as file:
                    cgroup = file.read()
                with open(f"{folder}/cmdline", "rb") as file:
                    command = file.read()
                with open(status, encoding="utf-8", errors="replace") as file:
                    pids = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
                ours = uid in cgroup or uid.replace("-", "_") in cgroup
                if ours and pids[-1:] == ["1"] and b"python" in command:
                    at = time.time()
                    os.kill(int(pids[0]), signal.SIGKILL)
                    return at
        return self.fail("the main process was not found")

    def fault(self):
        """Makes the worker write to an address that is not mapped, and returns the clock time."""
        at = time.time()
        poster = self.client("post", "/collective_rpc", json.dumps({"method": "bursar_fault"}), "--seconds", 5)
        # The server ends, perhaps before it answers.
        subprocess.run(poster, check=False, timeout=20, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return at


@contextlib.contextmanager
def ended(server):
    """A server that ends with the block."""
    try:
        yield server
    finally:
        server.end()


def gib(mib):
    """Formats MiB."""
    return f"{mib / MIB_OF_GIB:.2f} GiB"


def quota(bench, table):
    """Serves in a quota, sleeps and wakes, and is refused memory."""
    with ended(Pod.start(bench, QUOTA, UTILIZATION, "--enable-sleep-mode")) as server:
        took = server.first(COLD)
        table.add("the first token after the start of the pod, nothing compiled before", f"{took:.1f} s", "")
        awake = server.call("bursar_memory")
        wanted = f"{QUOTA} GiB"
        table.add(
            "GPU memory that vLLM's worker sees", gib(awake["total_mib"]), wanted, wrong=awake["total_mib"] != QUOTA * MIB_OF_GIB
        )
        cache, tokens, graphs = (server.found(pattern) for pattern in (KV_CACHE, KV_TOKENS, GRAPHS))
        most = QUOTA * UTILIZATION
        right = cache is not None and most - 8 < cache < most
        table.add("KV cache by vLLM's log", f"{cache} GiB, {tokens} tokens", f"{most - 8:.1f} to {most:.1f} GiB", wrong=not right)
        table.add("CUDA graphs by vLLM's log", f"{graphs} GiB", "captured", wrong=graphs is None)
        before = server.answer()
        refused = [
            (Pod.start(bench, QUOTA, 1.0, "--enforce-eager"), "gpu_memory_utilization 1.0", TOO_FULL),
            (
                Pod.start(bench, QUOTA, 0.2, "--max-model-len", 131072, "--enforce-eager"),
                "a KV cache for 131072 tokens in a fifth of the quota",
                TOO_LONG,
            ),
        ]
        load = server.ask("load", "--requests", 1000, "--at-once", 64, bound=120)
        cell = f"{load['answered']} of 1000, {load['tokens_per_s']} tokens/s, p50 {load['p50_ms']} ms, p99 {load['p99_ms']} ms"
        table.add(
            "requests answered, while two other servers start and fail",
            cell,
            "all",
            wrong=(load["failure"] or True) if load["answered"] != 1000 else None,
        )
        for other, what, pattern in refused:
            deadline = time.monotonic() + bench.bound(COLD)
            while not other.ended() and time.monotonic() < deadline:
                time.sleep(0.5)
            log = other.log()
            line = next((line for line in log.splitlines() if re.search(pattern, line)), None)
            wrong = None if line and other.ended() else "\n".join(log.splitlines()[-40:])
            table.add(f"{what}: vLLM's own error", (line or "none")[-260:], "and the server ends", wrong=wrong)
            total = other.found(TOO_FULL)
            if pattern == TOO_FULL:
                table.add(
                    "the size of the GPU in this error", f"{total} GiB", wanted, wrong=total is None or abs(total - QUOTA) > 0.1
                )
            other.end()
        full, most_left = server.call("bursar_fill"), (QUOTA - (cache or 0)) * MIB_OF_GIB
        wrong = not full["refused"] or "out of memory" not in full["refused"].lower() or full["got_mib"] > most_left
        table.add(
            "the worker allocates until it is refused",
            f"{gib(full['got_mib'])}, then: {full['refused'][:200]}",
            "PyTorch's OutOfMemoryError",
            wrong=wrong,
        )
        same = server.answer() == before
        table.add("the same answer after that", same, True, wrong=not same)
        sleeps(bench, table, server, before, (cache or 0) * MIB_OF_GIB)
        table.add("restarts of the server", server.restarts(), 0, wrong=server.restarts() != 0)
        findings = bench.cluster.findings(about=server.pod)
        table.add("findings about the server", len(findings), 0, wrong=str(findings) if findings else None)


def sleeps(bench, table, server, before, cache_mib):
    """Lets a server sleep and wake repeatedly."""
    asleep, awake, to_sleep, to_token, same = [], [], [], [], 0
    try:
        for _ in range(SLEEPS):
            at = time.monotonic()
            server.post("/sleep?level=1")
            to_sleep.append(time.monotonic() - at)
            asleep.append(server.call("bursar_memory")["free_mib"])
            at = time.time()
            server.post("/wake_up")
            to_token.append(server.first(30, at))
            awake.append(server.call("bursar_memory")["free_mib"])
            same += server.answer() == before
        failure = None
    except Failure as error:
        failure = str(error)
    wrong = failure or same != SLEEPS
    table.add("sleeps (level 1) after which the answer is the same", f"{same} of {SLEEPS}", "all", wrong=wrong or None)
    if not awake:
        return
    freed = min(asleep) - max(awake)
    cell = f"{gib(min(asleep))} to {gib(max(asleep))} asleep, {gib(min(awake))} to {gib(max(awake))} awake"
    wanted = "weights and KV cache freed, the same after each"
    wrong = freed < 0.95 * cache_mib or max(awake) - min(awake) > 512 or max(asleep) - min(asleep) > 512
    table.add("free memory", cell, wanted, wrong=wrong)
    table.add(
        "to sleep; from waking to the first token, median",
        f"{statistics.median(to_sleep):.2f} s; {statistics.median(to_token):.2f} s",
        "",
    )


def together(servers, bench, requests, seed):
    """Loads servers at the same time, and returns the figures of each."""
    bound = bench.bound(90)
    options = ["load", "--requests", requests, "--seed", seed]
    running = [
        subprocess.Popen(server.client(*options), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for server in servers
    ]
    results = []
    for server, client in zip(servers, running):
        try:
            out, failure = client.communicate(timeout=bound)
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            server.fail(f"{requests} requests took more than {bound:.0f} s")
        if client.returncode != 0:
            server.fail(failure[-600:])
        results.append(json.loads(out.splitlines()[-1]))
    return results


def figures(rows):
    """Formats the figures of turns: tokens a second of all servers together, and the median latencies."""
    tokens = statistics.median(sum(server["tokens_per_s"] for server in row) for row in rows)
    p50, p99 = (statistics.median(server[key] for row in rows for server in row) for key in ("p50_ms", "p99_ms"))
    return f"{tokens:.0f} tokens/s, p50 {p50:.0f} ms, p99 {p99:.0f} ms"


def unanswered(rows):
    """Returns the first failure of any request, or None."""
    return next(
        (
            server["failure"] or "a request was not answered"
            for row in rows
            for server in row
            if server["answered"] != server["requests"]
        ),
        None,
    )


def by_turns(bench, table, what, native, pods, requests, turns, reserve):
    """Loads servers natively and in pods by turns, and adds the ratios of their figures.

    There are fewer turns if only `reserve` seconds are left."""
    ours, theirs = [], []
    for turn in range(turns):
        if turn >= 2 and bench.left() < reserve:
            break
        # The second of two runs may be faster or slower, so the order changes.
        for servers, rows in ((native, theirs), (pods, ours))[:: -1 if turn % 2 else 1]:
            rows.append(together(servers, bench, requests, turn))
    table.add(f"{what} without Bursar", figures(theirs), "", wrong=unanswered(theirs))
    table.add(f"{what} in pods of {SHARE} GiB", figures(ours), "", wrong=unanswered(ours))
    sums = [[sum(server["tokens_per_s"] for server in row) for row in rows] for rows in (theirs, ours)]
    ratio = ratio_of(*sums)
    table.add(f"{what}: tokens/s in pods over without Bursar", ratio, f"{LEAST} to {MOST}", **ratio.at_least(LEAST))
    for key in "p50_ms", "p99_ms":
        sides = [[statistics.mean(server[key] for server in row) for row in rows] for rows in (theirs, ours)]
        table.add(f"{what}: {key[:3]} in pods over without Bursar", ratio_of(*sides), "")
    return ours


class GreedyPod:
    """A pod of 4 GiB that allocates in a loop until it is refused."""

    quota_mib = 4 * MIB_OF_GIB

    def __init__(self, bench):
        self.bench, self.pod = bench, bench.name("greedy")
        bench.pod(self.pod, 4, [PYTHON, f"{bench.work}/programs/greedy.py", str(GREEDY)], {})

    def log(self):
        return self.bench.cluster.kubectl("logs", self.pod, check=False, stderr=subprocess.DEVNULL)

    def running(self):
        return self.bench.cluster.kubectl("get", "pod", self.pod, "--output", "jsonpath={.status.phase}") == "Running"

    def answer(self):
        """Waits for its end, and returns its answer, or None after a failure."""
        phase, answer, _ = self.bench.cluster.answer(self.pod, self.bench.bound(60))
        return answer if phase == "Succeeded" else None


class GreedyProcess:
    """The same program directly on this machine."""

    quota_mib = None

    def __init__(self, bench):
        self.bench, self.path = bench, f"{bench.work}/logs/{bench.name('greedy')}.log"
        with open(self.path, "wb") as out:
            command = [PYTHON, f"{bench.work}/programs/greedy.py", str(GREEDY)]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def log(self):
        with open(self.path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def running(self):
        return self.process.poll() is None

    def answer(self):
        code = self.process.wait(self.bench.bound(60))
        return json.loads(self.log().splitlines()[-1]) if code == 0 else None


def beside_greedy(bench, table, native, pods, requests, both, turns=2):
    """Loads two servers while a program allocates in a loop: natively and in pods by turns."""
    rows = {GreedyProcess: [], GreedyPod: []}
    for turn in range(turns):
        for make in list(rows)[:: -1 if turn % 2 else 1]:
            greedy = make(bench)
            deadline = time.monotonic() + bench.bound(60)
            while "begun" not in greedy.log() and time.monotonic() < deadline:
                time.sleep(0.2)
            rows[make].append(together(native if make is GreedyProcess else pods, bench, requests, 50 + turn))
            still, answer, most = greedy.running(), greedy.answer(), greedy.quota_mib
            right = still and answer and (most is None or answer["got_mib"] <= most == answer["sees_mib"])
            where = "without Bursar" if most is None else f"in a pod of {most // MIB_OF_GIB} GiB"
            cell = json.dumps(answer)
            table.add(f"the program that allocates, {where}", cell, "its quota" if most else "", wrong=None if right else greedy.log()[-1500:])
    table.add("two servers beside it without Bursar", figures(rows[GreedyProcess]), "", wrong=unanswered(rows[GreedyProcess]))
    table.add("two servers beside it in pods", figures(rows[GreedyPod]), "all answered", wrong=unanswered(rows[GreedyPod]))
    native_sum, beside, alone = (
        statistics.median(sum(server["tokens_per_s"] for server in row) for row in part) for part in (*rows.values(), both)
    )
    table.add("tokens/s beside it: in pods over without Bursar", f"{beside / native_sum:.3f}", f">= {LEAST}", wrong=beside / native_sum < LEAST)
    table.add("tokens/s in pods: beside it over without it", f"{beside / alone:.3f}", "")


def cost(bench, table, turns):
    """Compares servers in pods with servers without Bursar, alone and together."""
    total = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.split()[0]
    share = round(SHARE * UTILIZATION * MIB_OF_GIB / int(total), 4)
    with contextlib.ExitStack() as running:
        native, pods, starts = [], [], []
        # vLLM fails if another process frees memory while it measures, so the native servers start one after the other.
        for number in range(2):
            native.append(running.enter_context(ended(Native(bench, 8100 + number, share))))
            starts.append(("without Bursar", native[-1].first(COLD)))
        pods += [running.enter_context(ended(Pod.start(bench, SHARE, UTILIZATION))) for _ in range(2)]
        starts += [(f"in a pod of {SHARE} GiB, two at the same time", server.first(COLD)) for server in pods]
        for where, took in starts:
            table.add(f"the first token after a start {where}", f"{took:.1f} s", "")
        caches = [server.found(KV_CACHE) for server in (*native, *pods)]
        table.add("KV caches without Bursar, and in pods", ", ".join(f"{cache} GiB" for cache in caches), "")
        # The first requests are slower, and decide the length of a turn.
        (result,) = together(native[:1], bench, 256, 100)
        together(pods[:1], bench, 256, 100)
        requests = max(128, min(4000, int(4 * result["tokens_per_s"] / 64)))
        by_turns(bench, table, "one server", native[:1], pods[:1], requests, turns, 150)
        both = by_turns(bench, table, "two servers at the same time", native, pods, requests // 2, turns, 60)
        beside_greedy(bench, table, native, pods, requests // 2, both)
        for server in pods:
            findings = bench.cluster.findings(about=server.pod)
            wrong = findings or server.restarts()
            table.add(
                f"findings and restarts of {server.pod}",
                f"{len(findings)}, {server.restarts()}",
                "0, 0",
                wrong=str(findings) if wrong else None,
            )


def examples(bench, table):
    """Applies the example of two servers on one GPU, with this machine's image, model and files."""
    import yaml

    with open(os.path.join(HERE, "../../docs/use/examples/vllm-two-models.yaml"), encoding="utf-8") as file:
        deployments = list(yaml.safe_load_all(file))
    with contextlib.ExitStack() as running:
        servers = []
        for deployment in deployments:
            name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
            (container,) = template["spec"]["containers"]
            size = container["resources"]["limits"][RESOURCE]
            more = [argument for argument in container["args"] if not argument.startswith("--model=")]
            ours = bench.manifest(name, size, bench.command(Pod.port, UTILIZATION, *more), bench.environment(f"{bench.work}/cache"))
            container |= {key: value for key, value in ours["spec"]["containers"][0].items() if key not in ("name", "resources")}
            # Our server listens on a port of its own.
            for of_image in ("args", "startupProbe", "readinessProbe"):
                container.pop(of_image)
            template["spec"]["volumes"] = ours["spec"]["volumes"]
            bench.keep(f"{name}.json", json.dumps(deployment, indent=1))
            bench.cluster.apply(deployment)
            running.callback(bench.cluster.kubectl, "delete", "deployment", name, "--wait=true", "--timeout=30s", check=False)
            app = "--selector=app=" + deployment["spec"]["selector"]["matchLabels"]["app"]
            deadline = time.monotonic() + bench.bound(30)
            while not (pods := bench.cluster.kubectl("get", "pods", app, "--output", "name").split()):
                if time.monotonic() > deadline:
                    raise Failure(f"{name} made no pod")
                time.sleep(0.2)
            servers.append((name, size, Pod(bench, pods[0].removeprefix("pod/"))))
        for name, size, server in servers:
            took, sees = server.first(COLD), server.call("bursar_memory")["total_mib"]
            cell = f"{took:.1f} s; {gib(sees)}; KV cache {server.found(KV_CACHE)} GiB"
            table.add(f"{name}: the first token; its GPU", cell, f"{size} GiB", wrong=sees != size * MIB_OF_GIB)
        results = [together([server for _, _, server in servers], bench, 500, 7)]
        table.add("both serve 500 requests at the same time", figures(results), "all answered", wrong=unanswered(results))
        for name, _, server in servers:
            found = bench.cluster.findings(about=server.pod)
            bad = found or server.restarts()
            table.add(f"findings and restarts of {name}", f"{len(found)}, {server.restarts()}", "0, 0", wrong=str(found) if bad else None)


def recovery(bench, table):
    """Measures the time to the first token after each kind of loss of a server."""
    # A server's GPU process is its child. Under InPlace it ends alone, and the server may hang.
    run(bench, table, "Restart", cold, retained)


def other_loads(bench, table):
    """Faults a vLLM that is executed again in place, and loads FP8 weights."""
    run(bench, table, "InPlace", in_place, quantized)


def run(bench, table, action, *parts):
    """Runs parts of the recovery under an action for faults, each whether the one before ended or not."""
    policy = {"action": action, "maxRestarts": 100, "windowSeconds": 86400, "graceSeconds": 0}
    spec = {"deviceMemory": {"guaranteed": "60Gi"}, "contextPolicy": policy}
    bench.cluster.apply(
        {"apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": {"name": "default"}, "spec": spec}
    )
    bars = {}
    for part in parts:
        try:
            part(bench, table, bars)
        except (Failure, subprocess.SubprocessError, OSError, ValueError) as error:
            table.add(f"{part.__name__}", "it did not come to its end", "", wrong=str(error))
    print("seconds to the first token: " + json.dumps(bars), flush=True)


def losses(table, server, what, bars, same_as, from_disk):
    """Kills a server, faults it, and checks that each next one has the same weights and answers."""
    for how, lose in ("SIGKILL", server.kill), ("illegal address", server.fault):
        server.expected += 1
        took = server.first(WARM, lose())
        bars[f"{what}, {how}"] = round(took, 2)
        weights, answer = server.call("bursar_checksum"), server.answer()
        right = (weights["checksum"], answer) == same_as and server.restarts() == server.expected
        read = FROM_DISK in server.log()
        way = "read from disk" if read else "attached"
        cell = f"{took:.1f} s, weights {weights['checksum']} ({way}), {server.restarts()} restarts"
        wanted = "the same weights and answer, one more restart" + ("" if from_disk else ", attached")
        ways = (how, read, answer == same_as[1])
        table.add(f"{what}: the first token after {how}", cell, wanted, wrong=None if right and read == from_disk else str(ways))


def cold(bench, table, bars):
    """Measures a start with nothing cached, vLLM's sleep mode, and restarts without retained memory."""
    shutil.rmtree(f"{bench.work}/cold", ignore_errors=True)
    subprocess.run(["sync"], check=False)
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3")
    with ended(Pod.start(bench, QUOTA, 0.8, "--enable-sleep-mode", cache=f"{bench.work}/cold", restart="Always")) as server:
        bars["cold start"] = round(server.first(COLD), 2)
        table.add("a cold start: no compiled graphs, no file in the page cache", f"{bars['cold start']:.1f} s", "")
        weights, answer = server.call("bursar_checksum"), server.answer()
        table.add("its weights", f"{gib(weights['mib'])}, checksum {weights['checksum']}", "")
        times = []
        for _ in range(3):
            server.post("/sleep?level=1")
            at = time.time()
            server.post("/wake_up")
            times.append(server.first(30, at))
        bars["vLLM's sleep mode"] = round(statistics.median(times), 2)
        same = (server.call("bursar_checksum")["checksum"], server.answer()) == (weights["checksum"], answer)
        table.add(
            "from waking to the first token, the process lives",
            f"{statistics.median(times):.2f} s",
            "the same answer",
            wrong=not same,
        )
        losses(table, server, "without retained memory", bars, (weights["checksum"], answer), True)


def retained(bench, table, bars):
    """Measures restarts with the load format `bursar`."""
    options = ["--load-format", "bursar", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with ended(Pod.start(bench, QUOTA, 0.8, *options, bursar=True, restart="Always")) as server:
        took = server.first(COLD)
        bars["start that commits its weights"] = round(took, 2)
        warning = re.search(f".*({NOT_RETAINED}).*", server.log())
        table.add("a start that commits its weights", f"{took:.1f} s", "no warning", wrong=warning.group(0)[-600:] if warning else None)
        weights, answer, found = server.call("bursar_checksum"), server.answer(), server.ask("cached")
        losses(table, server, "retained weights", bars, (weights["checksum"], answer), False)
        after = server.ask("cached")
        cell = f"{found['first']} and {found['second']} before, {after['first']} and {after['second']} after"
        wrong = after["first"] != 0 or after["second"] == 0
        table.add("tokens of a prompt in the KV cache, asked twice", cell, "lost by a restart", wrong=wrong)


def in_place(bench, table, bars):
    """Faults a vLLM that computes in the container's main process, which is executed again."""
    faults, name, state = 2, bench.name("in-place"), f"{bench.work}/images"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(state)
    command = [PYTHON, f"{bench.work}/programs/vllm_in_place.py", state, bench.model, str(faults), "bursar"]
    bench.pod(name, QUOTA, command, bench.environment(f"{bench.work}/cache", bursar=True))
    phase, _, log = bench.cluster.answer(name, bench.bound(COLD))
    bench.keep(f"{name}.log", log)
    images = [json.loads(line) for line in log.splitlines() if line.startswith('{"image"')]
    restarts = bench.cluster.kubectl("get", "pod", name, "--output", "jsonpath={.status.containerStatuses[0].restartCount}")
    bench.cluster.kubectl("delete", "pod", name, "--now", "--wait=true", "--timeout=30s", check=False)
    same = len({(image["checksum"], str(image["answer"])) for image in images}) == 1
    right = phase == "Succeeded" and same and restarts == "0" and len(images) == faults + 1
    times = [image["s"] for image in images[1:]]
    if times:
        bars["retained weights, executed in place"] = round(statistics.median(times), 2)
    cell = f"{', '.join(f'{took} s' for took in times)}; {len(images)} images, {restarts} restarts of the container"
    wrong = None if right else f"{phase}: " + "\n".join(log.splitlines()[-40:])
    table.add(
        "vLLM in the main process: the first token after an illegal address", cell, "the same weights and answer", wrong=wrong
    )


def quantized(bench, table, bars):
    """Loads FP8 weights with the load format `bursar`, which vLLM 0.26 cannot attach."""
    with ended(Pod.start(bench, QUOTA, 0.8, "--load-format", "bursar", bursar=True, model=bench.quantized)) as server:
        bars["FP8, loaded"] = round(server.first(COLD), 2)
        warning = re.search(f".*({NOT_RETAINED}).*", server.log())
        load = server.ask("load", "--requests", 64)
        cell = f"{load['answered']} of 64 answered; {warning.group(0)[-200:] if warning else 'no warning'}"
        table.add(
            "FP8 weights with the load format bursar",
            cell,
            "served, and not retained is said",
            wrong=load["answered"] != 64 or not warning,
        )


PARTS = {"quota": quota, "cost": cost, "examples": examples, "recovery": recovery, "in-place": other_loads}


def prepare(arguments):
    """Makes the model and the folders once."""
    work = arguments.work
    for name in "cache", "logs":
        os.makedirs(f"{work}/{name}", exist_ok=True)
    shutil.rmtree(f"{work}/programs", ignore_errors=True)
    os.makedirs(f"{work}/programs")
    for name in PROGRAMS:
        shutil.copy(os.path.join(HERE, "programs", name), f"{work}/programs")
    with zipfile.ZipFile(arguments.wheel) as wheel:
        wheel.extractall(f"{work}/bursar")
    if not os.path.exists(f"{work}/model/whole"):
        subprocess.run([PYTHON, f"{work}/programs/vllm_model.py", f"{work}/model"], check=True, timeout=180)
        open(f"{work}/model/whole", "w", encoding="ascii").close()


def main():
    """Runs the parts, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive")
    parser.add_argument("site")
    parser.add_argument("wheel")
    parser.add_argument("--work", default="/tmp/bursar-vllm")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--beside", type=int, default=0, help="seconds for which a pod replays captured graphs in the meantime")
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    deadline, code = time.monotonic() + arguments.seconds - 20, 0
    prepare(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        archive = image.write(REFERENCE, scratch)
        with Cluster(os.path.abspath(arguments.archive), scratch) as cluster:
            cluster.load(archive)
            os.unlink(archive)
            cluster.kill_findings()
            bench = Bench(cluster, os.path.abspath(arguments.site), os.path.abspath(arguments.work), deadline)
            if arguments.beside:
                cluster.replay_graphs(arguments.beside)
            for part in arguments.only:
                table = Table(f"{part}: what", "measured", "wanted")
                table.say(f"{part} begins")
                try:
                    PARTS[part](bench, table, *([arguments.turns] if part == "cost" else []))
                except Exception as error:
                    traceback.print_exc()
                    table.add(f"{part}: it did not come to its end", type(error).__name__, "", wrong=str(error))
                code |= table.show()
                sys.stdout.flush()
            if arguments.beside:
                table = Table("captured graphs beside", "measured", "wanted")
                answer, wrong = cluster.replayed_graphs(arguments.beside)
                table.add(f"{arguments.beside} s", answer, "all right", wrong=wrong)
                findings = cluster.findings(reasons=(*FINDINGS, "GpuQuotaNotEnforced"))
                table.add("findings about any pod", len(findings), 0, wrong=str(findings) if findings else None)
                code |= table.show()
    return code


if __name__ == "__main__":
    sys.exit(main())
