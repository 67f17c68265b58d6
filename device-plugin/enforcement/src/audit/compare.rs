//! Compares what the driver charges with the agent's accounts: pure.
//!
//! The audit asks the driver before it reads the accounts. A process is granted memory before it
//! allocates, so memory that the driver shows is in accounts that are read later. The audit
//! identifies the driver's processes last. A process that has ended meanwhile is in the accounts or
//! gone; one that lives has a session there if it ever connected.
//!
//! The driver may list a container with more than its quota, since kernels' code and the device's
//! own heaps are charged to no quota. [`GpuFigures::allowance_of`] bounds this for all processes of
//! the container together. Contexts have no allowance, for the accounts charge each: a container
//! with more processes than its quota has contexts for is over its quota.
//!
//! The driver lists some memory for no process. A container's accounts explain what its processes
//! exported, what exited ones left, its leases, and the grants of processes that the driver does
//! not list. A process within `cuInit` or its exit is not listed, and holds memory.
//! [`GpuFigures::known_unattributed`] bounds the sum by what the container has and the driver does
//! not list for it. Listed memory cannot be unlisted as well, whatever a process says that it
//! exported.
//!
//! The kernel module reports memory that a process of a pod owns without a context
//! ([`bursar_gpu::holders`]). The audit treats that process as listed, so it is within its quota,
//! over it, or untracked.
//!
//! Memory in use beyond that has a holder that the driver does not report. A file descriptor alone
//! holds it, or the kernel module gave no answer. The audit sees of a process its session, what the
//! driver lists, and which device nodes it has mapped. `cuInit` maps device nodes, and NVML maps
//! none. The shim connects in `cuInit`. So a process with such mappings and without a session uses
//! the driver past the shim, which no honest program does. It is a [`Finding::Holder`] while its
//! GPU has unaccounted memory. Exempt are:
//!
//! - programs that call NVML, which map nothing
//! - a forked child, whose mappings are its parent's
//! - a program within `cuInit`, since the finding is reported at the second audit
//! - a process that is older than the agent, whose session's record may be lost
//!
//! The driver lists memory by the pid that made its client, and keeps it while anybody has the
//! client's files. If no process has had such a pid for [a while](super::listings), its memory
//! counts as unaccounted. A forked child has its parent's files and mappings. So then a process
//! with device nodes mapped is a suspect in any container of any pod.
//!
//! A holder may be killed if no other pod has such a process. Of several one may be innocent, for
//! example where a container has a shim from before this agent.
//!
//! The driver charges managed memory on a GPU to no process, and reports neither its owner nor its
//! GPU. A process cannot have more of it than it has mapped. So a container's accounts
//! explain what it was charged and has mapped. A container with more mapped than charged is
//! [`Finding::OverManaged`] while its GPU has unaccounted memory. Its module has variables in
//! managed memory, or it allocated past the shim. Address ranges that a managed pool reserves are
//! mapped as well, so the agent kills no process for this finding.
//!
//! A process with a session can hold such memory too, by a descriptor. It uses the memory if it has
//! imported it. The kernel module reports the imports of each process, but not from where, and
//! counts memory again that is imported again. So a process is a suspect if it has imported more
//! than twice what all accounts know to be exported on the GPU, and as much is unaccounted.
//! Otherwise nothing distinguishes this process from honest ones, so none is accused: the finding
//! is [`Finding::Unaccounted`], with the container if nobody else uses the GPU.

mod attribution;
mod finding;
mod holders;
mod managed;

use std::collections::{BTreeMap, BTreeSet};

use bursar_config::AuditConfig;
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_sessions::{Account, AccountBalance, ContainerUsage, Process};

use crate::attestation::AttestedProcess;
use attribution::Attribution;
use managed::MANAGED_CACHE;

pub use finding::Finding;
pub(crate) use managed::update_managed_gpus;

