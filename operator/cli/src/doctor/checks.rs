//! Checks nodes, GPUs, pods, budgets and clocks.

use bursar_crds::budget::Overflow;
use bursar_crds::conditions::{budget as budget_names, gpu_node as names};
use bursar_crds::context_policy::ContextAction;
use bursar_crds::gpu_node::{GpuState, HealthStatus};

use super::{Finding, Level, preflight};
use crate::act::drain;
use crate::amounts::{count, memory, since};
use crate::show::{budgets, bytes, condition, gpus, name};
use crate::snapshot::{Kind, Snapshot};

/// A difference between clocks that leases cannot explain otherwise, in seconds.
const SKEW_SECONDS: i64 = 5;
/// The interval at which a kubelet renews its Lease, with a margin, in seconds.
const RENEWAL_SECONDS: i64 = 45;

pub(super) fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    let groups = [
        nodes(snapshot),
        runtimes(snapshot),
        owners(snapshot),
        lost(snapshot),
        not_enforced(snapshot),
        unowned(snapshot),
        unreadable(snapshot),
        overcommitted(snapshot),
        clocks(snapshot),
    ];
    groups.into_iter().for_each(|group| findings.extend(group));
    findings
}

/// Conditions of GpuNodes that do not hold, of nodes that should have GPUs.
fn nodes(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    for node in &snapshot.gpu_nodes {
        let Some(status) = &node.status else { continue };
        let found = condition(&status.conditions, names::GPUS_FOUND);
        // A node without a GPU needs no driver, and the other conditions say nothing there.
        if status.gpus.is_empty() && found.is_some_and(|found| found.reason == names::NO_GPUS) {
            continue;
        }
        for held in &status.conditions {
            let (level, remedy) = match held.reason.as_str() {
                names::MODULE_NOT_RELOADED => (
                    Level::Fail,
                    "drain the node, then load the driver's module again or restart the node",
                ),
                _ if held.status != "False" => continue,
                names::NOT_READY | names::NOT_OFFERED | names::SWITCHED_OFF | names::OK => continue,
                // `owners` says it with the remedy of the node.
                names::OTHER_PLUGIN => continue,
                names::DRIVER_MISSING if status.gpus.is_empty() => (
                    Level::Warn,
                    "nothing, if the node has no GPU; else install the driver or set driver.root",
                ),
                names::DRIVER_MISSING => (Level::Fail, "install the driver, or set driver.root"),
                names::CDI_UNSUPPORTED => (
                    Level::Fail,
                    "switch CDI on: containerd 2.0, CRI-O 1.28, or later",
                ),
                names::CDI_FOLDER => (
                    Level::Fail,
                    "free space, or set node.cdiDir to the folder that the runtime reads",
                ),
                names::TOO_MANY_DEVICE_IDS => (Level::Fail, "set a larger quantum"),
                names::NOT_SCRUBBED => (Level::Warn, "see MemoryScrubbed in docs/use/runbooks.md"),
                _ => (Level::Warn, "see the condition in docs/use/runbooks.md"),
            };
            let check = match held.type_.as_str() {
                names::CDI_READY => "CdiOff",
                _ => "Node",
            };
            let text = format!(
                "{}: {} is {} ({}): {}",
                name(node),
                held.type_,
                held.status,
                held.reason,
                held.message
            );
            findings.push(Finding::new(level, check, text, remedy));
        }
    }
    findings
}

/// Runtimes of nodes with GPUs that are too old.
fn runtimes(snapshot: &Snapshot) -> Vec<Finding> {
    let with_gpus = snapshot.nodes.iter().filter(|node| {
        let status = snapshot
            .gpu_node(&node.metadata.name)
            .and_then(|node| node.status.as_ref());
        status.is_some_and(|status| !status.gpus.is_empty())
    });
    with_gpus.filter_map(preflight::runtime).collect()
}

