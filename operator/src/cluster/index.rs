//! What the operator knows of the cluster: a pure index over what its watches tell.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::budget::ContextPolicy;
use bursar_crds::gpu_node::{ContextOrder, MAX_CONTEXTS, MAX_RESTARTS, NamespaceUse, RestartOrder};
use bursar_crds::{DEFAULT_COHORT, Quantum};
use kube::runtime::watcher::Event;
use tokio::time::Instant;

use super::aggregates::{Member, Tally};
use super::cache::{Entry, Key, Mirror};
use super::node_liveness::Absence;
use super::projections::{Claim, Gpus, Host, OpenFault};
use crate::budget::{Facts, Quota, Remedy, Sufferer, Which, is_enforced, remedy};
use crate::cluster::on_node::there;
use crate::cluster::pod_request::Demand;
use crate::nodes::ssa_diff::has_to_be_written;
use crate::placement::{Landscape, Told};
use crate::quanta::Quanta;

/// What is watched, as probes, logs and metrics call it.
pub mod kinds {
    /// What namespaces may use.
    pub const BUDGETS: &str = "GpuMemoryBudgets";
    /// What asks.
    pub const PODS: &str = "Pods";
    /// What there is.
    pub const GPU_NODES: &str = "GpuNodes";
    /// Which cohort it belongs to.
    pub const NODES: &str = "Nodes";
    /// What refuses pods.
    pub const QUOTAS: &str = "ResourceQuotas";
    /// Which namespaces are labelled.
    pub const NAMESPACES: &str = "Namespaces";
    /// All of them.
    pub const ALL: [&str; 6] = [BUDGETS, PODS, GPU_NODES, NODES, QUOTAS, NAMESPACES];
}

/// So many namespaces' orders about poisoned contexts are on every node, 250 bytes each with who manages what of it; of
/// more a node has those that it needs, for each of its agent's writes is one of the whole object.
const EVERYWHERE: usize = 32;

/// What a node is ordered about poisoned contexts: by namespace, and of single ones.
pub type ContextOrders = (Arc<Vec<ContextOrder>>, Vec<RestartOrder>);

/// One event of one watch.
#[derive(Debug)]
pub enum Change {
    /// Of the budgets.
    Budget(Event<Entry<Claim>>),
    /// Of the pods.
    Pod(Event<Entry<Demand>>),
    /// Of the nodes' GPUs.
    GpuNode(Event<Entry<Gpus>>),
    /// Of the nodes.
    Node(Event<Entry<Host>>),
    /// Of the operator's quotas.
    Quota(Event<Entry<Quota>>),
    /// Of the namespaces that are labelled as having a budget.
    Namespace(Event<Entry<String>>),
    /// What placement is told of the same.
    Placement(Told),
    /// Of the objects of a kind that cannot be read, each with why.
    Unreadable(&'static str, Event<Entry<String>>),
    /// The operator's monotonic clock has come so far.
    Clock(Instant),
}

/// The budgets whose status may have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    all: bool,
    namespaces: BTreeSet<String>,
}

impl Dirty {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        !self.all && self.namespaces.is_empty()
    }

    /// Adds those of `other`.
    pub fn add(&mut self, other: Self) {
        let Self { all, namespaces } = other;
        self.all |= all;
        self.namespaces.extend(namespaces);
    }
}

/// Everything that is known.
#[derive(Debug)]
pub struct World {
    quantum: Quantum,
    budgets: Mirror<Claim>,
    budget_lists: u64,
    pods: Mirror<Demand>,
    gpu_nodes: Mirror<Gpus>,
    hosts: Mirror<Host>,
    absence: Absence,
    quotas: Mirror<Quota>,
    labels: Mirror<String>,
    tally: Tally,
    landscape: Landscape,
    unreadable: BTreeMap<&'static str, Mirror<String>>,
}

