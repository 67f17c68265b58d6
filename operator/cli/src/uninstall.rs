//! Lists what an uninstall leaves behind.

use std::collections::BTreeSet;

use bursar_crds::resources::{BUDGET_LABEL, PREFIX};

use crate::amounts::count;
use crate::objects::{Meta, Node};
use crate::snapshot::{Kind, Snapshot};
use crate::table::{Style, Terminal};

/// Objects of one kind that stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remainder {
    /// The objects that stay.
    pub text: String,
    /// The command that removes it.
    pub command: String,
}

/// The objects that would stay, in the order of the commands that remove them.
pub fn remainders(snapshot: &Snapshot) -> Vec<Remainder> {
    let mut found = Vec::new();
    let mut add = |number: usize, noun: &str, what: &str, command: &str| {
        if number > 0 {
            found.push(Remainder {
                text: format!("{} {what}", count(number, noun)),
                command: command.to_owned(),
            });
        }
    };
    let pods = snapshot.pods.iter().filter(|pod| !pod.has_ended()).count();
    add(
        pods,
        "pod",
        "with GPU memory: without the agent they get no more memory",
        "kubectl bursar uninstall --notify tells them; delete them: kubectl bursar top -A",
    );
    add(
        snapshot.budgets.len(),
        "budget",
        "that the chart keeps, with their two quotas each",
        "kubectl delete gpumemorybudgets -A --all, while the operator runs",
    );
    add(
        snapshot.quotas.len(),
        "quota",
        "of budgets",
        "kubectl delete resourcequota -A -l bursar.dev/quota",
    );
    let workloads = snapshot.daemon_sets.iter().chain(&snapshot.deployments);
    let releases: BTreeSet<(&str, &str)> = workloads
        .map(|workload| release(&workload.metadata))
        .collect();
    for (release, namespace) in releases {
        let command = format!("helm uninstall {release} --namespace {namespace}");
        add(1, "release", "of the chart", &command);
    }
    let labelled = snapshot
        .namespaces
        .iter()
        .filter(|namespace| namespace.metadata.labels.contains_key(BUDGET_LABEL))
        .count();
    add(
        labelled,
        "namespace",
        "with a label of Bursar",
        "kubectl label namespace --all bursar.dev/budget-",
    );
    let nodes = snapshot.nodes.iter();
    let labelled = nodes
        .clone()
        .filter(|node| own_labels(node).next().is_some())
        .count();
    let keys: BTreeSet<&String> = nodes.flat_map(own_labels).collect();
    let keys = keys.iter().map(|key| format!(" {key}-"));
    add(
        labelled,
        "node",
        "with labels of Bursar",
        &format!("kubectl label node --all{}", keys.collect::<String>()),
    );
    add(
        snapshot.gpu_nodes.len(),
        "GpuNode",
        "",
        "kubectl delete gpunodes --all",
    );
    // A list that the API server answers, even an empty one, shows that it has the CRD.
    let has_crd = |kind| snapshot.has_all(kind) && !snapshot.absent.contains(&kind);
    if has_crd(Kind::GpuNodes) || has_crd(Kind::Budgets) {
        found.push(Remainder {
            text: "the CRDs, which the chart keeps".to_owned(),
            command: "kubectl delete crd gpumemorybudgets.bursar.dev gpunamespaces.bursar.dev \
                      gpunodes.bursar.dev"
                .to_owned(),
        });
        found.push(Remainder {
            text: "on each node: /var/lib/bursar and /run/bursar, or node.stateDir and node.runDir, and bursar.dev-*.json in the CDI folder; the API does not tell".to_owned(),
            command: "remove these folders and files, or replace the nodes".to_owned(),
        });
    }
    found
}

/// The name and the namespace of the release that a workload belongs to.
fn release(workload: &Meta) -> (&str, &str) {
    let release = workload.labels.get("app.kubernetes.io/instance");
    (
        release.map_or("bursar", String::as_str),
        &workload.namespace,
    )
}

/// The labels of Bursar on a node.
fn own_labels(node: &Node) -> impl Iterator<Item = &String> {
    let keys = node.metadata.labels.keys();
    keys.filter(|key| key.starts_with(PREFIX))
}

/// The remainders as text.
pub fn render(snapshot: &Snapshot, terminal: Terminal) -> String {
    let found = remainders(snapshot);
    let mut text = String::new();
    for (number, remainder) in found.iter().enumerate() {
        let warning = Style::Warning.paint(remainder.text.trim_end(), terminal);
        text.push_str(&format!(
            "{}. {warning}\n        {}\n",
            number + 1,
            remainder.command
        ));
    }
    for note in snapshot.unread_notes() {
        text.push_str(&note);
        text.push('\n');
    }
    if found.is_empty() && snapshot.unread.is_empty() {
        text.push_str("Nothing of Bursar is left in the API.\n");
    }
    text
}
