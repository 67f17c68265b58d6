//! Sums by namespace the node's memory that pods use, and their denials and faults: pure.
//!
//! Usage changes all the time, so the agent reports each minute's peak in whole quanta. A status is
//! thus written at most once a minute for it. Denials and faults are counted for good: the counts
//! outlive the containers and, through a file, the agent.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{MAX_NAMESPACES, NamespaceUse};
use bursar_crds::numbers::{to_i32, to_i64};
use bursar_ledger::units::{AllocationId, Bytes, Quantum};
use bursar_node::allocator::BoundContainer;
use bursar_sessions::{Account, ContainerUsage, by_allocation};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// How long usage is observed before it is reported.
const REPORT_WINDOW: Duration = Duration::from_secs(60);

/// Counts of a namespace or a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct EventCounts {
    denials: u64,
    poisoned: u64,
    restarts: u64,
}

impl EventCounts {
    fn of(container: &ContainerUsage) -> EventCounts {
        EventCounts {
            denials: container.denied.iter().map(|(_, count)| count).sum(),
            poisoned: container.poisoned_images,
            restarts: container.ordered_restarts,
        }
    }

    /// Adds the increase from `before` to `now`; a smaller count has started over.
    fn add_increase(&mut self, before: EventCounts, now: EventCounts) {
        let more = |before: u64, now: u64| if now < before { now } else { now - before };
        let add = |sum: u64, before, now| sum.saturating_add(more(before, now));
        self.denials = add(self.denials, before.denials, now.denials);
        self.poisoned = add(self.poisoned, before.poisoned, now.poisoned);
        self.restarts = add(self.restarts, before.restarts, now.restarts);
    }
}

/// The counts that are stored in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PersistedUsage {
    namespaces: BTreeMap<String, EventCounts>,
    /// The counts of each present container that are already added.
    containers: BTreeMap<AllocationId, EventCounts>,
}

/// Bytes in use, by kind of memory.
#[derive(Clone, Copy, Debug, Default)]
struct BytesInUse {
    device: Bytes,
    managed: Bytes,
}

impl BytesInUse {
    /// The bytes that a container's accounts have.
    fn of(container: &ContainerUsage) -> BytesInUse {
        let mut sum = BytesInUse::default();
        for balance in &container.accounts {
            let kind = match balance.account {
                Account::Gpu(_) => &mut sum.device,
                Account::Managed => &mut sum.managed,
            };
            *kind = Bytes(kind.0.saturating_add(balance.in_use().0));
        }
        sum
    }

    fn plus(self, other: BytesInUse) -> BytesInUse {
        BytesInUse {
            device: Bytes(self.device.0.saturating_add(other.device.0)),
            managed: Bytes(self.managed.0.saturating_add(other.managed.0)),
        }
    }

    /// The larger amount of each kind.
    fn max(self, other: BytesInUse) -> BytesInUse {
        BytesInUse {
            device: self.device.max(other.device),
            managed: self.managed.max(other.managed),
        }
    }
}

/// The usage and the counts of the node's namespaces.
#[derive(Debug)]
pub(crate) struct NamespaceUsage {
    quantum: Quantum,
    persisted: PersistedUsage,
    /// Each namespace's peak in this window, and the window's start.
    peak: BTreeMap<String, BytesInUse>,
    window_start: Option<Instant>,
    /// The usage of the last window, and the denials at its end, which change too often for each
    /// status.
    last_window: BTreeMap<String, NamespaceUse>,
}

impl NamespaceUsage {
    /// Continues from the counts of the previous agent.
    pub(crate) fn new(quantum: Quantum, persisted: PersistedUsage) -> NamespaceUsage {
        NamespaceUsage {
            quantum,
            persisted,
            peak: BTreeMap::new(),
            window_start: None,
            last_window: BTreeMap::new(),
        }
    }

    /// The counts to store.
    pub(crate) fn persisted(&self) -> &PersistedUsage {
        &self.persisted
    }

    /// Adds the node's containers with their accounts.
    pub(crate) fn observe(
        &mut self,
        containers: &[BoundContainer],
        usage: &[ContainerUsage],
        now: Instant,
    ) {
        let mut used: BTreeMap<&str, BytesInUse> = BTreeMap::new();
        let mut present = BTreeSet::new();
        let usage = by_allocation(usage);
        for container in containers {
            let container_usage = usage.get(&container.allocation);
            let holder = container.name.as_ref();
            let pod = holder.and_then(|holder| holder.pod.as_ref());
            let (Some(container_usage), Some(pod)) = (container_usage, pod) else {
                continue;
            };
            present.insert(container.allocation);
            let sum = used.entry(&pod.namespace).or_default();
            *sum = sum.plus(BytesInUse::of(container_usage));
            let (before, now) = (
                self.persisted
                    .containers
                    .insert(container.allocation, EventCounts::of(container_usage)),
                EventCounts::of(container_usage),
            );
            let counts = self.persisted.namespaces.entry(pod.namespace.clone());
            counts
                .or_default()
                .add_increase(before.unwrap_or_default(), now);
        }
        self.persisted
            .containers
            .retain(|allocation, _| present.contains(allocation));
        for (namespace, bytes) in used {
            let most = self.peak.entry(namespace.to_owned()).or_default();
            *most = most.max(bytes);
        }
        let window_start = *self.window_start.get_or_insert(now);
        if now.duration_since(window_start) >= REPORT_WINDOW {
            self.window_start = Some(now);
            self.close_window();
        }
    }

