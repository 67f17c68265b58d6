//! Describes the usage of one container, for the audit and the metrics.

use std::collections::BTreeMap;

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};

use super::{Account, Fault, Process};

/// The usage of one container at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerUsage {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// Its pod.
    pub pod: PodUid,
    /// The name of its cgroup, once one of its processes has said hello.
    pub cgroup: Option<String>,
    /// Its accounts. Every list with one amount per account has the same order.
    pub accounts: Vec<AccountBalance>,
    /// Its live processes that have a session.
    pub processes: Vec<ProcessCredit>,
    /// The process generation of the last image that said hello.
    pub generation: u64,
    /// The pids of exited images that the accounts still charge.
    pub exited_pids: Vec<u32>,
    /// Whether a process of it was ever granted managed memory.
    pub had_managed: bool,
    /// The number of answered requests for credit.
    pub requests: u64,
    /// The number of denied allocations, by function of the driver.
    pub denied: Vec<(String, u64)>,
    /// The last denied allocation.
    pub last_denied: Option<DeniedAllocation>,
    /// The number of allocations that the driver refused although the quota allowed them.
    pub driver_refusals: u64,
    /// The number of its sockets that wait to be closed.
    pub unclosed_sockets: usize,
    /// The number of its process images with a poisoned context.
    pub poisoned_images: u64,
    /// The number of restarts that the agent ordered for these.
    pub ordered_restarts: u64,
    /// The number of those restarts in the same process.
    pub restarts_in_place: u64,
    /// The last of its faults, open or not.
    pub last_fault: Option<Fault>,
}

/// The process generation of a container, and its restarts after faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessHistory {
    /// The process generation of the last image that said hello.
    pub generation: u64,
    /// The number of restarts that the agent ordered for poisoned images.
    pub restarts: u64,
    /// The number of those restarts in the same process.
    pub restarts_in_place: u64,
    /// The last fault, open or not.
    pub last_fault: Option<Fault>,
}

/// An allocation that the shim denied for lack of quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedAllocation {
    /// The function of the driver, or `other`.
    pub function: String,
    /// The account that had too little left.
    pub account: Account,
    /// The bytes that the program asked for, as its shim reports them.
    pub bytes: Bytes,
    /// The quota of the account at that moment.
    pub quota: Bytes,
    /// The part of the quota that was granted to no process then.
    pub free: Bytes,
}

impl ContainerUsage {
    /// Whether a process has a session of the container.
    pub fn has_session(&self, process: Process) -> bool {
        let mut members = self.processes.iter();
        members.any(|member| member.process == process)
    }

    /// The generation of the container's processes, their restarts and their last fault.
    pub fn history(&self) -> ProcessHistory {
        ProcessHistory {
            generation: self.generation,
            restarts: self.ordered_restarts,
            restarts_in_place: self.restarts_in_place,
            last_fault: self.last_fault.clone(),
        }
    }

    /// The GPUs that the container has an account of.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        let accounts = self.accounts.iter();
        accounts.filter_map(|balance| match &balance.account {
            Account::Gpu(gpu) => Some(gpu),
            Account::Managed => None,
        })
    }
}

/// Indexes the usage of containers by their allocation.
pub fn by_allocation(usage: &[ContainerUsage]) -> BTreeMap<AllocationId, &ContainerUsage> {
    usage
        .iter()
        .map(|usage| (usage.allocation, usage))
        .collect()
}

/// The balance of one account of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountBalance {
    /// The account.
    pub account: Account,
    /// The bytes that the container may use.
    pub quota: Bytes,
    /// The bytes that live processes may use without asking the agent.
    pub granted: Bytes,
    /// The bytes that live processes report as used, at most what the agent granted.
    pub used: Bytes,
    /// The grants of exited images that the driver may still charge.
    pub exited: Bytes,
    /// The part of `granted` that live processes report as exported; the driver need not charge
    /// these bytes to them.
    pub exported: Bytes,
    /// The bytes of the leases that the container owns.
    pub leased: Bytes,
    /// The bytes of managed memory that the quota of this GPU covers, because the pod has no quota
    /// of managed memory.
    pub managed: Bytes,
    /// The bytes of untracked processes, as the driver reports them.
    pub untracked: Bytes,
    /// The bytes that the driver takes beyond what processes are charged, as the audit has settled
    /// them.
    pub overhead: Bytes,
    /// The largest sum of granted, exited and leased bytes so far.
    pub peak: Bytes,
}

impl AccountBalance {
    /// The bytes that count as used.
    pub fn in_use(&self) -> Bytes {
        self.used + self.exited + self.leased + self.managed + self.untracked + self.overhead
    }
}

/// The credit of one process of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessCredit {
    /// The process.
    pub process: Process,
    /// The granted bytes, by account.
    pub granted: Vec<Bytes>,
    /// Whether the page shows another grant than the accounts: only the agent may write grants.
    pub tampered: bool,
}

#[cfg(any(test, feature = "testing"))]
impl ContainerUsage {
    /// The usage of a container before its first process.
    pub fn empty(number: u64, accounts: Vec<AccountBalance>) -> ContainerUsage {
        ContainerUsage {
            allocation: AllocationId::from_bits(number),
            pod: "p".parse().expect("a UID"),
            cgroup: None,
            accounts,
            processes: Vec::new(),
            generation: 0,
            exited_pids: Vec::new(),
            had_managed: false,
            requests: 0,
            denied: Vec::new(),
            last_denied: None,
            driver_refusals: 0,
            unclosed_sockets: 0,
            poisoned_images: 0,
            ordered_restarts: 0,
            restarts_in_place: 0,
            last_fault: None,
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl AccountBalance {
    /// The balance of an account without grants.
    pub fn empty(account: Account, quota: Bytes) -> AccountBalance {
        AccountBalance {
            account,
            quota,
            granted: Bytes::ZERO,
            used: Bytes::ZERO,
            exited: Bytes::ZERO,
            exported: Bytes::ZERO,
            leased: Bytes::ZERO,
            managed: Bytes::ZERO,
            untracked: Bytes::ZERO,
            overhead: Bytes::ZERO,
            peak: Bytes::ZERO,
        }
    }
}
