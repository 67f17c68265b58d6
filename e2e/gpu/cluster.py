"""Starts a cluster of one node with Bursar on this machine's GPU, and pods that run this machine's programs."""

import datetime
import json
import os
import shutil
import subprocess
import time

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "gpu"
REFERENCE = "localhost/gpu-host:1"
PYTHON = "/opt/torch/.venv/bin/python3"
CUDA = "/usr/local/cuda-13.0"
RESOURCE = "bursar.dev/gpu-memory-gib"
NAMESPACE = "bursar-system"
# The quota of the pod that replays graphs, and the time that it may take to start.
GRAPHS_GIB, START_SECONDS = 4, 90
FINDINGS = ("GpuUntrackedProcess", "GpuMemoryOverQuota", "GpuMemoryUnaccounted", "GpuCreditTampered", "GpuProcessKilled")


class Cluster:
    """Manages the cluster from its start to its removal."""

    def __init__(self, archive, scratch):
        self.scratch = scratch
        subprocess.run(["tar", "--extract", "--file", archive, "--directory", scratch], check=True)
        self.folder = os.path.join(scratch, "bursar-e2e")
        self.kubeconfig = None

    def __enter__(self):
        up = subprocess.run([f"{self.folder}/run", "up", "--name", NAME], check=True, text=True, stdout=subprocess.PIPE)
        line = next(line for line in up.stdout.splitlines() if line.startswith("export KUBECONFIG="))
        self.kubeconfig = line.split("=", 1)[1]
        return self

    def __exit__(self, *_):
        subprocess.run([f"{self.folder}/run", "down", "--name", NAME], check=False)

    def load(self, archive):
        """Imports an image into the node's containerd."""
        with open(os.path.join(os.path.dirname(self.kubeconfig), "pid"), encoding="ascii") as file:
            root = f"/proc/{file.read().strip()}/root"
        subprocess.run(
            [f"{self.folder}/programs/ctr", "--address", f"{root}/run/containerd/containerd.sock"]
            + ["--namespace", "k8s.io", "images", "import", "--local", archive],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def kubectl(self, *arguments, **options):
        """Runs kubectl and returns its output."""
        options = {"check": True, "text": True, "stdout": subprocess.PIPE} | options
        return subprocess.run(
            [f"{self.folder}/programs/kubectl", *arguments],
            env=os.environ | {"KUBECONFIG": self.kubeconfig},
            **options,
        ).stdout

    def apply(self, manifest):
        self.kubectl("apply", "--filename", "-", input=json.dumps(manifest), stdout=subprocess.DEVNULL)

    def complaint(self):
        """Returns the status of the node and the agent's log, for a failed row."""
        nodes = json.loads(self.kubectl("get", "gpunodes", "--output", "json"))["items"]
        parts = [json.dumps(condition) for node in nodes for condition in node["status"]["conditions"]]
        parts.append(self.kubectl("get", "pods", "--namespace", NAMESPACE, "--output", "wide"))
        parts.append(self.kubectl("get", "events"))
        parts.append(self.kubectl("logs", "daemonset/bursar-agent", "--namespace", NAMESPACE, check=False))
        return "\n".join(parts)

    def processes(self, prefix):
        """Returns the pids of the processes in Bursar's pods whose names have the prefix."""
        pods = json.loads(self.kubectl("get", "pods", "--namespace", NAMESPACE, "--output", "json"))["items"]
        uids = [one["metadata"]["uid"] for one in pods if one["metadata"]["name"].startswith(prefix)]
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cgroup", encoding="ascii") as file:
                    cgroup = file.read().replace("_", "-")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(uid in cgroup for uid in uids):
                found.append(pid)
        return found

    def proportional_kib(self, prefix):
        """Returns the memory of the processes of `processes`, shared pages by their parts."""
        total = 0
        for pid in self.processes(prefix):
            try:
                with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                    total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return total

    def kill_findings(self):
        """Sets the agent's policy to `kill`, and waits for an agent with this policy."""
        self.configure('policy = "report"', 'policy = "kill"')

    def configure(self, setting, replacement):
        """Replaces a setting of the agent, and waits for an agent that has read it."""
        agents = "daemonset/bursar-agent", "--namespace", NAMESPACE
        template = json.loads(self.kubectl("get", *agents, "--output", "json"))["spec"]["template"]
        variable = next(v for v in template["spec"]["containers"][0]["env"] if v["name"] == "BURSAR_CONFIG")
        variable["value"] = variable["value"].replace(setting, replacement)
        assert replacement in variable["value"], variable
        container = {"name": "agent", "env": [variable]}
        self.kubectl("patch", *agents, "--patch", json.dumps({"spec": {"template": {"spec": {"containers": [container]}}}}))
        self.kubectl("rollout", "status", *agents, "--timeout=60s")

    def findings(self, about=None, but=None, reasons=FINDINGS):
        """Returns times, reasons and notes of the findings about a pod, or about other objects, oldest first."""
        found = []
        for event in json.loads(self.kubectl("get", "events.events.k8s.io", "--all-namespaces", "--output", "json"))["items"]:
            name = event["regarding"].get("name")
            if event["reason"] in reasons and about in (None, name) and name != but:
                at = datetime.datetime.fromisoformat(event["eventTime"]).timestamp()
                found.append((at, event["reason"], event.get("note", "")))
        return sorted(found)

    def replay_graphs(self, seconds):
        """Lets a pod replay captured graphs for some seconds."""
        programs = f"{self.scratch}/graphs"
        os.makedirs(programs, exist_ok=True)
        shutil.copy(os.path.join(HERE, "programs", "graphs.py"), programs)
        self.apply(pod("graphs", GRAPHS_GIB, [PYTHON, "/programs/graphs.py", str(seconds)], programs))

    def replayed_graphs(self, seconds):
        """Waits for the end of `replay_graphs`, and returns its answer and what was wrong with it."""
        phase, answer, log = self.answer("graphs", seconds + START_SECONDS)
        right = phase == "Succeeded" and answer and answer["rounds"] and answer["wrong"] == 0
        return answer, None if right else f"{phase}: {log[-1500:]}"

    def answer(self, name, bound):
        """Waits for a pod's end, and returns its phase and the last JSON line of its log."""
        deadline = time.monotonic() + bound
        while True:
            phase = self.kubectl("get", "pod", name, "--output", "jsonpath={.status.phase}")
            if phase in ("Succeeded", "Failed") or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        log = self.kubectl("logs", name, check=False, stderr=subprocess.STDOUT)
        for line in reversed(log.splitlines()):
            try:
                return phase, json.loads(line), log
            except ValueError:
                continue
        if phase not in ("Succeeded", "Failed"):
            log += self.kubectl("describe", "pod", name, check=False)
        return phase, None, log


def pod(name, gib, command, programs, env=()):
    """Makes a pod that runs `command` with this machine's Python and programs, and a quota of `gib`."""
    folders = {"torch": "/opt/torch", "cuda": CUDA, "programs": programs}
    files = {"nvidia-smi": "/usr/local/nvidia/bin/nvidia-smi"}
    mounts = [
        {"name": name_, "mountPath": "/programs" if name_ == "programs" else path, "readOnly": True}
        for name_, path in folders.items()
    ]
    mounts += [{"name": name_, "mountPath": f"/opt/{name_}", "readOnly": True} for name_ in files]
    mounts += [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes = [{"name": name_, "hostPath": {"path": path, "type": "Directory"}} for name_, path in folders.items()]
    volumes += [{"name": name_, "hostPath": {"path": path, "type": "File"}} for name_, path in files.items()]
    volumes += [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": REFERENCE,
                    "imagePullPolicy": "Never",
                    "command": command,
                    "env": [{"name": key, "value": value} for key, value in env],
                    "resources": {"limits": {RESOURCE: str(gib)}},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }
