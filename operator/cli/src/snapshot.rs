//! Defines the objects that a command has read, and what it could not read.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::{GpuMemoryBudget, GpuNode, Quantum};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::agent_metrics::AgentMetrics;
use crate::objects::{Event, Lease, Meta, Named, Node, Pod, Quota, Workload};

/// A kind of object that commands read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// GpuNodes.
    GpuNodes,
    /// GpuNamespaces.
    GpuNamespaces,
    /// GpuMemoryBudgets.
    Budgets,
    /// Pods that request GPU memory.
    Pods,
    /// Bursar's own pods.
    OwnPods,
    /// Bursar's DaemonSets.
    DaemonSets,
    /// Bursar's Deployment.
    Deployments,
    /// Nodes.
    Nodes,
    /// Namespaces.
    Namespaces,
    /// The two ResourceQuotas of budgets.
    Quotas,
    /// Events of the agents.
    AgentEvents,
    /// Events of the operator.
    OperatorEvents,
    /// Leases of the kubelets.
    Leases,
    /// PodMonitors of the Prometheus operator.
    PodMonitors,
    /// NetworkPolicies of Bursar's namespace.
    NetworkPolicies,
    /// MutatingAdmissionPolicies.
    MutatingPolicies,
    /// ClusterRoleBindings of Bursar's accounts.
    ClusterRoleBindings,
    /// Metrics of the agents, through the API server's pod proxy.
    AgentMetrics,
}

impl Kind {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::GpuNodes => "gpunodes",
            Self::GpuNamespaces => "gpunamespaces",
            Self::Budgets => "gpumemorybudgets",
            Self::Pods => "pods",
            Self::OwnPods => "Bursar's own pods",
            Self::DaemonSets => "daemonsets",
            Self::Deployments => "deployments",
            Self::Nodes => "nodes",
            Self::Namespaces => "namespaces",
            Self::Quotas => "resourcequotas",
            Self::AgentEvents | Self::OperatorEvents => "events",
            Self::Leases => "leases of kubelets",
            Self::PodMonitors => "podmonitors",
            Self::NetworkPolicies => "networkpolicies",
            Self::MutatingPolicies => "mutatingadmissionpolicies",
            Self::ClusterRoleBindings => "clusterrolebindings",
            Self::AgentMetrics => "metrics of the agents (pods/proxy)",
        }
    }

    /// The path up to the resource's name, the name, and whether it belongs to a namespace.
    pub fn path(self) -> (&'static str, &'static str, bool) {
        match self {
            Self::GpuNodes => ("/apis/bursar.dev/v1alpha1", "gpunodes", false),
            Self::GpuNamespaces => ("/apis/bursar.dev/v1alpha1", "gpunamespaces", false),
            Self::Budgets => ("/apis/bursar.dev/v1alpha1", "gpumemorybudgets", true),
            Self::Pods | Self::OwnPods | Self::AgentMetrics => ("/api/v1", "pods", true),
            Self::DaemonSets => ("/apis/apps/v1", "daemonsets", true),
            Self::Deployments => ("/apis/apps/v1", "deployments", true),
            Self::Nodes => ("/api/v1", "nodes", false),
            Self::Namespaces => ("/api/v1", "namespaces", false),
            Self::Quotas => ("/api/v1", "resourcequotas", true),
            Self::AgentEvents | Self::OperatorEvents => ("/api/v1", "events", true),
            Self::Leases => ("/apis/coordination.k8s.io/v1", "leases", true),
            Self::PodMonitors => ("/apis/monitoring.coreos.com/v1", "podmonitors", true),
            Self::NetworkPolicies => ("/apis/networking.k8s.io/v1", "networkpolicies", true),
            Self::MutatingPolicies => (
                "/apis/admissionregistration.k8s.io/v1",
                "mutatingadmissionpolicies",
                false,
            ),
            Self::ClusterRoleBindings => (
                "/apis/rbac.authorization.k8s.io/v1",
                "clusterrolebindings",
                false,
            ),
        }
    }

    /// The label selector of the objects that matter.
    pub fn labels(self) -> Option<&'static str> {
        match self {
            Self::OwnPods
            | Self::DaemonSets
            | Self::Deployments
            | Self::NetworkPolicies
            | Self::MutatingPolicies
            | Self::ClusterRoleBindings => Some("app.kubernetes.io/name=bursar"),
            Self::Quotas => Some(bursar_crds::resources::QUOTA_LABEL),
            _ => None,
        }
    }

    /// The field selector of the objects that matter.
    pub fn fields(self) -> Option<&'static str> {
        match self {
            Self::AgentEvents => Some("reportingComponent=bursar-agent"),
            Self::OperatorEvents => Some("reportingComponent=bursar-operator"),
            _ => None,
        }
    }
}