/// Nodes whose GPUs another plugin gives out too.
fn owners(snapshot: &Snapshot) -> Vec<Finding> {
    let owned = snapshot.nodes.iter().filter(|node| {
        let status = snapshot
            .gpu_node(&node.metadata.name)
            .and_then(|node| node.status.as_ref());
        status.is_some_and(|status| status.device_memory.allocatable > 0)
    });
    owned
        .filter_map(|node| {
            let (resource, amount) = *node.foreign_gpus().first()?;
            let name = &node.metadata.name;
            Some(Finding::new(
                Level::Warn,
                "TwoOwners",
                format!("{name}: {resource} is {amount} there too: another plugin gives out the same GPUs"),
                format!("kubectl label node {name} nvidia.com/gpu.deploy.device-plugin=false"),
            ))
        })
        .collect()
}

/// GPUs that serve no pods.
fn lost(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut healthy = 0;
    for node in &snapshot.gpu_nodes {
        for gpu in node.status.iter().flat_map(|status| &status.gpus) {
            let gpu_name = format!("{}: GPU {}", name(node), gpus::index(node, gpu));
            let age = gpu.health.since.as_ref().map_or_else(String::new, |then| {
                format!(" since {}", since(then.0, snapshot.now))
            });
            if let Some(progress) = gpus::drain_progress(gpu) {
                findings.push(Finding::new(
                    Level::Warn,
                    "Drained",
                    format!("{gpu_name} {progress}{age}"),
                    drain::undrain_command(node, gpu).unwrap_or_else(|| {
                        "wait until NVIDIA's operators are done with it; see maintenance.drainForNvidia".to_owned()
                    }),
                ));
            } else if gpu.state == GpuState::Lost || gpu.health.status == HealthStatus::Unhealthy {
                let remedy = gpus::fault(node, gpu).map_or("see dmesg on the node", gpus::remedy);
                findings.push(Finding::new(
                    Level::Fail,
                    "LostGpu",
                    format!("{gpu_name} serves no pods ({}){age}", gpu.health.reason),
                    remedy,
                ));
            } else {
                healthy += 1;
            }
        }
    }
    if findings.is_empty() && healthy > 0 {
        findings.push(Finding::ok(
            "LostGpu",
            format!("{} healthy", count(healthy, "GPU")),
        ));
    }
    findings
}

/// Containers without enforcement.
fn not_enforced(snapshot: &Snapshot) -> Vec<Finding> {
    let statuses = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|node| node.status.as_ref());
    let gaps = statuses.flat_map(|status| &status.not_enforced);
    gaps.map(|gap| {
        Finding::new(
            Level::Warn,
            "NotEnforced",
            format!(
                "{}/{} (container {}) is not held to its quota: {}",
                gap.namespace, gap.pod, gap.container, gap.reason
            ),
            gap.message.clone(),
        )
    })
    .collect()
}

/// Memory of GPUs that no running pod has.
fn unowned(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    for node in &snapshot.gpu_nodes {
        let events = format!(
            "kubectl bursar events {} names the process or its pod",
            name(node)
        );
        for gpu in node.status.iter().flat_map(|status| &status.gpus) {
            let gpu_name = format!("{}: GPU {}", name(node), gpus::index(node, gpu));
            let ended = "that processes of ended pods keep";
            let unowned = "in use that is charged to no pod, and withheld from all";
            let kinds = [
                ("LeakedMemory", &gpu.leaked, ended),
                ("WithheldMemory", &gpu.withheld, unowned),
            ];
            for (check, amount, what) in kinds {
                if let Some(amount) = amount {
                    let text = format!("{gpu_name} has {} {what}", memory(bytes(amount)));
                    findings.push(Finding::new(Level::Warn, check, text, events.clone()));
                }
            }
        }
    }
    findings
}

