//! Runs trials on a real cluster: one test program, and one cluster for all selected trials.

use std::process::Command;

use crate::cargo;
use crate::kube::{KUBERNETES_VARIABLE, KubernetesVersion};
use crate::paths;

/// A trial of `e2e/tests/cluster`.
#[derive(Clone, Copy, Debug)]
pub struct ClusterTrial {
    /// The name of the check.
    pub name: &'static str,
    /// The promise that the trial holds.
    pub promise: &'static str,
    /// Whether the trial runs only in the long tier.
    pub long: bool,
    /// The first minor version of Kubernetes that has what the trial needs, and what that is.
    needs: Option<(u32, &'static str)>,
}

impl ClusterTrial {
    /// Returns what this release of Kubernetes lacks for the trial.
    fn lacks(&self, version: KubernetesVersion) -> Option<&'static str> {
        let (minor, what) = self.needs?;
        (version.minor() < minor).then_some(what)
    }
}

const fn trial(name: &'static str, promise: &'static str) -> ClusterTrial {
    ClusterTrial {
        name,
        promise,
        long: false,
        needs: None,
    }
}

const fn long_trial(name: &'static str, promise: &'static str) -> ClusterTrial {
    ClusterTrial {
        long: true,
        ..trial(name, promise)
    }
}

/// A trial that needs policies which change pods.
const fn mutating(trial: ClusterTrial) -> ClusterTrial {
    ClusterTrial {
        needs: Some((36, "MutatingAdmissionPolicy as v1")),
        ..trial
    }
}