/// An object that this version cannot parse.
#[derive(Clone, Debug, PartialEq)]
pub struct Unreadable {
    /// The kind.
    pub kind: Kind,
    /// `namespace/name`, or the name.
    pub name: String,
    /// The parser's error.
    pub error: String,
}

/// The reason for a kind that the API server does not serve, such as that of a missing CRD.
pub(crate) const ABSENT: &str = "the API server does not have it";

/// The objects that a command has read.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The time of the API server, or of this machine where no response has it.
    pub now: Timestamp,
    /// The namespace of the tenants' objects; `None` is all namespaces.
    pub namespace: Option<String>,
    /// The API server's version, such as `v1.36.3`.
    pub server_version: Option<String>,
    /// The reason for each kind that could not be read, whole or in part.
    pub unread: BTreeMap<Kind, String>,
    /// The kinds of [`Self::allow_absent`] that the API server does not serve.
    pub absent: BTreeSet<Kind>,
    /// Objects that could not be parsed.
    pub unreadable: Vec<Unreadable>,
    /// The GpuNodes, by name.
    pub gpu_nodes: Vec<GpuNode>,
    /// The GpuNamespaces, which tell agents of namespaces.
    pub gpu_namespaces: Vec<Value>,
    /// The budgets.
    pub budgets: Vec<GpuMemoryBudget>,
    /// The pods that request GPU memory, by namespace and name.
    pub pods: Vec<Pod>,
    /// Bursar's own pods.
    pub own_pods: Vec<Pod>,
    /// Bursar's DaemonSets.
    pub daemon_sets: Vec<Workload>,
    /// Bursar's Deployments.
    pub deployments: Vec<Workload>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The namespaces.
    pub namespaces: Vec<Named>,
    /// The quotas of budgets.
    pub quotas: Vec<Quota>,
    /// The Events of agents and operator.
    pub events: Vec<Event>,
    /// The kubelets' Leases.
    pub leases: Vec<Lease>,
    /// PodMonitors.
    pub pod_monitors: Vec<Value>,
    /// Bursar's NetworkPolicies.
    pub network_policies: Vec<Value>,
    /// Bursar's MutatingAdmissionPolicies.
    pub mutating_policies: Vec<Named>,
    /// The metrics of agents, by node.
    pub metrics: BTreeMap<String, AgentMetrics>,
}

impl Snapshot {
    /// Whether all objects of this kind have been read.
    pub fn has_all(&self, kind: Kind) -> bool {
        !self.unread.contains_key(&kind)
    }

    /// Counts those of these kinds that the API server does not serve as read.
    pub fn allow_absent(&mut self, kinds: &[Kind]) {
        for kind in kinds {
            if self.unread.get(kind).is_some_and(|reason| reason == ABSENT) {
                self.unread.remove(kind);
                self.absent.insert(*kind);
            }
        }
    }

    /// A sentence for each kind that could not be read, in whole or in part, without repetitions.
    pub fn unread_notes(&self) -> Vec<String> {
        let mut notes = self.unread_kinds();
        notes.extend(self.unreadable_notes());
        notes
    }

