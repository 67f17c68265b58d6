//! Runs trials on a real cluster: one test program, and one cluster for all selected trials.

use std::process::Command;

use crate::cargo;
use crate::paths;

/// Every trial of `e2e/tests/cluster` by name, with its promise. That program refuses to run when
/// its trials differ.
pub const TRIALS: &[(&str, &str)] = &[
    (
        "main/cluster/quota",
        "a pod sees one GPU of the size that it asked for",
    ),
    (
        "main/cluster/greedy",
        "a greedy pod is refused at its quota, and its neighbour on the GPU notices nothing",
    ),
    (
        "main/cluster/waiting",
        "an 8 beside two 10s waits with the reason, and runs within 15 s of a 10's end",
    ),
    (
        "main/cluster/full",
        "two 12s and two 4s run, and a further 5 is not scheduled",
    ),
    (
        "security/cluster/together",
        "a pod of 4, 4, 12 and 12, and two pods of 7 and 9 at once, start on two GPUs of 16",
    ),
    (
        "security/cluster/inherited",
        "what an init container has kept or exported counts against the main container, once and within its limit, whichever of them may use more",
    ),
    (
        "main/cluster/budgets",
        "a budget is accepted, and one that makes no sense is refused with the reason",
    ),
    (
        "main/cluster/bad-input",
        "an agent with a bad configuration ends, and its log names the field",
    ),
    (
        "main/cluster/release",
        "a pod's memory is free within 2 s of its end",
    ),
    (
        "main/cluster/churn",
        "after 200 random creates and deletes no pod was Failed, and nothing is held",
    ),
    (
        "main/cluster/restarts",
        "bindings survive restarts of kubelet and agent, a wiped plugin folder, and a checkpoint lost or spoilt",
    ),
    (
        "main/cluster/health",
        "a GPU that is lost and restored is followed both ways, and pods on others notice nothing",
    ),
    (
        "enforcement/cluster/users",
        "pods without root, with a read-only root file system, and with users of their own are held to their quota",
    ),
    (
        "enforcement/cluster/upgrade",
        "the agent is replaced by another build under load: no pod restarts, and quotas hold before, during and after",
    ),
    (
        "security/cluster/rights",
        "the agent has nine capabilities and a seccomp filter; a provisioner has none, a filter and a user of its own, which cannot read the agent's token",
    ),
    (
        "enforcement/cluster/resize",
        "a running pod's quota is raised and lowered; below what is used it is pending until the program frees, and nobody is killed",
    ),
    (
        "operator/cluster/steered",
        "an 8 beside two 10s is scheduled to a node that has room, or held back until one has",
    ),
    (
        "operator/cluster/moved",
        "without steering the 8 waits, and is moved once another node has room",
    ),
    (
        "operator/cluster/owners",
        "owners get half a GPU each from borrowers, two at a time and 100 times, and no borrower goes for nothing",
    ),
    (
        "operator/cluster/disruption",
        "a disruption budget keeps a borrower for its grace; a Job that ignores disruptions gives and counts no failure, and one that does not borrow keeps its pods",
    ),
    (
        "operator/cluster/override",
        "a budget's override lowers the quota of a running pod, and is lifted with it",
    ),
    (
        "enforcement/cluster/covered",
        "a pod's volumes over our files and NVIDIA_VISIBLE_DEVICES=all take nothing from the quota, or are told within 2 s",
    ),
    (
        "runtime/cluster/poison",
        "a pod's main process faults 50 times in a row, has its kept memory again within a second, and the kubelet sees nothing; without a policy it restarts the container each time",
    ),
    (
        "operator/cluster/contexts",
        "a pod that faults more often than its namespace's policy allows is evicted and the budget says why, also by an operator that was away",
    ),
    (
        "operator/cluster/refused",
        "a pod beyond its namespace's budget is refused when it is created, with a message that names the budget",
    ),
    (
        "operator/cluster/reclaim",
        "a team borrows what another leaves idle, and that one takes it back at once, with no operator running",
    ),
    (
        "operator/cluster/accounts",
        "an agent's token writes its own node's GpuNode only and lists no pods; the operator's changes its own labels only",
    ),
    (
        "operator/cluster/alone",
        "a pod that is to be evicted for a fault while the API server is away is restarted by its node's agent, and that is all once it is back",
    ),
    (
        "main/cluster/leaves-nothing",
        "a cluster that ran a pod leaves nothing behind, twice",
    ),
    (
        "main/cluster/swept",
        "a cluster whose node process is killed is swept at the next start",
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