/// The driver's figures of one GPU or MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSample {
    /// The GPU's UUID.
    pub gpu: GpuUuid,
    /// The bytes in use that are charged to no process; negative where the driver charges more.
    pub unattributed_signed: i64,
    /// The part of these bytes that a process may hold; none where the driver lists not all
    /// amounts.
    pub unattributed: Option<Bytes>,
    /// The bytes that ended pods may still occupy, and those of leases without an owner.
    pub unreclaimed_or_retained: Bytes,
    /// The processes that the driver lists on the GPU.
    pub processes: Vec<ListedProcess>,
    /// The processes of pods that have imported memory, each with its imported bytes.
    pub importers: Vec<ListedProcess>,
    /// Whether the driver reported all holders of memory.
    pub has_all_holders: bool,
}

/// A process that the driver lists on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    /// The pid in the host's pid namespace.
    pub pid: u32,
    /// The bytes that the driver charges to it; none where the driver does not know.
    pub bytes: Option<Bytes>,
    /// Its SM utilization in percent; none where the driver gives none.
    pub sm_percent: Option<u8>,
    /// The process, if it lives. The driver also lists exited ones while their memory is held.
    pub live: Option<LiveProcess>,
    /// Whether no audit has found the process for [a while](super::listings).
    pub is_gone: bool,
}

impl ListedProcess {
    /// The process, if it lives.
    fn process(&self) -> Option<Process> {
        let LiveProcess { start, .. } = *self.live.as_ref()?;
        Some(Process {
            pid: self.pid,
            start,
        })
    }
}

/// A process that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveProcess {
    /// The start time (`/proc/<pid>/stat`, field 22).
    pub start: u64,
    /// The pod or host to which the process belongs.
    pub owner: ProcessOwner,
}

/// The containers and processes that the attestation knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttestedState {
    /// The allocation of a pod's container, by the name of its cgroup.
    pub allocations: BTreeMap<(PodUid, String), AllocationId>,
    /// The containers' processes, each with its container's allocation.
    pub processes: BTreeMap<u32, (AllocationId, AttestedProcess)>,
    /// Pids of exited processes that the accounts still charged before the driver was asked.
    pub exited_pids: BTreeSet<u32>,
    /// The GPUs on which the driver may keep free memory for managed memory.
    pub managed_gpus: BTreeSet<GpuUuid>,
    /// The processes of pods outside of attested containers that have device nodes of the driver
    /// mapped; none where the audit needs none.
    pub device_users: BTreeMap<u32, LiveProcess>,
    /// The agent's start in clock ticks since boot: the sessions of older processes may be lost.
    pub agent_start: u64,
}

/// The result of one audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditResult {
    /// The differences.
    pub findings: Vec<Finding>,
    /// The driver's charges to a container's processes less the accounts' used bytes, in bytes.
    pub drift: BTreeMap<(AllocationId, GpuUuid), i64>,
    /// The SM utilization of a container's processes together, in percent and at most 100, while
    /// the driver lists some and gives it.
    pub sm_percents: BTreeMap<(AllocationId, GpuUuid), u8>,
    /// The GPU's bytes in use less the driver's charges to processes, in bytes.
    pub unattributed_signed: BTreeMap<GpuUuid, i64>,
    /// The GPU's bytes in use that are listed for no process and in no account.
    pub unaccounted: BTreeMap<GpuUuid, Bytes>,
    /// The GPUs whose driver did not report all holders of memory.
    pub holders_unknown: BTreeSet<GpuUuid>,
    /// The number of processes that use a GPU without a session.
    pub untracked_processes: BTreeMap<GpuUuid, usize>,
    /// The GPU's bytes in use that the driver moves away for device memory. They are managed
    /// memory, at most what containers were charged, and what the driver keeps for it.
    pub evictable: BTreeMap<GpuUuid, Bytes>,
    /// The bytes that processes without a session have of a container's account.
    pub untracked_memory: BTreeMap<(AllocationId, GpuUuid), BTreeMap<u32, Bytes>>,
}

