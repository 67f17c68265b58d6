//! What the ledger says of one container, for the audit and the metrics.

use std::collections::BTreeMap;

use super::{Account, Process};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid};

/// A container's books at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerUsage {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// Its pod.
    pub pod: PodUid,
    /// The name of its cgroup, once a process of it said hello.
    pub cgroup: Option<String>,
    /// Its accounts; in the same order wherever there is one amount per account.
    pub accounts: Vec<AccountBalance>,
    /// Its living processes that said hello.
    pub processes: Vec<ProcessCredit>,
    /// P of the image that said hello last.
    pub generation: u64,
    /// Its process images that ended and are still charged.
    pub exited_pids: Vec<u32>,
    /// Requests for credit that were answered.
    pub requests: u64,
    /// Denied allocations by the driver's function.
    pub denied: Vec<(String, u64)>,
    /// Sockets of its processes that wait to be closed.
    pub unclosed_sockets: usize,
    /// Its process images whose context was poisoned.
    pub poisoned_images: u64,
    /// Restarts that were ordered for that.
    pub ordered_restarts: u64,
}

impl ContainerUsage {
    /// Whether a process has a session of the container.
    pub fn has_session(&self, pid: u32, start: u64) -> bool {
        let process = Process { pid, start };
        self.processes
            .iter()
            .any(|member| member.process == process)
    }

    /// The GPUs that it has an account of.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        let accounts = self.accounts.iter();
        accounts.filter_map(|of_it| match &of_it.account {
            Account::Gpu(gpu) => Some(gpu),
            Account::Managed => None,
        })
    }
}

/// Indexes books by their container.
pub fn by_allocation(books: &[ContainerUsage]) -> BTreeMap<AllocationId, &ContainerUsage> {
    books
        .iter()
        .map(|books| (books.allocation, books))
        .collect()
}

/// One account of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountBalance {
    /// Which memory.
    pub account: Account,
    /// What the container may use.
    pub quota: Bytes,
    /// What its living processes may use without asking.
    pub granted: Bytes,
    /// What they say that they use, never more than was granted.
    pub used: Bytes,
    /// What ended images had been granted and the driver may still charge.
    pub exited: Bytes,
    /// What of `granted` its living processes have exported, as they say: it need not be charged to them.
    pub exported: Bytes,
    /// What kept leases have that the container owns.
    pub leased: Bytes,
    /// What processes without a session have, by the driver's figures.
    pub untracked: Bytes,
    /// The most that was ever granted, retired and leased together.
    pub peak: Bytes,
}

impl AccountBalance {
    /// What counts as used, whoever has it.
    pub fn in_use(&self) -> Bytes {
        let amounts = [self.used, self.exited, self.leased, self.untracked];
        let sum = amounts
            .iter()
            .fold(0_u64, |sum, bytes| sum.saturating_add(bytes.0));
        Bytes(sum)
    }
}

/// One process of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessCredit {
    /// The process.
    pub process: Process,
    /// What it was granted, by account.
    pub granted: Vec<Bytes>,
    /// Whether its page says that it was granted another amount: nobody but the agent may write that.
    pub tampered: bool,
}

#[cfg(test)]
impl ContainerUsage {
    /// Of a container that has not begun.
    pub(crate) fn empty(number: u64, accounts: Vec<AccountBalance>) -> ContainerUsage {
        ContainerUsage {
            allocation: AllocationId::from_bits(number),
            pod: "p".parse().unwrap(),
            cgroup: None,
            accounts,
            processes: Vec::new(),
            generation: 0,
            exited_pids: Vec::new(),
            requests: 0,
            denied: Vec::new(),
            unclosed_sockets: 0,
            poisoned_images: 0,
            ordered_restarts: 0,
        }
    }
}

#[cfg(test)]
impl AccountBalance {
    /// Of an account that nothing was granted of.
    pub(crate) fn empty(account: Account, quota: Bytes) -> AccountBalance {
        AccountBalance {
            account,
            quota,
            granted: Bytes::ZERO,
            used: Bytes::ZERO,
            exited: Bytes::ZERO,
            exported: Bytes::ZERO,
            leased: Bytes::ZERO,
            untracked: Bytes::ZERO,
            peak: Bytes::ZERO,
        }
    }
}