    /// Ends the window and keeps its figures.
    fn close_window(&mut self) {
        self.drop_idle();
        let most = std::mem::take(&mut self.peak);
        let rounded_up = |bytes: Bytes| to_i32(bytes.0.div_ceil(self.quantum.bytes()));
        let namespaces = self.persisted.namespaces.iter();
        let figures = namespaces.map(|(namespace, counts)| {
            let most = most.get(namespace).copied().unwrap_or_default();
            let used = NamespaceUse {
                namespace: namespace.clone(),
                observed: rounded_up(most.device),
                observed_managed: rounded_up(most.managed),
                denials: to_i64(counts.denials),
                ..NamespaceUse::default()
            };
            (namespace.clone(), used)
        });
        self.last_window = figures.collect();
    }

    /// Above the status's limit, drops namespaces that used nothing in the window.
    fn drop_idle(&mut self) {
        let mut over = self
            .persisted
            .namespaces
            .len()
            .saturating_sub(MAX_NAMESPACES);
        let most = &self.peak;
        self.persisted.namespaces.retain(|namespace, _| {
            let is_dropped = over > 0 && !most.contains_key(namespace);
            over -= usize::from(is_dropped);
            !is_dropped
        });
    }

    /// The last window's usage and denials, and the present counts of faults.
    pub(crate) fn report(&self) -> Vec<NamespaceUse> {
        let namespaces = self.persisted.namespaces.iter();
        let reports = namespaces.filter_map(|(namespace, counts)| {
            let last = self.last_window.get(namespace).cloned();
            // A namespace without faults is reported after its first window.
            let has_faults = counts.poisoned > 0 || counts.restarts > 0;
            let used = last.or(has_faults.then(NamespaceUse::default))?;
            Some(NamespaceUse {
                namespace: namespace.clone(),
                poisoned: to_i64(counts.poisoned),
                restarts: to_i64(counts.restarts),
                ..used
            })
        });
        reports.collect()
    }
}

#[cfg(test)]
mod tests {
    use bursar_node::checkpoint_state::{ContainerName, PodName};
    use bursar_sessions::AccountBalance;

    use super::*;

    fn container(number: u64, namespace: &str) -> BoundContainer {
        let pod = Some(PodName {
            namespace: namespace.to_owned(),
            name: "p".to_owned(),
        });
        BoundContainer {
            name: Some(ContainerName {
                container: "c".to_owned(),
                pod,
            }),
            ..BoundContainer::with_ids(number, 1)
        }
    }

    fn usage(number: u64, mebibytes: u64, counts: [u64; 3]) -> ContainerUsage {
        let gpu = Account::Gpu("GPU-a".parse().unwrap());
        let account = AccountBalance {
            used: Bytes(mebibytes << 20),
            ..AccountBalance::empty(gpu, Bytes::gib(16))
        };
        let managed = AccountBalance {
            used: Bytes::gib(9),
            ..AccountBalance::empty(Account::Managed, Bytes::gib(16))
        };
        ContainerUsage {
            denied: vec![("f".to_owned(), counts[0])],
            poisoned_images: counts[1],
            ordered_restarts: counts[2],
            ..ContainerUsage::empty(number, vec![account, managed])
        }
    }

    struct Fixture {
        usage: NamespaceUsage,
        start: Instant,
    }

    impl Fixture {
        fn with_persisted(persisted: PersistedUsage) -> Fixture {
            Fixture {
                usage: NamespaceUsage::new(Quantum::Gib1, persisted),
                start: Instant::now(),
            }
        }

        fn observe(&mut self, second: u64, all: &[(u64, &str, u64, [u64; 3])]) {
            let containers: Vec<_> = all
                .iter()
                .map(|entry| container(entry.0, entry.1))
                .collect();
            let usage: Vec<_> = all
                .iter()
                .map(|entry| usage(entry.0, entry.2, entry.3))
                .collect();
            let now = self.start + Duration::from_secs(second);
            self.usage.observe(&containers, &usage, now);
        }

        fn reported(&self) -> Vec<(String, i32, [i64; 3])> {
            let reports = self.usage.report().into_iter();
            let rows = reports.map(|report| {
                let counts = [report.denials, report.poisoned, report.restarts];
                (report.namespace, report.observed, counts)
            });
            rows.collect()
        }
    }

    fn of(namespace: &str, observed: i32, counts: [i64; 3]) -> (String, i32, [i64; 3]) {
        (namespace.to_owned(), observed, counts)
    }

