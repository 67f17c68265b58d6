//! Detects that a program runs again after a fault had poisoned its context. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_ledger::BootTime;
use bursar_ledger::units::AllocationId;
use bursar_sessions::{Fault, ProcessImage, RecoveryAction};

/// How long a restart is awaited. A program may import modules for minutes before it calls CUDA.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// The programs that have not run again yet.
#[derive(Debug, Default)]
pub(crate) struct AwaitedRestarts {
    awaited: BTreeMap<(AllocationId, u64), Awaited>,
}

#[derive(Clone, Debug)]
struct Awaited {
    fault: Fault,
    action: RecoveryAction,
    /// The newest process generation of the container that does not count as a successor.
    generation: u64,
    /// The successor was returned, and the fault is still open.
    is_observed: bool,
}

/// A program that runs again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Restart {
    pub(crate) allocation: AllocationId,
    /// The process generation of the poisoned image.
    pub(crate) before: u64,
    /// The process generation of the new image.
    pub(crate) generation: u64,
    /// The time from the first report of the fault to the new image's session.
    pub(crate) took: Duration,
    /// The reaction of the agent to the fault.
    pub(crate) action: RecoveryAction,
}

impl AwaitedRestarts {
    /// Returns the programs that have run again since the last call. `images` are the live process
    /// images of a container.
    pub(crate) fn observe(
        &mut self,
        open: &[(AllocationId, Fault)],
        images: impl Fn(&AllocationId) -> Vec<ProcessImage>,
        now: BootTime,
    ) -> Vec<Restart> {
        let mut open_images = BTreeSet::new();
        for (allocation, fault) in open {
            let Some(action) = fault.decision().filter(|action| action.has_successor()) else {
                continue;
            };
            let key = (*allocation, fault.image.generation);
            open_images.insert(key);
            let known = self.awaited.get(&key);
            // The agent may restart the container after a milder action had no effect.
            if known.is_none_or(|known| known.action != action) {
                let generations = images(allocation).into_iter().map(|image| image.generation);
                let awaited = Awaited {
                    fault: fault.clone(),
                    action,
                    generation: generations.max().unwrap_or_default(),
                    is_observed: false,
                };
                self.awaited.insert(key, awaited);
            }
        }
        let mut restarts: Vec<Restart> = Vec::new();
        self.awaited.retain(|key, awaited| {
            let (allocation, before) = *key;
            if awaited.is_observed {
                return open_images.contains(key);
            }
            if awaited.action == RecoveryAction::EndProcess {
                // A new process replaces one ended process only.
                let of_container = restarts
                    .iter()
                    .filter(|restart| restart.allocation == allocation);
                let newest = of_container.map(|restart| restart.generation).max();
                awaited.generation = awaited.generation.max(newest.unwrap_or_default());
            }
            let took = now.since(awaited.fault.since);
            let Some(image) = awaited.successor(&images(&allocation)) else {
                return took < LONGEST_WAIT;
            };
            restarts.push(Restart {
                allocation,
                before,
                generation: image.generation,
                took,
                action: awaited.action,
            });
            awaited.is_observed = true;
            open_images.contains(key)
        });
        restarts
    }
}

impl Awaited {
    /// The image that runs after the fault. A program that is executed again keeps its process. A
    /// launcher may start another process before the poisoned one has ended. A restarted container
    /// has new processes only.
    fn successor(&self, images: &[ProcessImage]) -> Option<ProcessImage> {
        let poisoned = &self.fault.image;
        let is_newer = |image: &&ProcessImage| match self.action {
            RecoveryAction::ReexecInPlace => {
                image.process == poisoned.process && image.generation > poisoned.generation
            }
            _ => image.generation > self.generation,
        };
        let has_ended = match self.action {
            RecoveryAction::ReexecInPlace => true,
            RecoveryAction::EndProcess => !images.contains(poisoned),
            _ => images.iter().all(|image| is_newer(&image)),
        };
        let newer = images.iter().filter(is_newer);
        let oldest = newer.min_by_key(|image| image.generation)?;
        has_ended.then(|| oldest.clone())
    }
}

#[cfg(test)]
mod tests {
    use bursar_sessions::{Process, RecordedMoment};
    use jiff::Timestamp;

    use super::*;

    const ALLOCATION: u64 = 7;

    fn image(pid: u32, generation: u64) -> ProcessImage {
        ProcessImage {
            process: Process { pid, start: 70 },
            generation,
        }
    }

    fn fault(decision: RecoveryAction) -> Vec<(AllocationId, Fault)> {
        let fault = Fault {
            image: image(5, 3),
            gpu: "GPU-a".parse().unwrap(),
            cuda_error: Some(700),
            xid: None,
            time: Timestamp::UNIX_EPOCH,
            since: at(1_000),
            decided: Some((decision, RecordedMoment(at(1_000)))),
            executed: false,
            ended: false,
            root: None,
            held_since: None,
        };
        vec![(AllocationId::from_bits(ALLOCATION), fault)]
    }

    fn at(millisecond: u64) -> BootTime {
        BootTime(millisecond)
    }

