//! Compares what the driver charges with the agent's accounts: pure.
//!
//! The audit asks the driver before it reads the accounts. A process is granted memory before it
//! allocates, so memory that the driver shows is in accounts that are read later. The audit
//! identifies the driver's processes last. A process that has ended meanwhile is in the accounts or
//! gone; one that lives has a session there if it ever connected.
//!
//! The driver may list a container with more than its quota, since kernels' code and the device's
//! own heaps are charged to no quota. [`allowance_of`] bounds this for all processes of the
//! container together. Contexts have no allowance, for the accounts charge each: a container with
//! more processes than its quota has contexts for is over its quota.
//!
//! The driver lists some memory for no process. A container's accounts explain what its processes
//! exported, what exited ones left, its leases, and the grants of processes that the driver does
//! not list. A process within `cuInit` or its exit is not listed, and holds memory.
//! [`known_unattributed`] bounds the sum by what the container has and the driver does not list for
//! it. Listed memory cannot be unlisted as well, whatever a process says that it exported.
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
//! The driver charges managed memory on a GPU to no process, and says neither whose it is nor on
//! which GPU. A process cannot have more of it than it has mapped. So a container's accounts
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
//! is [`Finding::Unaccounted`], with the container if no other has memory of the GPU.

mod attribution;
mod finding;
mod holders;
mod managed;

use std::collections::{BTreeMap, BTreeSet};

use bursar_config::AuditConfig;
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_sessions::{Account, AccountBalance, ContainerUsage, Process, ProcessCredit};

use crate::attestation::AttestedProcess;
use attribution::{Attribution, allocation_of, attribute, is_allowed, untracked_finding};
use managed::{MANAGED_CACHE, known_managed};

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

/// A listed process that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveProcess {
    /// The start time (`/proc/<pid>/stat`, field 22).
    pub start: u64,
    /// The pod or host to which the process belongs.
    pub owner: ProcessOwner,
}

/// A process of a pod outside of attested containers that has device nodes of the driver mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUser {
    /// The start time (`/proc/<pid>/stat`, field 22).
    pub start: u64,
    /// The pod.
    pub pod: PodUid,
    /// The name of the container's cgroup.
    pub cgroup: String,
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
    pub device_users: BTreeMap<u32, DeviceUser>,
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

/// Compares the GPUs in `samples` with `usage`, which were read afterwards.
pub fn compare_accounts(
    samples: &[GpuSample],
    usage: &[ContainerUsage],
    containers: &AttestedState,
    limits: &AuditConfig,
) -> AuditResult {
    let mut result = AuditResult::default();
    for sample in samples {
        result.compare_gpu(sample, usage, containers, limits);
    }
    for container in usage {
        let forged = container.processes.iter().filter(|member| member.tampered);
        let finding = |process| Finding::TamperedPage {
            allocation: container.allocation,
            process,
        };
        let found = forged.map(|member| finding(member.process));
        result.findings.extend(found);
    }
    result
}

impl AuditResult {
    fn compare_gpu(
        &mut self,
        sample: &GpuSample,
        usage: &[ContainerUsage],
        containers: &AttestedState,
        limits: &AuditConfig,
    ) {
        let gpu = &sample.gpu;
        let (mut charged, exited) = self.attribute_processes(sample, usage, containers, limits);
        for container in usage {
            let listed = charged.remove(&container.allocation).unwrap_or_default();
            self.compare_container(gpu, container, &listed, limits);
        }
        self.unattributed_signed
            .insert(gpu.clone(), sample.unattributed_signed);
        if !sample.has_all_holders {
            self.holders_unknown.insert(gpu.clone());
        }
        self.compare_unlisted(sample, exited, usage, containers, limits);
    }

