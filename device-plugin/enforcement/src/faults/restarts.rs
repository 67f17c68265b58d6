//! Detects that a program runs again after a fault had poisoned its context. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_ledger::BootTime;
use bursar_ledger::units::AllocationId;
use bursar_sessions::{Fault, ProcessImage, RecoveryAction};

/// How long a restart is awaited. A program may import modules for minutes before it calls CUDA.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// The restarts that were ordered and not seen yet.
#[derive(Debug, Default)]
pub(crate) struct AwaitedRestarts {
    awaited: BTreeMap<(AllocationId, u64), Awaited>,
}

#[derive(Clone, Debug)]
struct Awaited {
    fault: Fault,
    /// The process generation of the container when the restart was ordered.
    generation: u64,
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
    /// Whether the process itself executed its program again.
    pub(crate) in_place: bool,
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
        let is_restart = |fault: &Fault| fault.decision().is_some_and(RecoveryAction::is_restart);
        for (allocation, fault) in open.iter().filter(|(_, fault)| is_restart(fault)) {
            let key = (*allocation, fault.image.generation);
            self.awaited.entry(key).or_insert_with(|| {
                let generations = images(allocation).into_iter().map(|image| image.generation);
                Awaited {
                    fault: fault.clone(),
                    generation: generations.max().unwrap_or_default(),
                }
            });
        }
        let mut restarts = Vec::new();
        self.awaited.retain(|(allocation, _), awaited| {
            let took = now.since(awaited.fault.since);
            let Some(image) = awaited.successor(&images(allocation)) else {
                return took < LONGEST_WAIT;
            };
            restarts.push(Restart {
                allocation: *allocation,
                before: awaited.fault.image.generation,
                generation: image.generation,
                took,
                in_place: awaited.is_in_place(),
            });
            false
        });
        restarts
    }
}

impl Awaited {
    fn is_in_place(&self) -> bool {
        self.fault.decision() == Some(RecoveryAction::ReexecInPlace)
    }

    /// The image that runs after the fault. A program that is executed again keeps its process. A
    /// restarted container has new processes only.
    fn successor(&self, images: &[ProcessImage]) -> Option<ProcessImage> {
        let poisoned = &self.fault.image;
        let is_newer = |image: &&ProcessImage| match self.is_in_place() {
            true => image.process == poisoned.process && image.generation > poisoned.generation,
            false => image.generation > self.generation,
        };
        let all_are_newer = || images.iter().all(|image| is_newer(&image));
        let image = images.iter().find(is_newer)?;
        (self.is_in_place() || all_are_newer()).then(|| image.clone())
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
    fn program_in_place_is_told_once_when_its_process_has_a_new_image() {
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
            in_place: true,
        };
        assert_eq!(observe(&[], &[image(5, 5)], 1_300), [restarted]);
        assert_eq!(observe(&[], &[image(5, 5)], 1_500), []);
    }

    #[test]
    fn restarted_container_is_told_when_it_has_a_newer_image_than_before() {
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
        let open = fault(RecoveryAction::ReexecInPlace);
        assert_eq!(awaited.observe(&open, |_| Vec::new(), at(1_000)), []);
        assert_eq!(awaited.observe(&[], |_| Vec::new(), at(602_000)), []);
        assert!(awaited.awaited.is_empty());
    }
}