    #[test]
    fn program_in_place_is_reported_once_when_it_has_a_new_image() {
        let mut awaited = AwaitedRestarts::default();
        let open = fault(RecoveryAction::ReexecInPlace);
        let sibling = image(6, 4);
        let mut observe = |open: &[_], images: &[ProcessImage], now| {
            awaited.observe(open, |_| images.to_vec(), at(now))
        };
        assert_eq!(observe(&open, &[image(5, 3), sibling], 1_010), []);
        let restarted = Restart {
            allocation: AllocationId::from_bits(ALLOCATION),
            before: 3,
            generation: 5,
            took: Duration::from_millis(300),
            action: RecoveryAction::ReexecInPlace,
        };
        assert_eq!(observe(&[], &[image(5, 5)], 1_300), [restarted]);
        assert_eq!(observe(&[], &[image(5, 5)], 1_500), []);
    }

    #[test]
    fn restarted_container_is_reported_when_it_has_a_newer_image() {
        let mut awaited = AwaitedRestarts::default();
        let open = fault(RecoveryAction::RestartContainer { over_limit: false });
        let mut observe = |open: &[_], images: &[ProcessImage], now| {
            awaited.observe(open, |_| images.to_vec(), at(now)).len()
        };
        assert_eq!(observe(&open, &[image(5, 3), image(6, 4)], 1_010), 0);
        // A process starts before the poisoned one has ended.
        assert_eq!(observe(&open, &[image(5, 3), image(8, 5)], 1_500), 0);
        assert_eq!(observe(&[], &[], 2_000), 0);
        assert_eq!(observe(&[], &[image(9, 6)], 12_000), 1);
    }

    #[test]
    fn replacement_is_reported_once_when_the_poisoned_process_ended() {
        let mut awaited = AwaitedRestarts::default();
        let open = fault(RecoveryAction::EndProcess);
        let sibling = || image(6, 4);
        let mut observe = |open: &[_], images: &[ProcessImage], now| {
            awaited.observe(open, |_| images.to_vec(), at(now))
        };
        assert_eq!(observe(&open, &[image(5, 3), sibling()], 1_010), []);
        // The launcher starts the next process while the poisoned one has its grace.
        let both = [image(5, 3), sibling(), image(8, 5)];
        assert_eq!(observe(&open, &both, 1_500), []);
        let replaced = Restart {
            allocation: AllocationId::from_bits(ALLOCATION),
            before: 3,
            generation: 5,
            took: Duration::from_secs(10),
            action: RecoveryAction::EndProcess,
        };
        // The fault stays open until the driver has freed the memory.
        assert_eq!(
            observe(&open, &[sibling(), image(8, 5)], 11_000),
            [replaced]
        );
        let next = [sibling(), image(8, 5), image(9, 6)];
        assert_eq!(observe(&open, &next, 11_200), []);
        assert_eq!(observe(&[], &next, 11_400), []);
        assert!(awaited.awaited.is_empty());
    }

    #[test]
    fn new_process_replaces_one_of_several_ended_processes() {
        let mut awaited = AwaitedRestarts::default();
        let mut open = fault(RecoveryAction::EndProcess);
        open.extend(fault(RecoveryAction::EndProcess));
        open[1].1.image = image(6, 4);
        let mut observe = |open: &[_], images: &[ProcessImage], now| {
            let restarts = awaited.observe(open, |_| images.to_vec(), at(now));
            let pairs = restarts
                .iter()
                .map(|restart| (restart.before, restart.generation));
            pairs.collect::<Vec<_>>()
        };
        assert_eq!(observe(&open, &[image(5, 3), image(6, 4)], 1_010), []);
        assert_eq!(observe(&[], &[image(8, 5)], 2_000), [(3, 5)]);
        assert_eq!(observe(&[], &[image(8, 5)], 3_000), []);
        assert_eq!(observe(&[], &[image(8, 5), image(9, 6)], 4_000), [(4, 6)]);
    }

    #[test]
    fn restart_of_the_container_replaces_a_milder_action() {
        let mut awaited = AwaitedRestarts::default();
        let mut observe = |open: &[_], images: &[ProcessImage], now| {
            awaited.observe(open, |_| images.to_vec(), at(now)).len()
        };
        let in_place = fault(RecoveryAction::ReexecInPlace);
        assert_eq!(observe(&in_place, &[image(5, 3)], 1_010), 0);
        let restarted = fault(RecoveryAction::RestartContainer { over_limit: false });
        assert_eq!(observe(&restarted, &[image(5, 3)], 6_010), 0);
        assert_eq!(observe(&[], &[image(9, 4)], 12_000), 1);
    }

    #[test]
    fn program_that_is_not_restarted_is_not_awaited() {
        let mut awaited = AwaitedRestarts::default();
        for decision in [
            RecoveryAction::NoAction {
                await_eviction: false,
            },
            RecoveryAction::RestartContainer { over_limit: true },
        ] {
            let open = fault(decision);
            assert_eq!(awaited.observe(&open, |_| vec![image(9, 9)], at(2_000)), []);
        }
        assert!(awaited.awaited.is_empty());
    }

    #[test]
    fn restart_is_forgotten_after_its_longest_wait() {
        let mut awaited = AwaitedRestarts::default();
        for action in [RecoveryAction::ReexecInPlace, RecoveryAction::EndProcess] {
            let open = fault(action);
            assert_eq!(awaited.observe(&open, |_| Vec::new(), at(1_000)), []);
            assert_eq!(awaited.observe(&[], |_| Vec::new(), at(602_000)), []);
            assert!(awaited.awaited.is_empty());
        }
    }
}