    /// A sentence for each kind with objects that could not be parsed.
    pub fn unreadable_notes(&self) -> Vec<String> {
        let kinds: BTreeSet<Kind> = self.unreadable.iter().map(|object| object.kind).collect();
        let note = |kind: Kind| {
            let mut of_kind = self.unreadable.iter().filter(|object| object.kind == kind);
            let Unreadable { name, error, .. } = of_kind.next()?;
            let more = match of_kind.count() {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            let kind = kind.name();
            Some(format!("could not parse {kind} {name}: {error}{more}"))
        };
        kinds.into_iter().filter_map(note).collect()
    }

    /// A sentence for each kind that could not be read, without repetitions.
    pub fn unread_kinds(&self) -> Vec<String> {
        let mut notes: Vec<String> = Vec::new();
        for (kind, reason) in &self.unread {
            let note = format!("could not read {}: {reason}", kind.name());
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    /// The cluster's quantum: that of a GpuNode, of a budget, or of a pod's request.
    pub fn quantum(&self) -> Quantum {
        let nodes = self.gpu_nodes.iter();
        let nodes = nodes.filter_map(|node| node.status.as_ref()?.quantum.as_ref());
        let budgets = self.budgets.iter();
        let budgets = budgets.filter_map(|budget| budget.status.as_ref()?.quantum.as_ref());
        let reported = nodes.chain(budgets).find_map(|amount| {
            let bytes = amount.bytes().ok()?;
            crate::objects::QUANTA
                .into_iter()
                .find(|quantum| quantum.bytes() == bytes)
        });
        let requested = || {
            let mut pods = self.pods.iter();
            pods.find_map(|pod| Some(pod.gpu_containers().next()?.1.quantum))
        };
        reported.or_else(requested).unwrap_or_default()
    }

    /// The GpuNode of this name.
    pub fn gpu_node(&self, name: &str) -> Option<&GpuNode> {
        let mut nodes = self.gpu_nodes.iter();
        nodes.find(|node| node.metadata.name.as_deref() == Some(name))
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.metadata.name == name)
    }

    /// The budget of a namespace.
    pub fn budget(&self, namespace: &str) -> Option<&GpuMemoryBudget> {
        let mut budgets = self.budgets.iter();
        budgets.find(|budget| budget.metadata.namespace.as_deref() == Some(namespace))
    }

    /// The pod of this name.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<&Pod> {
        let mut pods = self.pods.iter();
        pods.find(|pod| pod.metadata.namespace == namespace && pod.metadata.name == name)
    }

    /// The Events on an object, the newest last.
    pub fn events_on(&self, uid: &str) -> Vec<&Event> {
        let events = self.events.iter();
        let mut found: Vec<&Event> = events
            .filter(|event| event.involved_object.uid == uid)
            .collect();
        found.sort_by_key(|event| event.time());
        found
    }

    /// The namespaces of pods and workloads with Bursar's label, which any tenant can set.
    pub fn labelled_namespaces(&self) -> BTreeSet<String> {
        let workloads = self.daemon_sets.iter().chain(&self.deployments);
        let workloads = workloads.map(|workload| &workload.metadata);
        let metas = workloads.chain(self.own_pods.iter().map(|pod| &pod.metadata));
        let is_labelled = |meta: &&Meta| {
            let name = meta.labels.get("app.kubernetes.io/name");
            name.is_some_and(|name| name == "bursar")
        };
        metas
            .filter(is_labelled)
            .map(|meta| meta.namespace.clone())
            .collect()
    }

    /// Drops Bursar's pods and workloads that are in none of these namespaces.
    pub fn keep_own(&mut self, namespaces: &BTreeSet<String>) {
        let is_own = |meta: &Meta| namespaces.contains(&meta.namespace);
        self.own_pods.retain(|pod| is_own(&pod.metadata));
        self.daemon_sets.retain(|set| is_own(&set.metadata));
        self.deployments
            .retain(|deployment| is_own(&deployment.metadata));
    }

    /// The agent's pod on a node.
    pub fn agent_on(&self, node: &str) -> Option<&Pod> {
        let mut pods = self.own_pods.iter();
        pods.find(|pod| pod.spec.node_name == node && pod.metadata.is_component("agent"))
    }

    /// The DaemonSet of a part of Bursar.
    pub fn daemon_set(&self, component: &str) -> Option<&Workload> {
        let mut all = self.daemon_sets.iter();
        all.find(|set| set.metadata.is_component(component))
    }

    /// The names of pods by UID.
    pub fn pods_by_uid(&self) -> BTreeMap<&str, &Pod> {
        let pods = self.pods.iter();
        pods.map(|pod| (pod.metadata.uid.as_str(), pod)).collect()
    }
}