    /// Attributes the listed processes to containers. Returns those of each container, and the
    /// bytes of processes that have exited.
    fn attribute_processes<'a>(
        &mut self,
        sample: &'a GpuSample,
        usage: &[ContainerUsage],
        containers: &AttestedState,
        limits: &AuditConfig,
    ) -> (BTreeMap<AllocationId, Vec<&'a ListedProcess>>, ExitedBytes) {
        let gpu = &sample.gpu;
        let mut charged: BTreeMap<AllocationId, Vec<&ListedProcess>> = BTreeMap::new();
        let (mut not_allowed, mut exited) = (0, ExitedBytes::default());
        let mut left = exited_room(gpu, usage, limits);
        for listed in &sample.processes {
            let bytes = listed.bytes.unwrap_or_default();
            let untracked = match attribute(listed, gpu, usage, containers, limits) {
                Attribution::Tracked(allocation) => {
                    charged.entry(allocation).or_default().push(listed);
                    if listed.live.is_none() {
                        let left = left.entry(allocation).or_default();
                        exited.add(listed, bytes.0.saturating_sub(*left));
                        *left = left.saturating_sub(bytes.0);
                    }
                    continue;
                }
                Attribution::Exited => {
                    exited.add(listed, bytes.0);
                    continue;
                }
                Attribution::SessionLost(allocation) => Some(allocation),
                Attribution::Untracked(allocation) => {
                    not_allowed += usize::from(!is_allowed(listed));
                    self.findings
                        .extend(untracked_finding(gpu, listed, allocation));
                    allocation
                }
            };
            let Some(allocation) = untracked else {
                continue;
            };
            charged.entry(allocation).or_default().push(listed);
            let untracked = self
                .untracked_memory
                .entry((allocation, gpu.clone()))
                .or_default();
            untracked.insert(listed.pid, bytes);
        }
        self.untracked_processes.insert(gpu.clone(), not_allowed);
        (charged, exited)
    }

    /// Compares the memory that is listed for no process, or for exited ones, with what the accounts
    /// explain.
    fn compare_unlisted(
        &mut self,
        sample: &GpuSample,
        exited: ExitedBytes,
        usage: &[ContainerUsage],
        containers: &AttestedState,
        limits: &AuditConfig,
    ) {
        let GpuSample {
            gpu,
            unattributed_signed: _,
            unattributed: unlisted,
            unreclaimed_or_retained: left,
            processes,
            importers: _,
            has_all_holders: _,
        } = sample;
        let known = usage
            .iter()
            .map(|container| known_unattributed(container, gpu, processes, containers, limits))
            .fold(left.0, u64::saturating_add);
        let managed_cache = match containers.managed_gpus.contains(gpu) {
            true => MANAGED_CACHE.0,
            false => 0,
        };
        let slack = limits.tolerance.0.saturating_add(managed_cache);
        let (least_known, known) = (known, known.saturating_add(slack));
        let managed = usage.iter().filter_map(|container| {
            let (_, account) = account_of(container, gpu)?;
            Some(known_managed(container, account, containers))
        });
        let evictable = managed.fold(managed_cache, u64::saturating_add);
        let evictable = Bytes(unlisted.unwrap_or_default().0.min(evictable));
        self.evictable.insert(gpu.clone(), evictable);
        // The driver lists an exited process while another has its open files. Most such processes
        // are just ending, so their memory is a finding only if it stays.
        let unlisted_or_exited = unlisted.map(|bytes| bytes.0.saturating_add(exited.all));
        let unaccounted = unlisted_or_exited.map(|bytes| Bytes(bytes.saturating_sub(known)));
        self.unaccounted
            .extend(unaccounted.map(|bytes| (gpu.clone(), bytes)));
        let held = unlisted.map(|bytes| Bytes(bytes.0.saturating_add(exited.gone)));
        let Some(bytes) = held.filter(|bytes| bytes.0 > known) else {
            return;
        };
        let explained = self.over_managed(gpu, Bytes(bytes.0 - known), usage, containers);
        let excess = bytes.0 - known;
        if excess > explained {
            let most = Bytes((bytes.0 - least_known).saturating_add(slack));
            self.unaccounted(sample, bytes, most, usage, containers);
        }
    }

    /// Compares a container's listed processes with its account. The driver's figure of a process
    /// includes its context.
    fn compare_container(
        &mut self,
        gpu: &GpuUuid,
        container: &ContainerUsage,
        listed: &[&ListedProcess],
        limits: &AuditConfig,
    ) {
        let Some((index, account)) = account_of(container, gpu) else {
            return;
        };
        let AccountBalance {
            quota,
            granted,
            used,
            exited,
            ..
        } = account;
        let sum = |is_live: bool| {
            let listed = listed
                .iter()
                .filter(|listed| listed.live.is_some() == is_live);
            let bytes = listed.filter_map(|listed| listed.bytes);
            bytes.fold(0_u64, |sum, bytes| sum.saturating_add(bytes.0))
        };
        // What is listed for the pids of exited processes may be another's beyond their charge.
        let charged = sum(true).saturating_add(sum(false).min(exited.0));
        let known = used.0.saturating_add(exited.0);
        let key = (container.allocation, gpu.clone());
        let percents = listed.iter().filter_map(|listed| listed.sm_percent);
        let percent = percents.reduce(|sum, percent| sum.saturating_add(percent).min(100));
        self.sm_percents
            .extend(percent.map(|percent| (key.clone(), percent)));
        self.drift.insert(key, signed_difference(charged, known));
        let allowance = allowance_of(listed.len(), *quota, limits);
        // A lowered quota applies once frees have caught up.
        let allowed = quota.0.max(granted.0.saturating_add(exited.0));
        let allowed = allowed
            .saturating_add(limits.tolerance.0)
            .saturating_add(allowance);
        if charged <= allowed {
            return;
        }
        let process = |listed: &&ListedProcess| {
            let start = listed.live.as_ref()?.start;
            let pid = listed.pid;
            Some(Process { pid, start })
        };
        let at_fault = |listed: &&&ListedProcess| {
            let member = |member: &&ProcessCredit| member.process.pid == listed.pid;
            let member = container.processes.iter().find(member);
            let granted = member.and_then(|member| member.granted.get(index).copied());
            let own = granted
                .unwrap_or_default()
                .0
                .saturating_add(limits.process_allowance.0);
            listed.bytes.is_some_and(|bytes| bytes.0 > own)
        };
        let mut processes: Vec<_> = listed.iter().filter(at_fault).filter_map(process).collect();
        if processes.is_empty() {
            processes = listed.iter().filter_map(process).collect();
        }
        self.findings.push(Finding::OverQuota {
            allocation: container.allocation,
            gpu: gpu.clone(),
            quota: *quota,
            charged: Bytes(charged),
            processes,
        });
    }
}

