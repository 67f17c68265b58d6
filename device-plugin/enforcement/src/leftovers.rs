//! Ends processes that outlive their pod.
//!
//! runc sends no signal to a container whose first process has ended its main thread, so that the
//! kubelet waits for such a pod without end. After a forced deletion its processes keep the memory
//! of a pod that nobody can see any more. The operator passes on what the API server knows of the
//! pod; the agent measures the time by its own clock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use bursar_apiserver::{Events, ParsedSpec, Reason};
use bursar_crds::gpu_node::PodSettings;
use bursar_host::pod_cgroups::{container_cgroups, list_processes};
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::PodUid;
use bursar_node::allocator::BoundContainer;
use bursar_sessions::Process;
use tokio::sync::watch;
use tracing::warn;

use super::audit::collect::find_live;
use super::audit::compare::LiveProcess;
use super::audit::events::publish as publish_on_pod;
use super::audit::kill::kill;

/// For how long a pod may have processes after its grace period, or after it is gone from the API.
/// The kubelet kills a container at the end of the grace period, and takes seconds for that.
const ALLOWANCE: Duration = Duration::from_secs(30);

/// Decides which pods should have no process any more: pure.
#[derive(Debug, Default)]
struct PodEnds {
    /// The pods that the operator has listed, each with the time from which it may have no
    /// processes. `None` while the pod exists.
    deadlines: BTreeMap<PodUid, Option<Instant>>,
}

impl PodEnds {
    /// Takes the pods with memory of the node, and those that the operator lists. Returns the pods
    /// whose time is over. A pod that the operator has never listed has no deadline.
    fn update(
        &mut self,
        bound: &BTreeSet<&PodUid>,
        listed: &BTreeMap<String, PodSettings>,
        now: Instant,
    ) -> BTreeSet<PodUid> {
        self.deadlines.retain(|pod, _| bound.contains(pod));
        for pod in bound {
            let remaining = match listed.get(pod.as_str()) {
                Some(settings) => settings.deletion_grace(),
                None if self.deadlines.contains_key(*pod) => Some(Duration::ZERO),
                None => continue,
            };
            let deadline = self.deadlines.entry((*pod).clone()).or_default();
            // A second deletion may shorten the grace period, and never extends it.
            let latest = remaining.map(|remaining| now + remaining + ALLOWANCE);
            *deadline = match (*deadline, latest) {
                (Some(before), Some(latest)) => Some(before.min(latest)),
                (before, latest) => before.or(latest),
            };
        }
        let over = self.deadlines.iter();
        let over = over.filter(|(_, deadline)| deadline.is_some_and(|deadline| deadline <= now));
        over.map(|(pod, _)| pod.clone()).collect()
    }
}

/// The pods that should have ended, and those of them that have not.
#[derive(Debug)]
pub(crate) struct Leftovers {
    /// The spec of the node's `GpuNode`; none before the API server has sent the object.
    spec: watch::Receiver<Option<ParsedSpec>>,
    ends: PodEnds,
    found: BTreeSet<PodUid>,
}

impl Leftovers {
    /// Expects the end of each pod that the operator has marked as deleted in `spec`.
    pub(crate) fn new(spec: watch::Receiver<Option<ParsedSpec>>) -> Self {
        Self {
            spec,
            ends: PodEnds::default(),
            found: BTreeSet::new(),
        }
    }

    /// Ends the leftover processes. Returns the pods with some.
    pub(crate) fn end(
        &mut self,
        proc: &Path,
        containers: &[BoundContainer],
        events: &Events,
    ) -> BTreeSet<PodUid> {
        let spec = self.spec.borrow().clone();
        // A deleted object lists no pods, and does not show which pods have ended.
        if let Some(spec) = spec.filter(|spec| spec.generation.is_some()) {
            let bound = containers.iter().map(|container| &container.pod).collect();
            let mut found = BTreeSet::new();
            for pod in self.ends.update(&bound, &spec.pods, Instant::now()) {
                let processes = processes_of(containers, &pod, proc);
                if processes.is_empty() {
                    continue;
                }
                if !self.found.contains(&pod) {
                    publish(events, containers, &pod, processes.len());
                }
                for process in processes {
                    if let Err(error) = kill(proc, process) {
                        warn!(%pod, pid = process.pid, %error, "failed to kill a leftover process");
                    }
                }
                found.insert(pod);
            }
            self.found = found;
        }
        self.found.clone()
    }
}