    #[test]
    fn usage_is_the_peak_of_each_minute_in_whole_quanta() {
        let mut fixture = Fixture::with_persisted(PersistedUsage::default());
        fixture.observe(0, &[(1, "a", 1_500, [0; 3]), (2, "a", 1_500, [0; 3])]);
        fixture.observe(30, &[(1, "a", 100, [0; 3]), (3, "b", 1_024, [0; 3])]);
        assert_eq!(fixture.reported(), [], "not before the window is over");
        fixture.observe(60, &[(1, "a", 100, [0; 3])]);
        assert_eq!(fixture.reported(), [of("a", 3, [0; 3]), of("b", 1, [0; 3])]);
        fixture.observe(90, &[(1, "a", 5_000, [0; 3])]);
        assert_eq!(
            fixture.reported()[0],
            of("a", 3, [0; 3]),
            "nothing within a window"
        );
        fixture.observe(120, &[]);
        assert_eq!(fixture.reported(), [of("a", 5, [0; 3]), of("b", 0, [0; 3])]);
    }

    #[test]
    fn managed_memory_has_a_peak_of_its_own() {
        let mut fixture = Fixture::with_persisted(PersistedUsage::default());
        let both = [(1, "a", 1_500, [0; 3]), (2, "a", 100, [0; 3])];
        fixture.observe(0, &both);
        fixture.observe(60, &both[..1]);
        let report = &fixture.usage.report()[0];
        assert_eq!((report.observed, report.observed_managed), (2, 18));
        fixture.observe(90, &both[..1]);
        fixture.observe(120, &[]);
        assert_eq!(fixture.usage.report()[0].observed_managed, 9);
        fixture.observe(180, &[]);
        assert_eq!(fixture.usage.report()[0].observed_managed, 0);
    }

    #[test]
    fn poisonings_are_reported_at_once_and_denials_per_window() {
        let mut fixture = Fixture::with_persisted(PersistedUsage::default());
        fixture.observe(0, &[(1, "a", 1, [7, 1, 1])]);
        assert_eq!(fixture.reported(), [of("a", 0, [0, 1, 1])]);
        fixture.observe(60, &[(1, "a", 1, [9, 2, 1])]);
        assert_eq!(fixture.reported(), [of("a", 1, [9, 2, 1])]);
    }

    #[test]
    fn counts_outlive_containers_and_agents() {
        let mut fixture = Fixture::with_persisted(PersistedUsage::default());
        fixture.observe(0, &[(1, "a", 1, [5, 2, 2])]);
        fixture.observe(1, &[(1, "a", 1, [5, 2, 2]), (2, "a", 1, [1, 1, 0])]);
        fixture.observe(2, &[(2, "a", 1, [1, 1, 0])]);
        let json = serde_json::to_string(fixture.usage.persisted()).unwrap();
        let mut next = Fixture::with_persisted(serde_json::from_str(&json).unwrap());
        // Counts that the sessions do not store start at zero in the next agent.
        next.observe(3, &[(2, "a", 1, [0, 1, 0])]);
        next.observe(4, &[(2, "a", 1, [2, 2, 1])]);
        next.observe(63, &[(2, "a", 1, [2, 2, 1])]);
        assert_eq!(next.reported(), [of("a", 1, [5 + 1 + 2, 4, 3])]);
    }

    #[test]
    fn golden_counts_of_namespaces_are_read() {
        let counts = |denials| EventCounts {
            denials,
            poisoned: 2,
            restarts: 1,
        };
        let persisted = PersistedUsage {
            namespaces: [("team-a".to_owned(), counts(9))].into(),
            containers: [(AllocationId::from_bits(7), counts(4))].into(),
        };
        bursar_host::testing::assert_golden_checkpoint("namespaces.json", &persisted);
    }

    #[test]
    fn counts_of_any_file_are_continued_without_overflow() {
        let counts = r#"{"denials":18446744073709551615,"poisoned":0,"restarts":1}"#;
        let json = format!(r#"{{"namespaces":{{"a":{counts}}}}}"#);
        let mut next = Fixture::with_persisted(serde_json::from_str(&json).unwrap());
        next.observe(0, &[(1, "a", 1, [5, 6, 7])]);
        let sums = next.usage.persisted().namespaces["a"];
        assert_eq!(
            (sums.denials, sums.poisoned, sums.restarts),
            (u64::MAX, 6, 8)
        );
    }

    #[test]
    fn idle_namespaces_are_dropped_when_the_status_is_full() {
        let mut fixture = Fixture::with_persisted(PersistedUsage::default());
        for number in 0..100 {
            let name = format!("n{number}");
            fixture.observe(number * 60, &[(number, &name, 1, [1, 1, 1])]);
        }
        let reported = fixture.reported();
        assert!(reported.len() <= MAX_NAMESPACES + 1, "{}", reported.len());
        assert!(reported.iter().any(|(namespace, ..)| namespace == "n99"));
    }
}
