//! Decides when denied allocations of a container become an Event, which its owner reads. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_ledger::units::AllocationId;
use bursar_sessions::{Account, ContainerUsage, DeniedAllocation};
use tokio::time::Instant;

/// The time between two Events of a container: a program may retry in a loop.
const EVENT_INTERVAL: Duration = Duration::from_secs(600);

/// The denials of each container that were counted before, and its last Event.
#[derive(Debug, Default)]
pub(crate) struct DenialEvents(BTreeMap<AllocationId, Counted>);

#[derive(Debug, Default)]
struct Counted {
    denials: u64,
    published_at: Option<Instant>,
    /// Whether the last Event was on the pod, not on the node because the pod's name was unknown.
    on_pod: bool,
}

impl DenialEvents {
    /// Returns the message of each container for which an Event is due at `now`. An Event that was
    /// on the node is due again once the container is `named`.
    pub(crate) fn due(
        &mut self,
        usage: &[ContainerUsage],
        named: &BTreeSet<AllocationId>,
        now: Instant,
    ) -> Vec<(AllocationId, String)> {
        let is_running =
            |id: &AllocationId| usage.iter().any(|container| container.allocation == *id);
        self.0.retain(|allocation, _| is_running(allocation));
        let mut due = Vec::new();
        for container in usage {
            let denials: u64 = container.denied.iter().map(|(_, count)| count).sum();
            if denials == 0 {
                continue;
            }
            let counted = self.0.entry(container.allocation).or_default();
            let on_pod = named.contains(&container.allocation);
            let is_new = denials > counted.denials;
            let is_late = counted
                .published_at
                .is_none_or(|at| now.duration_since(at) >= EVENT_INTERVAL);
            let is_due = (is_new && is_late) || (on_pod && !counted.on_pod);
            if let Some(last) = container.last_denied.as_ref().filter(|_| is_due) {
                *counted = Counted {
                    denials,
                    published_at: Some(now),
                    on_pod,
                };
                due.push((container.allocation, message(last, denials)));
            }
        }
        due
    }
}

/// The call, the account at the moment of the denial, and the remedy.
fn message(last: &DeniedAllocation, denials: u64) -> String {
    let DeniedAllocation {
        function,
        account,
        bytes,
        quota,
        free,
    } = last;
    let account = match account {
        Account::Gpu(gpu) => gpu.to_string(),
        Account::Managed => "managed memory".to_owned(),
    };
    let plural = if denials == 1 { "" } else { "s" };
    format!(
        "{function} was denied {bytes} of {account}: {free} of the quota of {quota} are free \
         ({denials} denial{plural} so far); request more in the pod, or free memory in the program"
    )
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::Bytes;

    use super::*;

    fn usage(denials: u64) -> ContainerUsage {
        let account = Account::Gpu("GPU-a".parse().unwrap());
        ContainerUsage {
            denied: vec![("cuMemAlloc_v2".into(), denials)],
            last_denied: (denials > 0).then(|| DeniedAllocation {
                function: "cuMemAlloc_v2".into(),
                account,
                bytes: Bytes::mib(256),
                quota: Bytes::gib(1),
                free: Bytes::mib(220),
            }),
            ..ContainerUsage::empty(1, Vec::new())
        }
    }

    fn named() -> BTreeSet<AllocationId> {
        BTreeSet::from([AllocationId::from_bits(1)])
    }

    #[test]
    fn denial_is_published_again_once_the_pod_has_a_name() {
        let (mut events, now) = (DenialEvents::default(), Instant::now());
        let mut event_count = |named: &BTreeSet<_>| events.due(&[usage(1)], named, now).len();
        assert_eq!(event_count(&BTreeSet::new()), 1, "on the node");
        assert_eq!(event_count(&BTreeSet::new()), 0);
        assert_eq!(event_count(&named()), 1, "on the pod");
        assert_eq!(event_count(&named()), 0);
    }

    #[test]
    fn denial_event_has_call_amounts_and_remedy() {
        let due = DenialEvents::default().due(&[usage(2)], &named(), Instant::now());
        assert_eq!(
            due[0].1,
            "cuMemAlloc_v2 was denied 256 MiB of GPU-a: 220 MiB of the quota of 1 GiB are free \
             (2 denials so far); request more in the pod, or free memory in the program"
        );
    }

    #[test]
    fn denials_of_a_container_are_published_once_in_ten_minutes() {
        let (mut events, start) = (DenialEvents::default(), Instant::now());
        let mut event_count = |denials, second| {
            let now = start + Duration::from_secs(second);
            events.due(&[usage(denials)], &named(), now).len()
        };
        assert_eq!(event_count(0, 0), 0);
        assert_eq!(event_count(1, 1), 1);
        assert_eq!(event_count(99, 2), 0);
        assert_eq!(event_count(99, 600), 0);
        assert_eq!(event_count(99, 601), 1, "of those since the last Event");
        assert_eq!(event_count(99, 1_300), 0, "nothing is new");
        assert_eq!(event_count(100, 1_301), 1);
    }

    #[test]
    fn ended_container_is_forgotten() {
        let (mut events, now) = (DenialEvents::default(), Instant::now());
        assert_eq!(events.due(&[usage(1)], &named(), now).len(), 1);
        assert!(events.due(&[], &named(), now).is_empty());
        assert!(events.0.is_empty());
    }
}
