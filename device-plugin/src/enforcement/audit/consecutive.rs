//! Counts for how long findings stand: pure.

use std::collections::{BTreeMap, BTreeSet};

use super::compare::Finding;
use crate::units::{AllocationId, GpuUuid};

/// What stands for one finding from one audit to the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    OverQuota(AllocationId, GpuUuid),
    Intruder(GpuUuid, u32, u64),
    ForgedPage(AllocationId, u32, u64),
    Holder(GpuUuid, u32, u64),
    Unaccounted(GpuUuid),
}

impl Key {
    fn of(finding: &Finding) -> Self {
        match finding {
            Finding::OverQuota {
                allocation, gpu, ..
            } => Self::OverQuota(*allocation, gpu.clone()),
            Finding::Intruder { gpu, process, .. } => {
                Self::Intruder(gpu.clone(), process.pid, process.start)
            }
            Finding::ForgedPage {
                allocation,
                process,
            } => Self::ForgedPage(*allocation, process.pid, process.start),
            Finding::Holder { gpu, process, .. } => {
                Self::Holder(gpu.clone(), process.pid, process.start)
            }
            Finding::Unaccounted { gpu, .. } => Self::Unaccounted(gpu.clone()),
        }
    }

    /// For how many audits it is remembered when it is not found.
    fn window(&self) -> u32 {
        match self {
            Self::Unaccounted(_) => WINDOW,
            _ => 1,
        }
    }

    /// Where it was found.
    fn gpu(&self) -> Option<&GpuUuid> {
        match self {
            Self::OverQuota(_, gpu)
            | Self::Intruder(gpu, ..)
            | Self::Holder(gpu, ..)
            | Self::Unaccounted(gpu) => Some(gpu),
            Self::ForgedPage(..) => None,
        }
    }
}

/// The audits, one a second, among which those count in which memory was charged to nobody. A holder that lets go for one
/// audit now and then is told of all the same.
const WINDOW: u32 = 30;

/// In how many audits each finding has stood. One that was not found for its window, one audit for most, begins anew; an
/// audit that its GPU did not answer says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strikes(BTreeMap<Key, Found>);

/// How a finding stood in the last audits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Found {
    /// A bit for each audit of its window, the last one lowest.
    within: u32,
    /// The most that counted at a time.
    strikes: u32,
}

impl Found {
    /// Takes in one more audit; whether anything is left within the window.
    fn pass(&mut self, is_found: bool, window: u32) -> bool {
        let mask = u32::MAX >> (u32::BITS - window.clamp(1, u32::BITS));
        self.within = (self.within << 1 | u32::from(is_found)) & mask;
        self.within != 0
    }

    /// How often it stood where that is more than ever before, or in a row; zero otherwise.
    fn strike(&mut self, window: u32) -> u32 {
        let now = match window {
            1 => self.strikes.saturating_add(1),
            _ => self.within.count_ones(),
        };
        let grown = now > self.strikes;
        self.strikes = now.max(self.strikes);
        if grown { now } else { 0 }
    }
}

impl Strikes {
    /// Counts the findings of one more audit, which some GPUs did not answer; in how many each has stood now, or zero
    /// where that was said before.
    pub fn count(&mut self, findings: &[Finding], silent: &BTreeSet<GpuUuid>) -> Vec<u32> {
        let keys: Vec<Key> = findings.iter().map(Key::of).collect();
        let standing: BTreeSet<&Key> = keys.iter().collect();
        let is_silent = |key: &Key| key.gpu().is_some_and(|gpu| silent.contains(gpu));
        self.0.retain(|key, before| {
            is_silent(key) || before.pass(standing.contains(key), key.window())
        });
        let mut strikes = BTreeMap::new();
        for key in standing {
            let found = self.0.entry(key.clone()).or_insert(Found {
                within: 1,
                strikes: 0,
            });
            strikes.insert(key, found.strike(key.window()));
        }
        let of = |key: &Key| strikes.get(key).copied();
        keys.iter().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sessions::Process;
    use crate::units::Bytes;

    #[test]
    fn a_finding_that_was_away_once_begins_anew() {
        let finding = |gpu: &str| Finding::Holder {
            gpu: gpu.parse().unwrap(),
            process: Process { pid: 5, start: 50 },
            bytes: Bytes(1),
            allocation: AllocationId::from_bits(1),
            alone: true,
        };
        let mut strikes = Strikes::default();
        let all = BTreeSet::new();
        let mut count = |findings: &[Finding]| strikes.count(findings, &all);
        assert_eq!(count(&[finding("GPU-a")]), [1]);
        assert_eq!(count(&[finding("GPU-b"), finding("GPU-a")]), [1, 2]);
        assert_eq!(count(&[finding("GPU-b")]), [2]);
        assert_eq!(count(&[finding("GPU-a"), finding("GPU-b")]), [1, 3]);
        // An audit that a GPU did not answer.
        let silent = BTreeSet::from(["GPU-a".parse().unwrap()]);
        assert_eq!(strikes.count(&[], &silent), [0; 0]);
        assert_eq!(
            strikes.count(&[finding("GPU-a"), finding("GPU-b")], &all),
            [2, 1]
        );
    }

    #[test]
    fn memory_of_nobody_counts_within_a_window_and_once() {
        let found = [Finding::Unaccounted {
            gpu: "GPU-a".parse().unwrap(),
            bytes: Bytes(1),
            only: None,
        }];
        let all = BTreeSet::new();
        let mut strikes = Strikes::default();
        let mut counted = Vec::new();
        // Its holder lets go for every third audit.
        for number in 0..60 {
            match number % 3 {
                2 => drop(strikes.count(&[], &all)),
                _ => counted.extend(strikes.count(&found, &all)),
            }
        }
        assert_eq!(counted.iter().filter(|strikes| **strikes == 10).count(), 1);
        for _ in 0..WINDOW {
            strikes.count(&[], &all);
        }
        assert_eq!(strikes, Strikes::default());
        // Seldom enough to be what moves between two answers of the driver.
        for number in 0..300 {
            let found: &[Finding] = if number % 10 == 0 { &found } else { &[] };
            assert!(
                strikes
                    .count(found, &all)
                    .iter()
                    .all(|strikes| *strikes < 10)
            );
        }
    }
}
