//! Runs trials on a real cluster: one test program, and one cluster for all selected trials.

use std::process::Command;

use crate::cargo;
use crate::paths;

/// Every trial of `e2e/tests/cluster` by name, with its promise. That program refuses to run when
/// its trials differ.
pub const TRIALS: &[(&str, &str)] = &[
    (
        "main/cluster/quota",
        "a pod sees one GPU of the size that it requested",
    ),
    (
        "main/cluster/greedy",
        "a pod that allocates beyond its quota gets an error, and its neighbour on the GPU is not affected",
    ),
    (
        "main/cluster/waiting",
        "a pod of 8 beside two of 10 waits with the reason, and runs within 15 s after one of 10 ends",
    ),
    (
        "main/cluster/full",
        "two pods of 12 and two of 4 run, and a further pod of 5 is not scheduled",
    ),
    (
        "security/cluster/together",
        "a pod of 4, 4, 12 and 12, and two pods of 7 and 9 at once, start on two GPUs of 16",
    ),
    (
        "security/cluster/inherited",
        "memory that an init container retained or exported counts against the main container's quota, once and at most up to it, whichever of the two quotas is larger",
    ),
    (
        "main/cluster/budgets",
        "the operator accepts a valid budget, and refuses an invalid one with the reason",
    ),
    (
        "main/cluster/bad-input",
        "an agent with an invalid configuration ends, and its log names the field",
    ),
    (
        "main/cluster/release",
        "a pod's memory is free within 2 s of its end",
    ),
    (
        "main/cluster/churn",
        "after 200 random creates and deletes no pod was Failed, and no memory is bound",
    ),
    (
        "main/cluster/restarts",
        "bindings survive restarts of kubelet and agent, a wiped plugin folder, and a lost or corrupted checkpoint",
    ),
    (
        "main/cluster/health",
        "the allocatable follows a GPU that is lost and restored, and pods on other GPUs are not affected; an upgrade of the agents goes on over a node without a healthy GPU",
    ),
    (
        "enforcement/cluster/users",
        "the quota is enforced for pods without root, with a read-only root file system, and with users of their own",
    ),
    (
        "enforcement/cluster/upgrade",
        "another build replaces the agent under load: no pod restarts, and quotas are enforced before, during and after",
    ),
    (
        "security/cluster/rights",
        "the agent has nine capabilities and a seccomp filter; a process that calls NVML has two of them; a provisioner has no capabilities, a filter and a user of its own, which cannot read the agent's token",
    ),
    (
        "enforcement/cluster/resize",
        "an override lowers and raises a running pod's quota; below the used memory it is pending until the program frees memory, and no process is killed",
    ),
    (
        "operator/cluster/steered",
        "a pod of 8 beside two of 10 is scheduled to a node with room, or stays pending until a node has room",
    ),
    (
        "operator/cluster/moved",
        "without steering the pod of 8 waits, and is relocated once another node has room",
    ),
    (
        "operator/cluster/owners",
        "owners get half a GPU each from borrowers, two at a time and 100 times, and no borrower is evicted without need",
    ),
    (
        "operator/cluster/disruption",
        "a disruption budget protects a borrower for its grace; a Job that ignores disruption loses pods without a counted failure, and a Job that does not ignore it keeps its pods unless they borrow",
    ),
    (
        "operator/cluster/override",
        "a budget's override lowers the quota of a running pod, and its removal restores the quota",
    ),
    (
        "enforcement/cluster/covered",
        "a pod's volumes over Bursar's files and NVIDIA_VISIBLE_DEVICES=all do not weaken the quota, or are reported within 2 s",
    ),
    (
        "runtime/cluster/poison",
        "a pod's main process faults 50 times in a row, has its retained memory again within a second, and the kubelet sees no restart; without a policy the kubelet restarts the container each time",
    ),
    (
        "operator/cluster/contexts",
        "the operator evicts a pod that faults more often than its namespace's policy allows, and the budget names the reason, also after a restart of the operator",
    ),
    (
        "operator/cluster/refused",
        "the API server refuses a pod beyond its namespace's budget, with a message that names the budget",
    ),
    (
        "operator/cluster/reclaim",
        "a namespace borrows memory that another leaves idle, and the owner gets it back at once, without a running operator",
    ),
    (
        "operator/cluster/accounts",
        "an agent's token writes only its own node's GpuNode and lists no pods; the operator's token changes only its own labels",
    ),
    (
        "operator/cluster/alone",
        "while the API server is unreachable, the agent restarts a pod that a fault would evict, and the pod is not evicted afterwards",
    ),
    (
        "install/cluster/release",
        "a release into a registry, then helm install from it on a cluster that never saw the images: simulated GPUs, and a pod held to its quota within 60 s",
    ),
    (
        "install/cluster/uninstall",
        "another quantum is refused under a running pod; the guide's commands for an uninstall leave the cluster and the node as they were",
    ),
    (
        "main/cluster/leaves-nothing",
        "a cluster that ran a pod leaves nothing behind on the machine, twice",
    ),
    (
        "main/cluster/swept",
        "the next start removes the remains of a cluster whose node process was killed",
    ),
];

/// Returns the command that runs these trials on one cluster.
pub(super) fn command(names: &[&str]) -> Command {
    let mut command = cargo::command();
    // Other tests are selected alike, so that no crate is compiled with other features.
    command.args(["test", "--quiet", "--locked", "--workspace"]);
    command.args(["--test", "cluster", "--", "--exact"]);
    let others = TRIALS.iter().filter(|(name, _)| !names.contains(name));
    for (name, _) in others {
        command.args(["--skip", name]);
    }
    command.current_dir(paths::repository());
    command
}
