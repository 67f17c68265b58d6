//! Decides what the driver takes of a container beyond its accounts: pure.
//!
//! The shim charges what the driver's calls take, in part by estimates, and charges nothing for
//! code, streams and parameters of kernels. The driver lists all of it with the container's
//! processes. What the driver lists beyond the accounts in ten audits in a row is the account's
//! overhead: the agent grants so much less, and accuses no process for it. A single audit can be
//! wrong, because the agent reads the driver's figures and the accounts at different times.
//!
//! The driver lists exported memory for no process while a descriptor is open, and it lists managed
//! memory for no process at all. So neither is overhead. A process that reports less use than it
//! has raises only the overhead of its own account.

use std::collections::{BTreeMap, VecDeque};

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid};
use bursar_sessions::{ContainerUsage, by_allocation};

use super::compare::AuditResult;

/// The number of audits, one a second, from which the agent takes an account's overhead.
const WINDOW: usize = 10;
/// Overhead is a multiple of this, because the driver takes memory in chunks of this size.
const STEP: u64 = 2 << 20;

/// The last drifts of each account of a GPU.
#[derive(Debug, Default)]
pub(super) struct Overheads(BTreeMap<(AllocationId, GpuUuid), VecDeque<u64>>);

impl Overheads {
    /// Adds one audit. Returns the overhead of each account whose GPU answered.
    pub(super) fn observe(
        &mut self,
        usage: &[ContainerUsage],
        result: &AuditResult,
    ) -> BTreeMap<(AllocationId, GpuUuid), Bytes> {
        let served = by_allocation(usage);
        self.0.retain(|(of, _), _| served.contains_key(of));
        let mut overheads = BTreeMap::new();
        for (account, drift) in &result.drift {
            // The audit charges processes without a session apart.
            let untracked = result.untracked_memory.get(account);
            let untracked: Bytes = untracked.map_or(Bytes::ZERO, |of| of.values().copied().sum());
            let drift = u64::try_from(*drift).unwrap_or(0);
            let drifts = self.0.entry(account.clone()).or_default();
            drifts.push_back(drift.saturating_sub(untracked.0));
            if drifts.len() > WINDOW {
                drifts.pop_front();
            }
            let least = drifts.iter().min().filter(|_| drifts.len() == WINDOW);
            let overhead = least.map_or(0, |least| least / STEP * STEP);
            overheads.insert(account.clone(), Bytes(overhead));
        }
        overheads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: i64 = 1 << 30;
    const MIB: i64 = 1 << 20;

    fn account(number: u64) -> (AllocationId, GpuUuid) {
        (AllocationId::from_bits(number), "GPU-a".parse().unwrap())
    }

    /// The overhead of the first account after each of these drifts.
    fn settled(drifts: &[i64]) -> Vec<i64> {
        let (mut overheads, usage) = (Overheads::default(), [1, 2]);
        let usage = usage.map(|number| ContainerUsage::empty(number, Vec::new()));
        let after = drifts.iter().map(|drift| {
            let result = AuditResult {
                drift: [(account(1), *drift), (account(2), 0)].into(),
                ..AuditResult::default()
            };
            let all = overheads.observe(&usage, &result);
            assert_eq!(all[&account(2)], Bytes::ZERO, "another account");
            i64::try_from(all[&account(1)].0).unwrap()
        });
        after.collect()
    }

    #[test]
    fn drift_is_settled_after_ten_audits_in_a_row() {
        let mut expected = vec![0; 9];
        expected.push(GIB);
        assert_eq!(settled(&[GIB; 10]), expected);
    }

    #[test]
    fn overhead_is_the_least_of_the_last_ten_drifts() {
        let mut drifts = vec![GIB; 10];
        drifts.extend([3 * GIB, 3 * GIB, 7 * MIB + 1, -GIB, GIB]);
        assert_eq!(settled(&drifts)[9..], [GIB, GIB, GIB, 6 * MIB, 0, 0]);
        let mut rises = vec![GIB; 10];
        rises.extend([2 * GIB; 10]);
        assert_eq!(settled(&rises)[19], 2 * GIB);
    }

    #[test]
    fn drift_that_comes_and_goes_is_not_settled() {
        let drifts: Vec<i64> = (0..40)
            .map(|second| GIB * i64::from(second % 9 != 0))
            .collect();
        assert_eq!(settled(&drifts), vec![0; 40]);
        assert_eq!(settled(&[-GIB; 12]), vec![0; 12]);
    }

    #[test]
    fn untracked_memory_is_no_overhead() {
        let mut overheads = Overheads::default();
        let usage = [ContainerUsage::empty(1, Vec::new())];
        let result = AuditResult {
            drift: [(account(1), GIB)].into(),
            untracked_memory: [(account(1), [(7, Bytes(GIB as u64))].into())].into(),
            ..AuditResult::default()
        };
        for _ in 0..WINDOW + 1 {
            let all = overheads.observe(&usage, &result);
            assert_eq!(all[&account(1)], Bytes::ZERO);
        }
        overheads.observe(&[], &AuditResult::default());
        assert!(overheads.0.is_empty(), "the container has ended");
    }
}
