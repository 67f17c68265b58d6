//! Checks what an install needs of the cluster and of each node.

use super::{Finding, Level, version};
use crate::objects::Node;
use crate::snapshot::{Kind, Snapshot};

/// The first version of Kubernetes that the chart supports.
const KUBERNETES: (u32, u32, u32) = (1, 34, 0);
/// The first version of containerd that injects CDI devices without further settings.
const CONTAINERD: (u32, u32, u32) = (2, 0, 0);
/// The first version of CRI-O that injects CDI devices.
const CRIO: (u32, u32, u32) = (1, 28, 0);

/// Looks at the API server and at each node.
pub fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = vec![kubernetes(snapshot)];
    findings.extend(snapshot.nodes.iter().map(node));
    if let Some(reason) = snapshot.unread.get(&Kind::Nodes) {
        findings.push(Finding::new(
            Level::Skip,
            "Rights",
            format!("could not read nodes: {reason}"),
            "run it as an admin of the cluster",
        ));
    }
    findings
}

/// The API server's version.
pub(super) fn kubernetes(snapshot: &Snapshot) -> Finding {
    let Some(server_version) = &snapshot.server_version else {
        return Finding::new(
            Level::Skip,
            "Kubernetes",
            "the API server did not tell its version",
            "see kubectl version",
        );
    };
    match version(server_version) {
        Some(version) if version < KUBERNETES => Finding::new(
            Level::Fail,
            "Kubernetes",
            format!("Kubernetes {server_version} is too old"),
            "Bursar needs Kubernetes 1.34 or later",
        ),
        _ => Finding::ok("Kubernetes", format!("Kubernetes {server_version}")),
    }
}

/// A node's container runtime and its other plugin.
fn node(node: &Node) -> Finding {
    let name = &node.metadata.name;
    let container_runtime = &node.status.node_info.container_runtime_version;
    if let Some(finding) = runtime(node) {
        return finding;
    }
    if let Some((resource, amount)) = node.foreign_gpus().first() {
        return Finding::new(
            Level::Warn,
            "TwoOwners",
            format!("{name}: another plugin offers {amount} {resource}"),
            format!("kubectl label node {name} nvidia.com/gpu.deploy.device-plugin=false"),
        );
    }
    Finding::ok("Runtime", format!("{name}: {container_runtime}"))
}

/// A container runtime that cannot inject CDI devices.
pub(super) fn runtime(node: &Node) -> Option<Finding> {
    let name = &node.metadata.name;
    let container_runtime = &node.status.node_info.container_runtime_version;
    let (runtime, number) = container_runtime.split_once("://")?;
    let (least, needs) = match runtime {
        "containerd" => (CONTAINERD, "containerd 2.0"),
        "cri-o" => (CRIO, "CRI-O 1.28"),
        _ => {
            return Some(Finding::new(
                Level::Warn,
                "Runtime",
                format!("{name}: {container_runtime} was never tried"),
                "Bursar needs containerd 2.0 or CRI-O 1.28",
            ));
        }
    };
    (version(number)? < least).then(|| {
        Finding::new(
            Level::Fail,
            "RuntimeTooOld",
            format!("{name}: {container_runtime} injects no CDI devices"),
            format!("install {needs} or later on the node"),
        )
    })
}