/// The figures of one GPU that are compared.
struct GpuFigures<'a> {
    sample: &'a GpuSample,
    usage: &'a [ContainerUsage],
    /// The accounts of the GPU.
    accounts: Vec<GpuAccount<'a>>,
    containers: &'a AttestedState,
    limits: &'a AuditConfig,
}

/// A container's account of the GPU.
#[derive(Clone, Copy)]
struct GpuAccount<'a> {
    container: &'a ContainerUsage,
    /// The place in each list with one amount per account.
    index: usize,
    balance: &'a AccountBalance,
}

/// Compares the GPUs in `samples` with `usage`, which were read afterwards.
pub fn compare_accounts(
    samples: &[GpuSample],
    usage: &[ContainerUsage],
    containers: &AttestedState,
    limits: &AuditConfig,
) -> AuditResult {
    let mut result = AuditResult::default();
    for sample in samples {
        let account = |container| GpuAccount::of(container, &sample.gpu);
        result.compare_gpu(&GpuFigures {
            sample,
            usage,
            accounts: usage.iter().filter_map(account).collect(),
            containers,
            limits,
        });
    }
    for container in usage {
        let allocation = container.allocation;
        let forged = container.processes.iter().filter(|member| member.tampered);
        let found = forged.map(|member| Finding::TamperedPage {
            allocation,
            process: member.process,
        });
        result.findings.extend(found);
    }
    result
}

impl AuditResult {
    fn compare_gpu(&mut self, figures: &GpuFigures<'_>) {
        let (sample, gpu) = (figures.sample, &figures.sample.gpu);
        let (charged, exited) = self.attribute_processes(figures);
        for account in &figures.accounts {
            let listed = charged.get(&account.container.allocation);
            self.compare_container(figures, *account, listed.map_or(&[], Vec::as_slice));
        }
        self.unattributed_signed
            .insert(gpu.clone(), sample.unattributed_signed);
        if !sample.has_all_holders {
            self.holders_unknown.insert(gpu.clone());
        }
        self.compare_unlisted(figures, exited);
    }