impl World {
    /// Nothing is known yet.
    pub fn new(quantum: Quantum) -> Self {
        Self {
            quantum,
            budgets: Mirror::default(),
            budget_lists: 0,
            pods: Mirror::default(),
            gpu_nodes: Mirror::default(),
            hosts: Mirror::default(),
            absence: Absence::default(),
            quotas: Mirror::default(),
            labels: Mirror::default(),
            tally: Tally::default(),
            landscape: Landscape::default(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Takes in one event and says which budgets it may concern.
    pub fn apply(&mut self, change: Change) -> Dirty {
        match change {
            Change::Budget(event) => {
                self.budget_lists += u64::from(matches!(event, Event::InitDone));
                let changed = self.budgets.apply(event);
                let mut all = false;
                for (key, before) in &changed {
                    all |= self.tally.budget(before.as_ref(), self.budgets.get(key));
                }
                Dirty {
                    all,
                    namespaces: namespaces(changed),
                }
            }
            Change::Pod(event) => {
                let changed = self.pods.apply(event);
                for (key, before) in &changed {
                    let now = self.pods.get(key);
                    self.tally.pod(&key.namespace, before.as_ref(), now);
                }
                Dirty {
                    all: false,
                    namespaces: namespaces(changed),
                }
            }
            Change::GpuNode(event) => self.gpu_node(event),
            Change::Node(event) => self.host(event),
            Change::Quota(event) => Dirty {
                all: false,
                namespaces: namespaces(self.quotas.apply(event)),
            },
            Change::Namespace(event) => {
                let changed = self.labels.apply(event);
                Dirty {
                    all: false,
                    namespaces: changed.into_iter().map(|(key, _)| key.name).collect(),
                }
            }
            Change::Placement(told) => {
                self.landscape.apply(told);
                Dirty::default()
            }
            Change::Unreadable(kind, event) => {
                self.unreadable.entry(kind).or_default().apply(event);
                Dirty::default()
            }
            Change::Clock(now) => self.pass(now),
        }
    }

    /// What a node offers concerns every budget; what is said of a namespace there, that one's.
    fn gpu_node(&mut self, event: Event<Entry<Gpus>>) -> Dirty {
        let mut dirty = Dirty::default();
        for (key, before) in self.gpu_nodes.apply(event) {
            let host = self.hosts.get(&key).cloned();
            dirty.all |= self.count(&key, before.as_ref(), host.as_ref());
            match concerned(before.as_ref(), self.gpu_nodes.get(&key)) {
                Some(namespaces) => dirty
                    .namespaces
                    .extend(namespaces.into_iter().map(str::to_owned)),
                None => dirty.all = true,
            }
        }
        dirty
    }

    /// A node's cohort concerns every budget.
    fn host(&mut self, event: Event<Entry<Host>>) -> Dirty {
        let mut dirty = Dirty::default();
        for (key, before) in self.hosts.apply(event) {
            let gpus = self.gpu_nodes.get(&key).cloned();
            dirty.all |= self.count(&key, gpus.as_ref(), before.as_ref());
            dirty.all |= cohort_of(before.as_ref()) != cohort_of(self.hosts.get(&key));
        }
        dirty
    }

    /// The memory of nodes that are dead by now counts no more, which concerns every budget.
    fn pass(&mut self, now: Instant) -> Dirty {
        let died = self.absence.pass(now);
        for key in &died {
            let cohort = cohort_of(self.hosts.get(key));
            let member = |is_dead| {
                let gpus = self.gpu_nodes.get(key)?;
                Some(Member {
                    gpus,
                    cohort,
                    is_dead,
                })
            };
            self.tally.node(key, member(false), member(true));
        }
        Dirty {
            all: !died.is_empty(),
            namespaces: BTreeSet::new(),
        }
    }

    /// Counts a node as it is now in place of what it was. Says whether it has come back to life.
    fn count(&mut self, key: &Key, gpus: Option<&Gpus>, host: Option<&Host>) -> bool {
        let was_dead = self.absence.is_dead(key);
        let member = |gpus, host, is_dead| {
            Some(Member {
                gpus: gpus?,
                cohort: cohort_of(host),
                is_dead,
            })
        };
        let before = member(gpus, host, was_dead);
        let (gpus, host) = (self.gpu_nodes.get(key), self.hosts.get(key));
        // A node without GPUs is not missed.
        let lives = gpus.is_none() || host.is_some_and(|host| host.lives);
        self.absence.see(key, lives);
        let is_dead = self.absence.is_dead(key);
        self.tally.node(key, before, member(gpus, host, is_dead));
        was_dead && !is_dead
    }

    /// Whether something changes with time alone.
    pub fn awaits_time(&self) -> bool {
        self.absence.awaits_time()
    }

    /// The objects that cannot be read, by kind.
    pub fn unreadable(&self) -> impl Iterator<Item = (&'static str, &Key)> {
        let kinds = self.unreadable.iter();
        kinds.flat_map(|(kind, all)| all.iter().map(|(key, _)| (*kind, key)))
    }

    /// Whether an object of this kind is known as one that cannot be read.
    pub fn is_unreadable(&self, kind: &str, key: &Key) -> bool {
        let of_kind = self.unreadable.get(kind);
        of_kind.is_some_and(|all| all.get(key).is_some())
    }

    /// How many nodes' memory counts in no cohort, by reason.
    pub fn nodes_left_out(&self) -> BTreeMap<&'static str, i64> {
        let mut counts = BTreeMap::new();
        for (_, cohort) in self.tally.cohorts() {
            for (_, why) in cohort.left_out {
                *counts.entry(why.reason()).or_default() += 1;
            }
        }
        counts
    }

    /// What placement knows.
    pub fn landscape(&self) -> &Landscape {
        &self.landscape
    }

    /// The kinds that have not been listed yet. A status is computed only when there are none.
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [
            (kinds::BUDGETS, self.budgets.is_listed()),
            (kinds::PODS, self.pods.is_listed()),
            (kinds::GPU_NODES, self.gpu_nodes.is_listed()),
            (kinds::NODES, self.hosts.is_listed()),
            (kinds::QUOTAS, self.quotas.is_listed()),
            (kinds::NAMESPACES, self.labels.is_listed()),
        ];
        let missing = all.into_iter().filter(|(_, listed)| !listed);
        missing.map(|(kind, _)| kind).collect()
    }

    /// The budgets that `dirty` means, as far as they exist.
    pub fn budgets(&self, dirty: &Dirty) -> Vec<Key> {
        let concerned = |key: &&Key| dirty.all || dirty.namespaces.contains(&key.namespace);
        self.budgets
            .iter()
            .map(|(key, _)| key)
            .filter(concerned)
            .cloned()
            .collect()
    }

    /// How often the budgets were listed.
    pub fn budget_lists(&self) -> u64 {
        self.budget_lists
    }

    /// Whether there is a budget called `key`.
    pub fn has_budget(&self, key: &Key) -> bool {
        self.budgets.get(key).is_some()
    }

    /// What the status of the budget of `namespace` is computed from, with the budget in `cohort`.
    pub fn facts(&self, namespace: &str, cohort: &str) -> Facts {
        let pods = || self.pods.within(namespace);
        let label = self.labels.get(&Key::cluster_scoped(namespace));
        Facts {
            quantum: self.quantum,
            usage: pods().map(|(_, demand)| demand).collect(),
            pods: pods()
                .map(|(key, demand)| (key.name.clone(), demand.clone()))
                .collect(),
            refused: BTreeMap::new(),
            exceeded_for: Duration::ZERO,
            sufferers: self.sufferers(namespace),
            jobs: BTreeMap::new(),
            told: self.told(namespace).collect(),
            cohort: self.tally.cohort(cohort),
            guaranteed_quota: self.quota(namespace, Which::Guaranteed),
            limit_quota: self.quota(namespace, Which::Limit),
            labelled: label.is_some_and(|label| is_enforced(label)),
        }
    }

    fn quota(&self, namespace: &str, which: Which) -> Option<Quota> {
        let key = Key {
            namespace: namespace.to_owned(),
            name: which.name().to_owned(),
        };
        self.quotas.get(&key).cloned()
    }

    /// The namespaces that are labelled as having a budget and have none. None is named before all is known.
    pub fn deserted(&self) -> Vec<String> {
        if !self.missing().is_empty() {
            return Vec::new();
        }
        let labelled = self.labels.iter().map(|(key, _)| &key.name);
        let unreadable = self.unreadable.get(kinds::BUDGETS);
        let is_there = |namespace: &str| {
            let unreadable = unreadable.and_then(|all| all.within(namespace).next());
            self.budgets.within(namespace).next().is_some() || unreadable.is_some()
        };
        labelled
            .filter(|namespace| !is_there(namespace))
            .cloned()
            .collect()
    }

    /// What is to be done about poisoned contexts, by namespace; of namespaces where it is what an agent does unasked
    /// there is nothing.
    fn contexts(&self) -> Vec<ContextOrder> {
        let claims = self.budgets.iter();
        let claims = claims.filter(|(_, claim)| claim.contexts != ContextPolicy::default());
        let orders = claims.map(|(key, claim)| ContextOrder {
            namespace: key.namespace.clone(),
            action: claim.contexts.action,
            max_restarts: claim.contexts.max_restarts,
            window_seconds: claim.contexts.window_seconds,
        });
        orders.collect()
    }

    /// Drops the orders that were `written` to nodes that are gone: autoscalers never reuse a name.
    pub fn keep_known(&self, written: &mut BTreeMap<String, ContextOrders>) {
        let names: BTreeSet<&str> = self
            .gpu_nodes
            .iter()
            .map(|(key, _)| key.name.as_str())
            .collect();
        written.retain(|node, _| names.contains(node.as_str()));
    }

    /// The nodes that lack something of what is to be ordered there about poisoned contexts, or still have what was
    /// `written` to them and is wrong by now, with their objects' UIDs and what is to be ordered.
    pub fn nodes_without(
        &self,
        written: &BTreeMap<String, ContextOrders>,
    ) -> Vec<(String, String, ContextOrders)> {
        let all = Arc::new(self.contexts());
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let nodes = nodes.filter_map(|(key, node)| {
            let (orders, due) = (self.contexts_at(&key.name, &all), self.restarts(node));
            let (contexts, restarts) = written
                .get(&key.name)
                .map(|(contexts, restarts)| (contexts.as_ref(), restarts))
                .unzip();
            // What is right stays until something else is written, though no pod needs it: the next one may.
            let idle = |one: &ContextOrder| {
                !orders.contains(one) && order_of(&all, &one.namespace) == Some(one)
            };
            let differs = node.contexts != *orders && {
                let there = node.contexts.iter().filter(|one| !idle(one));
                has_to_be_written(&there.cloned().collect::<Vec<_>>(), &orders, contexts)
            };
            let differs = differs || has_to_be_written(&node.restarts, &due, restarts);
            differs.then(|| (key.name.clone(), node.uid.clone(), (orders, due)))
        });
        nodes.collect()
    }

    /// Those of `all` orders that a node gets: as long as they are few all of them, otherwise those of the namespaces
    /// that have pods there.
    fn contexts_at(&self, node: &str, all: &Arc<Vec<ContextOrder>>) -> Arc<Vec<ContextOrder>> {
        if all.len() <= EVERYWHERE {
            return all.clone();
        }
        let here = self.tally.placed(node);
        let here = here.filter_map(|namespace| order_of(all, namespace));
        Arc::new(here.take(MAX_CONTEXTS).cloned().collect())
    }

    /// The contexts on a node that were left poisoned and are to be restarted by what the budgets say now.
    fn restarts(&self, node: &Gpus) -> Vec<RestartOrder> {
        let due = node.faults.iter().filter_map(|OpenFault { fault, .. }| {
            let container = fault.container.as_ref()?;
            let policy = self.context_policy(&container.namespace);
            (remedy(fault, &policy) == Some(Remedy::Restart)).then(|| RestartOrder {
                fault: fault.id.clone(),
                pod_uid: container.pod_uid.clone(),
                container: container.container.clone(),
                process_generation: container.process_generation.saturating_add(1),
            })
        });
        due.take(MAX_RESTARTS).collect()
    }

    fn context_policy(&self, namespace: &str) -> ContextPolicy {
        let claim = self.budgets.within(namespace).next();
        claim
            .map(|(_, claim)| claim.contexts.clone())
            .unwrap_or_default()
    }

    /// The pods of a namespace that suffer from faults.
    fn sufferers(&self, namespace: &str) -> Vec<Sufferer> {
        let mut sufferers = Vec::new();
        let nodes = self.tally.suffering(namespace).into_iter();
        let nodes = nodes.filter_map(|key| Some((&key.name, self.gpu_nodes.get(key)?)));
        let faults = nodes.flat_map(|(node, gpus)| gpus.faults.iter().map(move |one| (node, one)));
        for (node, OpenFault { fault, pods }) in faults {
            let of_container = fault
                .container
                .iter()
                .filter(|container| container.namespace == namespace)
                .map(|container| &container.pod_uid);
            let uids: BTreeSet<&String> = of_container.chain(pods).collect();
            if uids.is_empty() {
                continue;
            }
            let suffers = self.pods.within(namespace);
            let suffers = suffers.filter(|(_, demand)| uids.contains(&demand.uid));
            sufferers.extend(suffers.filter_map(|(key, demand)| {
                Some(Sufferer {
                    pod: key.name.clone(),
                    demand: there(node, demand)?.cloned(),
                    fault: fault.clone(),
                    seen_for: Duration::ZERO,
                })
            }));
        }
        sufferers
    }

    /// What nodes say of a namespace, each with whether a pod of it is there.
    fn told(&self, namespace: &str) -> impl Iterator<Item = (&NamespaceUse, bool)> {
        let nodes = self.tally.saying(namespace);
        let uses = nodes.flat_map(move |key| {
            let is_there = self.tally.is_placed(&key.name, namespace);
            let uses = self.gpu_nodes.get(key).map(|node| node.namespaces.iter());
            uses.into_iter().flatten().map(move |one| (one, is_there))
        });
        uses.filter(move |(one, _)| one.namespace == namespace)
    }

    /// Each cohort's guarantees and memory, in bytes.
    pub fn cohorts(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        let bytes = |amount: Quanta| amount.bytes(self.quantum);
        let cohorts = self.tally.cohorts();
        cohorts.map(move |(name, sum)| (name, bytes(sum.guaranteed), bytes(sum.allocatable)))
    }

    /// How many nodes have each condition in each status.
    pub fn nodes_by_condition(&self) -> BTreeMap<(&str, &str), i64> {
        let mut counts = BTreeMap::new();
        let conditions = self.gpu_nodes.iter().flat_map(|(_, node)| &node.conditions);
        for (type_, status) in conditions {
            *counts.entry((type_.as_str(), status.as_str())).or_default() += 1;
        }
        counts
    }
}

/// The order of a namespace, among orders that are sorted by it.
fn order_of<'a>(orders: &'a [ContextOrder], namespace: &str) -> Option<&'a ContextOrder> {
    let at = orders.binary_search_by(|one| one.namespace.as_str().cmp(namespace));
    at.ok().map(|at| &orders[at])
}

fn cohort_of(host: Option<&Host>) -> &str {
    let label = host.and_then(|host| host.cohort.as_deref());
    label.unwrap_or(DEFAULT_COHORT)
}

/// The namespaces that a node's change concerns; none where it may concern all.
fn concerned<'a>(before: Option<&'a Gpus>, now: Option<&'a Gpus>) -> Option<BTreeSet<&'a str>> {
    let (before, now) = before.zip(now)?;
    let mut both = before.concerned()?;
    both.extend(now.concerned()?);
    (before.offer == now.offer).then_some(both)
}

fn namespaces<V>(changed: Vec<Entry<V>>) -> BTreeSet<String> {
    changed.into_iter().map(|(key, _)| key.namespace).collect()
}

#[cfg(test)]
mod tests;