/// Every trial of `e2e/tests/cluster`. That program refuses to run when its trials differ.
pub const TRIALS: &[ClusterTrial] = &[
    trial(
        "main/cluster/quota",
        "a pod sees one GPU of the size that it requested",
    ),
    trial(
        "main/cluster/greedy",
        "a pod that allocates beyond its quota gets an error, and its neighbour on the GPU is not affected",
    ),
    trial(
        "main/cluster/waiting",
        "a pod of 8 beside two of 10 waits with the reason, and runs within 20 s after one of 10 ends",
    ),
    trial(
        "main/cluster/full",
        "two pods of 12 and two of 4 run, and a further pod of 5 is not scheduled",
    ),
    trial(
        "security/cluster/together",
        "a pod of 4, 4, 12 and 12, and two pods of 7 and 9 at once, start on two GPUs of 16",
    ),
    trial(
        "security/cluster/inherited",
        "memory that an init container retained or exported counts against the main container's quota, once and at most up to it, whichever of the two quotas is larger",
    ),
    trial(
        "pods/cluster/init",
        "init containers of every size before one or more containers get their requests in the memory that the pod then uses, and no pod waits",
    ),
    trial(
        "pods/cluster/sidecars",
        "sidecars before and after init containers keep their memory beside the main containers, and no pod waits",
    ),
    trial(
        "pods/cluster/gpus",
        "a container is spread over two GPUs by its size or by annotation, beside others and after an init container, or waits for room on both",
    ),
    trial(
        "pods/cluster/budget",
        "a budget counts pods with init containers and sidecars as the scheduler does, to the last GiB",
    ),
    trial(
        "pods/cluster/restarts",
        "sidecars and containers that restart on their own, a killed agent and a killed sandbox change no binding of their pod",
    ),
    long_trial(
        "pods/cluster/restarts-long",
        "sidecars and containers that restart on their own nine times, a killed agent and a killed sandbox change no binding of their pod",
    ),
    trial(
        "main/cluster/budgets",
        "the operator accepts a valid budget, and refuses an invalid one with the reason",
    ),
    trial(
        "main/cluster/bad-input",
        "an agent with an invalid configuration ends, and its log names the field",
    ),
    trial(
        "main/cluster/release",
        "half of the memory of 20 pods is free within 5 s of their end, and all of it within 60 s",
    ),
    long_trial(
        "main/cluster/release-long",
        "half of the memory of 50 pods is free within 5 s of their end, and all of it within 60 s",
    ),
    trial(
        "main/cluster/churn",
        "after 40 random creates and deletes no pod was Failed, and no memory is bound",
    ),
    long_trial(
        "main/cluster/churn-long",
        "after 200 random creates and deletes no pod was Failed, and no memory is bound",
    ),
    trial(
        "main/cluster/restarts",
        "bindings survive two restarts each of kubelet and agent, a wiped plugin folder, and a lost or corrupted checkpoint",
    ),
    long_trial(
        "main/cluster/restarts-long",
        "bindings survive ten restarts each of kubelet and agent, a wiped plugin folder, and a lost or corrupted checkpoint",
    ),
    trial(
        "main/cluster/agent-away",
        "the agent is killed, replaced and stopped while four clients create pods without pause: every pod runs, and none fails",
    ),
    long_trial(
        "main/cluster/agent-away-long",
        "the agent is killed, replaced and stopped 200 times while eight clients create pods without pause: every pod runs, and none fails",
    ),
    long_trial(
        "main/cluster/no-relay-long",
        "without the plugin relay pods fail while the agent goes away 20 times, so that the check with a relay would see a failed pod",
    ),
    trial(
        "main/cluster/health",
        "the allocatable follows a GPU that is lost and restored, and pods on other GPUs are not affected; an upgrade of the agents goes on over a node without a healthy GPU",
    ),
    trial(
        "operator/cluster/maintenance",
        "the labels of a driver upgrade and of MIG manager drain a node's GPUs, and their last states give the GPUs back; an admin's drain stays",
    ),
    trial(
        "enforcement/cluster/users",
        "the quota is enforced for pods without root, with a read-only root file system, and with users of their own",
    ),
    trial(
        "enforcement/cluster/upgrade",
        "another build replaces the agent under load: no pod restarts, and quotas are enforced before, during and after",
    ),
    trial(
        "enforcement/cluster/managed",
        "by the guide's steps a pod's managed memory stays within its GPU's quota, or within one of its own that budget and policy check, and moves for a neighbour that takes its whole quota",
    ),
    trial(
        "security/cluster/rights",
        "the agent has nine capabilities and a seccomp filter; a process that calls NVML has two of them; a provisioner has no capabilities, a filter and a user of its own, which cannot read the agent's token",
    ),
    trial(
        "enforcement/cluster/resize",
        "an override lowers and raises a running pod's quota; below the used memory it is pending until the program frees memory, and no process is killed",
    ),
    trial(
        "enforcement/cluster/resize-managed",
        "a budget's override lowers and raises the quota of a running pod's managed memory, and its removal restores the quota",
    ),
    mutating(trial(
        "operator/cluster/steered",
        "a pod of 8 beside two of 10 is scheduled to a node with room, or stays pending until a node has room",
    )),
    trial(
        "operator/cluster/moved",
        "without steering the pod of 8 waits, and is relocated once another node has room",
    ),
    trial(
        "operator/cluster/owners",
        "owners get half a GPU each from borrowers, two at a time and 6 times while the operator is killed, and no borrower is evicted without need",
    ),
    long_trial(
        "operator/cluster/owners-long",
        "owners get half a GPU each from borrowers, two at a time and 100 times while the operator is killed, and no borrower is evicted without need",
    ),
    trial(
        "operator/cluster/shapes",
        "the operator evicts the borrower that the scheduler leaves for a pod over two GPUs, and for a pod whose three containers need both",
    ),
    trial(
        "operator/cluster/disruption",
        "a disruption budget protects a borrower for its grace; a Job that ignores disruption loses pods without a counted failure, and a Job that does not ignore it keeps its pods unless they borrow",
    ),
    trial(
        "operator/cluster/override",
        "a budget's override lowers the quota of a running pod, and its removal restores the quota",
    ),
    trial(
        "enforcement/cluster/covered",
        "a pod's volumes over Bursar's files and NVIDIA_VISIBLE_DEVICES=all do not weaken the quota, or are reported, the first of two within 10 s and both within 60 s",
    ),
    trial(
        "runtime/cluster/poison",
        "a pod's main process faults 25 times in a row, has its retained memory again within 5 s in half of the cases and 60 s in all, and the kubelet sees no restart; without a policy the kubelet restarts the container each of 3 times, and a server's worker that faults ends alone and is replaced",
    ),
    long_trial(
        "runtime/cluster/poison-long",
        "a pod's main process faults 50 times in a row, has its retained memory again within 5 s in half of the cases and 60 s in all, and the kubelet sees no restart; without a policy the kubelet restarts the container each of 5 times, and a server's worker that faults ends alone and is replaced",
    ),
    trial(
        "operator/cluster/contexts",
        "the operator evicts a pod that faults more often than its namespace's policy allows, and the budget names the reason, also after a restart of the operator",
    ),
    trial(
        "operator/cluster/refused",
        "the API server refuses a pod beyond its namespace's budget, with a message that names the budget",
    ),
    mutating(trial(
        "operator/cluster/reclaim",
        "a namespace borrows memory that another leaves idle, and the owner gets it back at once, without a running operator",
    )),
    trial(
        "operator/cluster/accounts",
        "an agent's token writes only its own node's GpuNode and lists no pods; the operator's token changes only its own labels",
    ),
    trial(
        "surface/cluster/console",
        "the commands of README and quick start do what these pages show, in their order",
    ),
    trial(
        "surface/cluster/queries",
        "in a Prometheus that scrapes agent and operator each query of the dashboards has a series, each alert is evaluated, and no alert without a cause is active",
    ),
    trial(
        "cli/cluster/commands",
        "each command of kubectl bursar works with an admin's rights; with a tenant's it shows the tenant's own, names what it could not read, and changes nothing",
    ),
    trial(
        "cli/cluster/explain",
        "explain names 17 causes that the cluster really has, each with its remedy; the tenant gets those that its rights show",
    ),
    long_trial(
        "operator/cluster/alone",
        "while the API server is unreachable, the agent restarts a pod that a fault would evict, and the pod is not evicted afterwards",
    ),
    trial(
        "install/cluster/release",
        "a release into a registry, then helm install from it on a cluster that never saw the images: simulated GPUs, and a pod held to its quota within 60 s",
    ),
    trial(
        "install/cluster/uninstall",
        "another quantum is refused under a running pod; the guide's commands for an uninstall leave the cluster and the node as they were",
    ),
    trial(
        "install/cluster/upgrade",
        "an upgrade to another version of the chart, its rollback, an uninstall and a new installation change what the guide says in cluster and node, restart no pod, and leave quotas in force; retained memory stays over upgrade and rollback",
    ),
    long_trial(
        "install/cluster/signatures-long",
        "a release with a key signs checksums, images and chart, and attests bills of materials and provenance: cosign verifies each by the public key, and refuses another key and a changed file",
    ),
    trial(
        "surface/cluster/demo",
        "the demo lends memory and takes it back, restarts a program in place, and takes less than 90 s once everything is built",
    ),
    mutating(long_trial(
        "pods/nodes/steering",
        "on three nodes with kubelets of their own, a pod of 8 is scheduled to the one node with room",
    )),
    long_trial(
        "pods/nodes/tokens",
        "the token of each of three agents writes its own node's GpuNode and no other one",
    ),
    long_trial(
        "pods/nodes/loss",
        "a node that loses its power and boots has its pods again, with true bindings, generations and budget; other nodes notice nothing",
    ),
    long_trial(
        "pods/nodes/moved",
        "without steering a waiting pod is relocated to another node once that takes pods",
    ),
    long_trial(
        "pods/nodes/drain",
        "kubectl drain moves the pods of a node to the others, and leaves no memory bound on it",
    ),
    long_trial(
        "pods/nodes/owners",
        "3 times two owners get a GPU each from the borrowers that hold all whole GPUs of three nodes",
    ),
    long_trial(
        "pods/nodes/owners-long",
        "100 times two owners get a GPU each from the borrowers that hold all whole GPUs of three nodes",
    ),
    ClusterTrial {
        needs: Some((36, "ResourceHealthStatus by default")),
        ..long_trial(
            "main/cluster/facts-device-ids",
            "fact F10: the kubelet accepts 4 MiB in a list and no byte more, leaves an ended stream closed, and takes more than 6 times as long when 4 times as many ids of a pod change",
        )
    },
    long_trial(
        "main/cluster/facts-restart-times",
        "fact F18: a kubelet with default settings restarts a killed container at once, then after at least 10, 20 and 40 s",
    ),
    long_trial(
        "main/cluster/facts-nomination",
        "fact F19: freed devices go to pending pods of lower priority, or to the waiting pod once a node is nominated for it; three evictions end a Job with backoffLimit 2",
    ),
    long_trial(
        "main/cluster/facts-write-times",
        "fact F20: a write of a GpuNode of 85 KiB takes the API server more than twice as long as one of 3 KiB",
    ),
    trial(
        "main/cluster/leaves-nothing",
        "a cluster that ran a pod leaves nothing behind on the machine",
    ),
    trial(
        "main/cluster/swept",
        "the sweep before the next start removes the remains of a cluster whose node process was killed",
    ),
];

/// Returns the trials of the default tier.
pub(super) fn default_tier() -> Vec<&'static str> {
    let trials = TRIALS.iter().filter(|trial| !trial.long);
    trials.map(|trial| trial.name).collect()
}

/// Returns the command that runs these trials on one cluster of a release of Kubernetes. Prints the
/// trials that do not apply to it, with the reason.
pub(super) fn command(version: KubernetesVersion, names: &[&str]) -> Command {
    let mut command = cargo::command();
    // Other tests are selected alike, so that no crate is compiled with other features.
    command.args(["test", "--quiet", "--locked", "--workspace"]);
    command.args(["--test", "cluster", "--", "--exact"]);
    for trial in TRIALS {
        let is_chosen = names.contains(&trial.name);
        let lacks = trial.lacks(version);
        if let (true, Some(what)) = (is_chosen, lacks) {
            println!(
                "{}: skipped, Kubernetes {version} has no {what}",
                trial.name
            );
        }
        if !is_chosen || lacks.is_some() {
            command.args(["--skip", trial.name]);
        }
    }
    command
        .env(KUBERNETES_VARIABLE, version.to_string())
        .current_dir(paths::repository());
    command
}