    /// Attributes the listed processes to containers. Returns those of each container, and the
    /// bytes of processes that have exited.
    fn attribute_processes<'a>(
        &mut self,
        figures: &GpuFigures<'a>,
    ) -> (BTreeMap<AllocationId, Vec<&'a ListedProcess>>, ExitedBytes) {
        let gpu = &figures.sample.gpu;
        let mut charged: BTreeMap<AllocationId, Vec<&ListedProcess>> = BTreeMap::new();
        let (mut not_allowed, mut exited) = (0, ExitedBytes::default());
        let mut left = figures.exited_room();
        for listed in &figures.sample.processes {
            let bytes = listed.bytes.unwrap_or_default();
            let untracked = match figures.attribute(listed) {
                Attribution::Tracked(allocation) => {
                    charged.entry(allocation).or_default().push(listed);
                    if listed.live.is_none() {
                        let left = left.entry(allocation).or_default();
                        exited.add(listed, bytes.saturating_sub(*left));
                        *left = left.saturating_sub(bytes);
                    }
                    continue;
                }
                Attribution::Exited => {
                    exited.add(listed, bytes);
                    continue;
                }
                Attribution::SessionLost(allocation) => Some(allocation),
                Attribution::Untracked(owner, allocation) => {
                    not_allowed += usize::from(*owner != ProcessOwner::AllowedHost);
                    let found = listed.process().map(|process| Finding::UntrackedProcess {
                        gpu: gpu.clone(),
                        process,
                        bytes: listed.bytes,
                        owner: owner.clone(),
                        allocation,
                    });
                    self.findings.extend(found);
                    allocation
                }
            };
            if let Some(allocation) = untracked {
                charged.entry(allocation).or_default().push(listed);
                let untracked = self.untracked_memory.entry((allocation, gpu.clone()));
                untracked.or_default().insert(listed.pid, bytes);
            }
        }
        self.untracked_processes.insert(gpu.clone(), not_allowed);
        (charged, exited)
    }

    /// Compares the memory that is listed for no process, or for exited ones, with what the
    /// accounts explain.
    fn compare_unlisted(&mut self, figures: &GpuFigures<'_>, exited: ExitedBytes) {
        let (gpu, unlisted) = (&figures.sample.gpu, figures.sample.unattributed);
        let managed_cache = match figures.containers.managed_gpus.contains(gpu) {
            true => MANAGED_CACHE,
            false => Bytes::ZERO,
        };
        let accounts = || figures.accounts.iter();
        let known = accounts().map(|account| figures.known_unattributed(account));
        let least_known = known.sum::<Bytes>() + figures.sample.unreclaimed_or_retained;
        let slack = figures.limits.tolerance + managed_cache;
        let known = least_known + slack;
        let managed = accounts().map(|account| account.known_managed(figures.containers));
        let evictable = managed.sum::<Bytes>() + managed_cache;
        self.evictable
            .insert(gpu.clone(), unlisted.unwrap_or_default().min(evictable));
        // The driver lists an exited process while another has its open files. Most such processes
        // are just ending, so their memory is a finding only if it stays.
        let unaccounted = unlisted.map(|bytes| (bytes + exited.all).saturating_sub(known));
        self.unaccounted
            .extend(unaccounted.map(|bytes| (gpu.clone(), bytes)));
        let held = unlisted.map(|bytes| bytes + exited.gone);
        let Some(bytes) = held.filter(|bytes| *bytes > known) else {
            return;
        };
        let excess = bytes.saturating_sub(known);
        if excess > self.over_managed(figures, excess) {
            let most_unaccounted = bytes.saturating_sub(least_known) + slack;
            self.unaccounted(figures, bytes, most_unaccounted, known + MANAGED_CACHE);
        }
    }

    /// Compares a container's listed processes with its account. The driver's figure of a process
    /// includes its context.
    fn compare_container(
        &mut self,
        figures: &GpuFigures<'_>,
        account: GpuAccount<'_>,
        listed: &[&ListedProcess],
    ) {
        let (gpu, limits) = (&figures.sample.gpu, figures.limits);
        let GpuAccount {
            container,
            index,
            balance,
        } = account;
        let sum = |is_live: bool| -> Bytes {
            let listed = listed
                .iter()
                .filter(|listed| listed.live.is_some() == is_live);
            listed.filter_map(|listed| listed.bytes).sum()
        };
        // The driver may list for an exited process's pid what another process has left.
        let charged = sum(true) + sum(false).min(balance.exited);
        let known = balance.used + balance.exited;
        let key = (container.allocation, gpu.clone());
        let percents = listed.iter().filter_map(|listed| listed.sm_percent);
        let percent = percents.reduce(|sum, percent| sum.saturating_add(percent).min(100));
        self.sm_percents
            .extend(percent.map(|percent| (key.clone(), percent)));
        self.drift
            .insert(key, signed_difference(charged.0, known.0));
        // A lowered quota applies once frees have caught up.
        let allowed = balance.quota.max(balance.granted + balance.exited)
            + limits.tolerance
            + figures.allowance_of(listed.len(), balance.quota);
        if charged <= allowed {
            return;
        }
        let at_fault = |listed: &&&ListedProcess| {
            let mut members = container.processes.iter();
            let member = members.find(|member| member.process.pid == listed.pid);
            let granted = member.and_then(|member| member.granted.get(index).copied());
            let own = granted.unwrap_or_default() + limits.process_allowance;
            listed.bytes.is_some_and(|bytes| bytes > own)
        };
        let process = |listed: &&ListedProcess| listed.process();
        let mut processes: Vec<_> = listed.iter().filter(at_fault).filter_map(process).collect();
        if processes.is_empty() {
            processes = listed.iter().filter_map(process).collect();
        }
        self.findings.push(Finding::OverQuota {
            allocation: container.allocation,
            gpu: gpu.clone(),
            quota: balance.quota,
            charged,
            processes,
        });
    }
}