/// Objects that cannot be parsed, are refused, or have values of another version.
fn unreadable(snapshot: &Snapshot) -> Vec<Finding> {
    let remedy = "use the same chart version for CRDs, operator, agents and kubectl bursar";
    let mut findings: Vec<Finding> = snapshot
        .unreadable
        .iter()
        .map(|object| {
            let text = format!(
                "{} {} cannot be parsed: {}",
                object.kind.name(),
                object.name,
                object.error
            );
            Finding::new(Level::Fail, "Unreadable", text, remedy)
        })
        .collect();
    for budget in &snapshot.budgets {
        let namespace = budgets::namespace(budget);
        let policy = budget.spec.context_policy.as_ref();
        let unknown = budget.spec.overflow == Overflow::Unknown
            || policy.is_some_and(|policy| policy.action == Some(ContextAction::Unknown));
        if unknown {
            let text = format!("budget of {namespace} has a value of another version");
            findings.push(Finding::new(Level::Fail, "Unreadable", text, remedy));
        }
        let conditions = budget
            .status
            .as_ref()
            .map_or(&[][..], |status| &status.conditions);
        let accepted = condition(conditions, budget_names::ACCEPTED);
        if let Some(refused) = accepted.filter(|accepted| accepted.status == "False") {
            let text = format!("budget of {namespace} is not accepted: {}", refused.message);
            findings.push(Finding::new(
                Level::Fail,
                "Unreadable",
                text,
                "correct the field that the message names",
            ));
        }
    }
    findings
}

/// Budgets that are not covered, exceeded or not enforced.
fn overcommitted(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    for budget in &snapshot.budgets {
        let namespace = budgets::namespace(budget);
        let conditions = budget
            .status
            .as_ref()
            .map_or(&[][..], |status| &status.conditions);
        let (warn, fail) = (Level::Warn, Level::Fail);
        for (type_, status, level, check, remedy) in [
            (
                budget_names::COVERED,
                "False",
                warn,
                "Overcommitted",
                "lower guarantees, or add GPUs",
            ),
            (
                budget_names::EXCEEDED,
                "True",
                warn,
                "Exceeded",
                "raise the budget, or delete pods",
            ),
            (
                budget_names::ENFORCED,
                "False",
                fail,
                "QuotaPending",
                "wait some seconds; then check that the controller manager and the operator run",
            ),
        ] {
            let found = condition(conditions, type_).filter(|found| found.status == status);
            if let Some(found) = found {
                let text = format!("budget of {namespace}: {}: {}", found.reason, found.message);
                findings.push(Finding::new(level, check, text, remedy));
            }
        }
    }
    if findings.is_empty() && !snapshot.budgets.is_empty() {
        findings.push(Finding::ok(
            "Overcommitted",
            format!(
                "{} in force and covered",
                count(snapshot.budgets.len(), "budget")
            ),
        ));
    }
    findings
}

/// Nodes whose clock differs from the API server's.
fn clocks(snapshot: &Snapshot) -> Vec<Finding> {
    if !snapshot.has_all(Kind::Leases) || snapshot.leases.is_empty() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for lease in &snapshot.leases {
        let name = &lease.metadata.name;
        let Some(renewed) = lease.spec.renew_time else {
            continue;
        };
        let ahead = renewed.as_second() - snapshot.now.as_second();
        // The Lease of a node that is away is old whatever its clock says.
        let is_ready = snapshot
            .node(name)
            .is_some_and(crate::objects::Node::is_ready);
        let text = if ahead > SKEW_SECONDS {
            format!("{name}: its clock is {ahead}s ahead of the API server's")
        } else if is_ready && -ahead > RENEWAL_SECONDS + SKEW_SECONDS {
            format!(
                "{name}: its clock is at least {}s behind the API server's",
                -ahead - RENEWAL_SECONDS
            )
        } else {
            continue;
        };
        findings.push(Finding::new(
            Level::Warn,
            "ClockSkew",
            text,
            "synchronise the node's clock (chrony, NTP)",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            "ClockSkew",
            "the nodes' clocks agree with the API server's",
        ));
    }
    findings
}
