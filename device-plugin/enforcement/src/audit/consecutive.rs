//! Counts in how many audits each finding was present: pure.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{AllocationId, GpuUuid};
use bursar_sessions::Process;

use super::compare::Finding;

/// Identifies a finding from one audit to the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FindingKey {
    kind: &'static str,
    gpu: Option<GpuUuid>,
    subject: Subject,
    /// The number of audits after which an absent finding starts over.
    window: u32,
}

/// The process, container or GPU that a finding is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Container(AllocationId),
    Process(Process),
    Gpu,
}

impl FindingKey {
    fn of(finding: &Finding) -> Self {
        let (gpu, subject, window) = match finding {
            Finding::OverQuota {
                gpu, allocation, ..
            } => (Some(gpu), Subject::Container(*allocation), 1),
            Finding::UntrackedProcess { gpu, process, .. }
            | Finding::Holder { gpu, process, .. } => (Some(gpu), Subject::Process(*process), 1),
            Finding::TamperedPage { process, .. } => (None, Subject::Process(*process), 1),
            Finding::OverManaged {
                gpu, allocation, ..
            } => (
                Some(gpu),
                Subject::Container(*allocation),
                UNACCOUNTED_WINDOW,
            ),
            Finding::Unaccounted { gpu, .. } => (Some(gpu), Subject::Gpu, UNACCOUNTED_WINDOW),
        };
        Self {
            kind: finding.kind(),
            gpu: gpu.cloned(),
            subject,
            window,
        }
    }
}

/// The number of audits, one a second, within which unaccounted memory is counted. So a holder that
/// frees the memory for single audits is reported all the same.
const UNACCOUNTED_WINDOW: u32 = 30;

/// The number of audits in which each finding was present. A finding that was absent for its
/// window, one audit for most, starts over. An audit that its GPU did not answer changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConsecutiveFindings(BTreeMap<FindingKey, FindingHistory>);

/// The presence of a finding in the last audits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct FindingHistory {
    /// A bit for each audit of the window, the last audit lowest.
    recent_audits: u32,
    /// The highest count so far.
    most_counted: u32,
}

impl FindingHistory {
    /// Adds one more audit; returns whether the finding was present within the window.
    fn shift(&mut self, is_found: bool, window: u32) -> bool {
        let mask = u32::MAX >> (u32::BITS - window.clamp(1, u32::BITS));
        self.recent_audits = (self.recent_audits << 1 | u32::from(is_found)) & mask;
        self.recent_audits != 0
    }

    /// The number of audits with the finding, in a row or if it is higher than before; otherwise
    /// zero.
    fn count_new(&mut self, window: u32) -> u32 {
        let now = match window {
            1 => self.most_counted.saturating_add(1),
            _ => self.recent_audits.count_ones(),
        };
        let grown = now > self.most_counted;
        self.most_counted = now.max(self.most_counted);
        if grown { now } else { 0 }
    }
}

impl ConsecutiveFindings {
    /// Adds the findings of one more audit, which the `silent` GPUs did not answer. Returns each
    /// finding's number of audits, or zero if that number was returned before.
    pub(crate) fn count(&mut self, findings: &[Finding], silent: &BTreeSet<GpuUuid>) -> Vec<u32> {
        let keys: Vec<FindingKey> = findings.iter().map(FindingKey::of).collect();
        let present: BTreeSet<&FindingKey> = keys.iter().collect();
        let is_silent = |key: &FindingKey| key.gpu.as_ref().is_some_and(|gpu| silent.contains(gpu));
        self.0.retain(|key, before| {
            is_silent(key) || before.shift(present.contains(key), key.window)
        });
        let mut strikes = BTreeMap::new();
        for key in present {
            let found = self.0.entry(key.clone()).or_insert(FindingHistory {
                recent_audits: 1,
                most_counted: 0,
            });
            strikes.insert(key, found.count_new(key.window));
        }
        let strikes_of = |key: &FindingKey| strikes.get(key).copied();
        keys.iter().filter_map(strikes_of).collect()
    }
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::Bytes;

    use super::*;

    #[test]
    fn count_starts_over_when_a_finding_was_absent_once() {
        let finding = |gpu: &str| Finding::Holder {
            gpu: gpu.parse().unwrap(),
            process: Process { pid: 5, start: 50 },
            bytes: Bytes(1),
            pod: "p".parse().unwrap(),
            allocation: Some(AllocationId::from_bits(1)),
            imported: None,
            is_only_suspect: true,
        };
        let mut strikes = ConsecutiveFindings::default();
        let all = BTreeSet::new();
        let mut count = |findings: &[Finding]| strikes.count(findings, &all);
        assert_eq!(count(&[finding("GPU-a")]), [1]);
        assert_eq!(count(&[finding("GPU-b"), finding("GPU-a")]), [1, 2]);
        assert_eq!(count(&[finding("GPU-b")]), [2]);
        assert_eq!(count(&[finding("GPU-a"), finding("GPU-b")]), [1, 3]);
        // An audit that GPU-a did not answer.
        let silent = BTreeSet::from(["GPU-a".parse().unwrap()]);
        assert_eq!(strikes.count(&[], &silent), [0; 0]);
        assert_eq!(
            strikes.count(&[finding("GPU-a"), finding("GPU-b")], &all),
            [2, 1]
        );
    }

    #[test]
    fn unaccounted_memory_counts_once_within_its_window() {
        let found = [Finding::Unaccounted {
            gpu: "GPU-a".parse().unwrap(),
            bytes: Bytes(1),
            only_container: None,
        }];
        let all = BTreeSet::new();
        let mut strikes = ConsecutiveFindings::default();
        let mut counted = Vec::new();
        // The holder frees the memory in every third audit.
        for number in 0..60 {
            match number % 3 {
                2 => drop(strikes.count(&[], &all)),
                _ => counted.extend(strikes.count(&found, &all)),
            }
        }
        assert_eq!(counted.iter().filter(|strikes| **strikes == 10).count(), 1);
        for _ in 0..UNACCOUNTED_WINDOW {
            strikes.count(&[], &all);
        }
        assert_eq!(strikes, ConsecutiveFindings::default());
        // Memory that is seldom unaccounted may be in motion between two answers of the driver.
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