/// The bytes that the driver lists for exited processes which no account charges.
#[derive(Clone, Copy, Default)]
struct ExitedBytes {
    all: Bytes,
    /// The part of processes that are long gone.
    gone: Bytes,
}

impl ExitedBytes {
    fn add(&mut self, listed: &ListedProcess, bytes: Bytes) {
        self.all = self.all + bytes;
        if listed.is_gone {
            self.gone = self.gone + bytes;
        }
    }
}

impl<'a> GpuAccount<'a> {
    fn of(container: &'a ContainerUsage, gpu: &GpuUuid) -> Option<Self> {
        let mut accounts = container.accounts.iter().enumerate();
        let is_of_gpu = |balance: &AccountBalance| match &balance.account {
            Account::Gpu(uuid) => uuid == gpu,
            Account::Managed => false,
        };
        let (index, balance) = accounts.find(|(_, balance)| is_of_gpu(balance))?;
        Some(Self {
            container,
            index,
            balance,
        })
    }
}

impl<'a> GpuFigures<'a> {
    /// The first container with an account of the GPU that meets a condition.
    fn find(&self, mut is_meant: impl FnMut(&ContainerUsage) -> bool) -> Option<GpuAccount<'a>> {
        let mut accounts = self.accounts.iter();
        accounts
            .find(|account| is_meant(account.container))
            .copied()
    }

    /// The bytes that exited processes of each container may have left. Another process may have
    /// had their pids since, and have left memory too.
    fn exited_room(&self) -> BTreeMap<AllocationId, Bytes> {
        let room = |account: &GpuAccount<'_>| {
            let pids = account.container.exited_pids.len();
            let allowance = self.allowance_of(pids, account.balance.quota);
            let room = account.balance.exited + allowance;
            (account.container.allocation, room)
        };
        self.accounts.iter().map(room).collect()
    }

    /// The bytes that this number of processes may have besides their container's quota. Each has
    /// an allowance, and all together have at most one allowance and a tenth of the quota.
    fn allowance_of(&self, processes: usize, quota: Bytes) -> Bytes {
        let one = self.limits.process_allowance;
        let each = Bytes(one.0.saturating_mul(processes as u64));
        each.min(one + Bytes(quota.0 / 10))
    }

    /// The most that a container's account explains of the memory that the driver lists for no
    /// process.
    fn known_unattributed(&self, account: &GpuAccount<'_>) -> Bytes {
        let GpuAccount {
            container,
            index,
            balance,
        } = *account;
        let is_own = |listed: &&ListedProcess| match listed.process() {
            Some(process) => container.has_session(process),
            None => container.exited_pids.contains(&listed.pid),
        };
        let listed: Vec<_> = self.sample.processes.iter().filter(is_own).collect();
        let charged: Bytes = listed.iter().filter_map(|listed| listed.bytes).sum();
        let is_listed = |pid: u32| listed.iter().any(|listed| listed.pid == pid);
        let members = container.processes.iter();
        let unlisted = members.filter(|member| !is_listed(member.process.pid));
        let unlisted = unlisted.filter_map(|member| member.granted.get(index).copied());
        let exited = balance.exited + balance.leased;
        let may_be_unlisted = exited + balance.exported + unlisted.sum();
        let may_have = exited + balance.used + self.allowance_of(listed.len(), balance.quota);
        may_be_unlisted.min(may_have.saturating_sub(charged))
            + account.known_managed(self.containers)
    }
}

fn signed_difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(if a > b { i64::MAX } else { i64::MIN })
}

#[cfg(test)]
mod tests;