/// The bytes that the driver lists for exited processes which no account charges.
#[derive(Clone, Copy, Default)]
struct ExitedBytes {
    all: u64,
    /// The part of processes that are long gone.
    gone: u64,
}

impl ExitedBytes {
    fn add(&mut self, listed: &ListedProcess, bytes: u64) {
        self.all = self.all.saturating_add(bytes);
        if listed.is_gone {
            self.gone = self.gone.saturating_add(bytes);
        }
    }
}

/// The bytes that exited processes of each container may have left. Another process may have had
/// their pids since, and have left memory too.
fn exited_room(
    gpu: &GpuUuid,
    usage: &[ContainerUsage],
    limits: &AuditConfig,
) -> BTreeMap<AllocationId, u64> {
    let room = |container: &ContainerUsage| {
        let (_, account) = account_of(container, gpu)?;
        let allowance = allowance_of(container.exited_pids.len(), account.quota, limits);
        let room = account.exited.0.saturating_add(allowance);
        Some((container.allocation, room))
    };
    usage.iter().filter_map(room).collect()
}

/// The account of a GPU, and its index in the container's accounts.
fn account_of<'a>(
    container: &'a ContainerUsage,
    gpu: &GpuUuid,
) -> Option<(usize, &'a AccountBalance)> {
    let mut accounts = container.accounts.iter().enumerate();
    accounts.find(|(_, balance)| matches!(&balance.account, Account::Gpu(uuid) if uuid == gpu))
}

/// The bytes that this number of processes may have besides their container's quota. Each has an
/// allowance, and all together have at most one allowance and a tenth of the quota.
fn allowance_of(processes: usize, quota: Bytes, limits: &AuditConfig) -> u64 {
    let each = limits.process_allowance.0.saturating_mul(processes as u64);
    let most = limits.process_allowance.0.saturating_add(quota.0 / 10);
    each.min(most)
}

/// The most that a container's accounts explain of the memory that the driver lists for no process.
fn known_unattributed(
    container: &ContainerUsage,
    gpu: &GpuUuid,
    listed: &[ListedProcess],
    containers: &AttestedState,
    limits: &AuditConfig,
) -> u64 {
    let Some((index, account)) = account_of(container, gpu) else {
        return 0;
    };
    let own_listed = |listed: &&ListedProcess| match &listed.live {
        Some(LiveProcess { start, .. }) => container.has_session(listed.pid, *start),
        None => container.exited_pids.contains(&listed.pid),
    };
    let own_listed: Vec<&ListedProcess> = listed.iter().filter(own_listed).collect();
    let charged = own_listed.iter().filter_map(|listed| listed.bytes);
    let charged = charged.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0));
    let is_listed = |member: &&ProcessCredit| {
        let mut listed = own_listed.iter();
        listed.any(|listed| listed.pid == member.process.pid)
    };
    let unlisted = container
        .processes
        .iter()
        .filter(|member| !is_listed(member));
    let unlisted = unlisted.filter_map(|member| member.granted.get(index));
    let unlisted = unlisted.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0));
    let exited_bytes = account.exited.0.saturating_add(account.leased.0);
    let may_be_unlisted = exited_bytes
        .saturating_add(account.exported.0)
        .saturating_add(unlisted);
    let may_have = exited_bytes
        .saturating_add(account.used.0)
        .saturating_add(allowance_of(own_listed.len(), account.quota, limits));
    let managed = known_managed(container, account, containers);
    may_be_unlisted
        .min(may_have.saturating_sub(charged))
        .saturating_add(managed)
}

fn signed_difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(if a > b { i64::MAX } else { i64::MIN })
}

#[cfg(test)]
mod tests;