/// The live processes of a pod's containers, by the pod's cgroup and each process's own.
fn processes_of(containers: &[BoundContainer], pod: &PodUid, proc: &Path) -> Vec<Process> {
    let mut of_pod = containers.iter().filter(|container| container.pod == *pod);
    let Some(cgroup) = of_pod.find_map(|container| container.cgroup.as_deref()) else {
        return Vec::new();
    };
    let containers = container_cgroups(cgroup).into_iter();
    let pids = containers.flat_map(|container| list_processes(&container).0);
    let process = |pid| {
        // Another process may have got the pid since the list.
        let LiveProcess { start, owner } = find_live(proc, pid, u64::MAX)?;
        let is_own = matches!(&owner, ProcessOwner::Container { pod: owner, .. } if owner == pod);
        is_own.then_some(Process { pid, start })
    };
    pids.filter_map(process).collect()
}

/// Publishes on the pod, which may be gone, and in the log.
fn publish(events: &Events, containers: &[BoundContainer], pod: &PodUid, processes: usize) {
    let message = format!(
        "{processes} of its processes still ran {} s after the pod's end, and kept its GPU memory: killed",
        ALLOWANCE.as_secs()
    );
    warn!(%pod, processes, "killing processes that have outlived their pod");
    let of_pod = containers.iter().find(|container| container.pod == *pod);
    let allocation = of_pod.map(|container| container.allocation);
    publish_on_pod(events, Reason::OutlivedPod, message, allocation, containers);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> PodUid {
        uid.parse().unwrap()
    }

    fn settings(grace: Option<i64>) -> PodSettings {
        PodSettings {
            pod_uid: "a".to_owned(),
            deletion_grace_seconds: grace,
            ..PodSettings::default()
        }
    }

    /// The pods whose time is over after each step: its second, and what the operator lists.
    fn over(steps: &[(u64, Option<PodSettings>)]) -> Vec<bool> {
        let (mut ends, start, pod) = (PodEnds::default(), Instant::now(), pod("a"));
        let step = |(second, settings): &(u64, Option<PodSettings>)| {
            let listed = settings
                .iter()
                .map(|settings| ("a".to_owned(), settings.clone()));
            let now = start + Duration::from_secs(*second);
            let over = ends.update(&BTreeSet::from([&pod]), &listed.collect(), now);
            over.contains(&pod)
        };
        steps.iter().map(step).collect()
    }

    #[test]
    fn live_processes_of_the_pod_alone_are_listed() {
        let root = tempfile::tempdir().unwrap();
        let (cgroup, proc) = (root.path().join("kubepods/poda"), root.path().join("proc"));
        std::fs::create_dir_all(cgroup.join("c0ffee")).unwrap();
        std::fs::write(cgroup.join("c0ffee/cgroup.procs"), "7\n8\n9\n").unwrap();
        // Pid 8 has ended, and another pod has taken pid 9 since the list.
        for (pid, owner) in [(7, "poda"), (9, "podb")] {
            let folder = proc.join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let rest = ["0"; 30].join(" ");
            std::fs::write(folder.join("stat"), format!("{pid} (x) S {rest}")).unwrap();
            std::fs::write(
                folder.join("cgroup"),
                format!("0::/kubepods/{owner}/c0ffee\n"),
            )
            .unwrap();
        }
        let container = BoundContainer {
            pod: pod("a"),
            cgroup: Some(cgroup),
            ..BoundContainer::with_ids(1, 1)
        };
        let found = processes_of(&[container], &pod("a"), &proc);
        assert_eq!(
            found.iter().map(|process| process.pid).collect::<Vec<_>>(),
            [7]
        );
    }

    #[test]
    fn pod_is_over_30_s_after_its_grace() {
        let (lives, ends) = (settings(None), settings(Some(60)));
        let steps = [
            (0, lives.clone()),
            (500, lives),
            (501, ends.clone()),
            (590, ends.clone()),
            (591, ends),
        ];
        assert_eq!(
            over(&steps.map(|(at, settings)| (at, Some(settings)))),
            [false, false, false, false, true]
        );
    }

    #[test]
    fn second_deletion_shortens_the_grace_and_never_extends_it() {
        let steps = [(0, 600), (10, 0), (39, 0), (40, 600)];
        assert_eq!(
            over(&steps.map(|(at, grace)| (at, Some(settings(Some(grace)))))),
            [false, false, false, true]
        );
    }

    #[test]
    fn pod_is_over_30_s_after_it_is_gone() {
        let steps = [(0, Some(settings(None))), (1, None), (30, None), (31, None)];
        assert_eq!(over(&steps), [false, false, false, true]);
    }

    #[test]
    fn pod_that_was_never_listed_is_not_over() {
        assert_eq!(over(&[(0, None), (1_000, None), (2_000, None)]), [false; 3]);
    }
}
