//! Sets what the driver charges against the ledger: pure.
//!
//! The driver must be asked before the ledger. A process that allocated was granted it before, so what the driver
//! shows is in books that are read later. Who the driver's processes are must be found out after that: one that died
//! meanwhile is known to the books or gone, and one that lives was in them if it ever said hello.
//!
//! A container may be listed with more than its quota: kernels' code and the device's own heaps are charged to no
//! quota. That is [`beyond`], for all of its processes together. Contexts get no allowance, for the ledger charges each:
//! a container with more processes than its quota has contexts for is over it.
//!
//! Memory in use that the driver lists for nobody is known where a container's ledger has it: what its processes
//! exported, what its dead left, what is kept for it. All of that together is at most what the container has and the
//! driver does not list for it ([`of_nobody`]): what is listed cannot be unlisted as well, whatever a process says that
//! it exported.
//!
//! The kernel module says what a pod's process owns without a context ([`crate::inventory::holders`]). The audit lists that
//! process like any other, so that it is within its quota, over it, or an intruder.
//!
//! Memory that is in use beyond that has a holder, and the driver does not say which: a descriptor alone holds it, or the
//! kernel module does not tell. What can be seen of a process is
//! its session, what the driver lists, and which device nodes it has mapped: `cuInit` maps them, NVML does not. The shim
//! says hello in `cuInit`. So a process that has them mapped without a session uses the driver past the shim: no honest
//! program does, whatever the neighbours do. It is a [`Finding::Holder`] while its GPU has memory of nobody. These are
//! none: programs that ask NVML, which map nothing; a forked child, whose mappings are its parent's; a program within
//! `cuInit`, for it is told at the second audit; a process that is older than the agent, whose record may be lost. It
//! may be killed where no other container has such a process: of several one may be innocent all the same, as where a
//! container has a shim from before this agent.
//!
//! A process with a session can hold such memory too, by a descriptor. Nothing tells it from honest ones, so that nobody
//! is accused: the memory is [`Finding::Unaccounted`], with the pod where only one container uses the driver.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::AuditConfig;
use crate::enforcement::attestation::AttestedProcess;
use crate::procfs::ProcessOwner;
use crate::sessions::{Account, AccountBalance, ContainerUsage, Process};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid};

/// One GPU, or MIG instance, as the driver shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSample {
    /// Which.
    pub gpu: GpuUuid,
    /// What of it is in use and charged to no process, in bytes.
    pub unattributed_signed: i64,
    /// What of that may be somebody's; none where the driver does not tell all.
    pub unattributed: Option<Bytes>,
    /// What pods that ended left of it, and is not bound again, and what is kept for pods without an owner.
    pub unreclaimed_or_retained: Bytes,
    /// The processes that the driver lists on it.
    pub processes: Vec<ListedProcess>,
}

/// A process that the driver lists on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    /// In the host's pid namespace.
    pub pid: u32,
    /// What it is charged; none where the driver cannot tell.
    pub bytes: Option<Bytes>,
    /// Who it is; none where it is gone: the driver lists the dead while something keeps their memory.
    pub live: Option<LiveProcess>,
}

/// A listed process that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveProcess {
    /// When it started (`/proc/<pid>/stat`, field 22).
    pub start: u64,
    /// Whose it is.
    pub owner: ProcessOwner,
}

/// What attestation knows of containers and their processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttestedState {
    /// The allocation of a pod's container, by the name of its cgroup.
    pub allocations: BTreeMap<(PodUid, String), AllocationId>,
    /// Their processes, each with the allocation of its container.
    pub processes: BTreeMap<u32, (AllocationId, AttestedProcess)>,
    /// Pids of exited processes that the accounts still charged before the driver was asked.
    pub exited_pids: BTreeSet<u32>,
    /// When this agent started, in clock ticks since boot: the sessions of older processes may be lost.
    pub agent_start: u64,
}

/// Something that the ledger does not account for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A container has more of a GPU than its quota with all tolerance.
    OverQuota {
        /// The container.
        allocation: AllocationId,
        /// The GPU.
        gpu: GpuUuid,
        /// Its quota.
        quota: Bytes,
        /// What the driver charges to its processes.
        charged: Bytes,
        /// Those that have more than they were granted and its allowance; all where none has.
        processes: Vec<Process>,
    },
    /// A process uses a GPU, and no session stands for it.
    UntrackedProcess {
        /// The GPU.
        gpu: GpuUuid,
        /// The process.
        process: Process,
        /// What the driver charges to it.
        bytes: Option<Bytes>,
        /// Whose it is.
        owner: ProcessOwner,
        /// The allocation of its container, where it is one of ours.
        allocation: Option<AllocationId>,
    },
    /// A process wrote another grant into its credit page.
    ForgedPage {
        /// Its container.
        allocation: AllocationId,
        /// The process.
        process: Process,
    },
    /// A process uses the driver past the shim without a context, so that the driver does not list it, and its GPU has
    /// memory in use that is charged to nobody.
    Holder {
        /// The GPU.
        gpu: GpuUuid,
        /// The process.
        process: Process,
        /// What of the GPU is charged to nobody.
        bytes: Bytes,
        /// The allocation of its container.
        allocation: AllocationId,
        /// Whether no other container has such a process.
        is_only_suspect: bool,
    },
    /// A GPU has memory in use that neither the driver nor the ledger charges to anybody.
    Unaccounted {
        /// The GPU.
        gpu: GpuUuid,
        /// How much.
        bytes: Bytes,
        /// The only container with processes that use the driver, where there is no other.
        only_container: Option<AllocationId>,
    },
}

/// A finding's kind, for metrics.
impl Finding {
    /// Every kind.
    pub const KINDS: [&'static str; 5] = [
        "over-quota",
        "intruder",
        "forged-page",
        "holder",
        "unaccounted",
    ];

    /// The word in metrics.
    pub fn kind(&self) -> &'static str {
        let [over_quota, intruder, forged_page, holder, unaccounted] = Self::KINDS;
        match self {
            Self::OverQuota { .. } => over_quota,
            Self::UntrackedProcess { .. } => intruder,
            Self::ForgedPage { .. } => forged_page,
            Self::Holder { .. } => holder,
            Self::Unaccounted { .. } => unaccounted,
        }
    }
}

/// What one audit comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditResult {
    /// What is amiss.
    pub findings: Vec<Finding>,
    /// What the driver charges to a container's processes less what the ledger says that they use, in bytes.
    pub drift: BTreeMap<(AllocationId, GpuUuid), i64>,
    /// What is in use of a GPU less what the driver charges to processes, in bytes.
    pub unattributed_signed: BTreeMap<GpuUuid, i64>,
    /// What of a GPU is in use, listed for no process, and in no ledger.
    pub unaccounted: BTreeMap<GpuUuid, Bytes>,
    /// How many processes use a GPU without the ledger's knowledge.
    pub untracked_processes: BTreeMap<GpuUuid, usize>,
    /// What processes without a session have of a container's account.
    pub untracked_memory: BTreeMap<(AllocationId, GpuUuid), BTreeMap<u32, Bytes>>,
}

/// Judges the GPUs that were `seen`; `books` were read afterwards.
pub fn compare_accounts(
    seen: &[GpuSample],
    books: &[ContainerUsage],
    containers: &AttestedState,
    limits: &AuditConfig,
) -> AuditResult {
    let mut verdict = AuditResult::default();
    for gpu in seen {
        verdict.compare_gpu(gpu, books, containers, limits);
    }
    for books in books {
        let forged = books.processes.iter().filter(|member| member.tampered);
        let finding = |process| Finding::ForgedPage {
            allocation: books.allocation,
            process,
        };
        let found = forged.map(|member| finding(member.process));
        verdict.findings.extend(found);
    }
    verdict
}

/// Who a listed process is to the ledger.
enum Attribution {
    /// A member of this container, or a dead one whose memory is still charged there.
    Tracked(AllocationId),
    /// It has the shim, in this container, and is older than this agent: it had a session of which the record is
    /// lost, and will have one when it next needs the agent.
    SessionLost(AllocationId),
    /// It should have one; where its container is ours, which.
    Untracked(Option<AllocationId>),
    /// It died since the driver was asked.
    Exited,
}

impl AuditResult {
    /// The driver's figures of a process are for all that it has, its context too.
    fn compare_gpu(
        &mut self,
        seen: &GpuSample,
        books: &[ContainerUsage],
        containers: &AttestedState,
        limits: &AuditConfig,
    ) {
        let GpuSample {
            gpu,
            unattributed_signed: residual,
            unattributed: unlisted,
            unreclaimed_or_retained: left,
            processes,
        } = seen;
        let mut charged: BTreeMap<AllocationId, Vec<&ListedProcess>> = BTreeMap::new();
        let (mut intruders, mut of_dead) = (0, 0_u64);
        for listed in processes {
            let bytes = listed.bytes.unwrap_or_default();
            let outside = match attribute(listed, gpu, books, containers, limits) {
                Attribution::Tracked(allocation) => {
                    charged.entry(allocation).or_default().push(listed);
                    continue;
                }
                Attribution::Exited => {
                    of_dead = of_dead.saturating_add(bytes.0);
                    continue;
                }
                Attribution::SessionLost(allocation) => Some(allocation),
                Attribution::Untracked(allocation) => {
                    intruders += 1;
                    self.findings
                        .extend(untracked_finding(gpu, listed, allocation));
                    allocation
                }
            };
            let Some(allocation) = outside else { continue };
            charged.entry(allocation).or_default().push(listed);
            let outside = self
                .untracked_memory
                .entry((allocation, gpu.clone()))
                .or_default();
            outside.insert(listed.pid, bytes);
        }
        for of_it in books {
            let listed = charged.remove(&of_it.allocation).unwrap_or_default();
            self.compare_container(gpu, of_it, &listed, limits);
        }
        self.untracked_processes.insert(gpu.clone(), intruders);
        self.unattributed_signed.insert(gpu.clone(), *residual);
        let known = books
            .iter()
            .map(|books| known_unattributed(books, gpu, processes, limits))
            .fold(left.0, u64::saturating_add)
            .saturating_add(limits.tolerance.0);
        // The driver lists a dead process while another has its open files; most just end, so this is no finding.
        let of_nobody = unlisted.map(|bytes| bytes.0.saturating_add(of_dead));
        let unaccounted = of_nobody.map(|bytes| Bytes(bytes.saturating_sub(known)));
        self.unaccounted
            .extend(unaccounted.map(|bytes| (gpu.clone(), bytes)));
        if let Some(bytes) = unlisted.filter(|bytes| bytes.0 > known) {
            self.unaccounted(seen, bytes, books, containers);
        }
    }

    /// Who may hold what nobody is charged for.
    fn unaccounted(
        &mut self,
        seen: &GpuSample,
        bytes: Bytes,
        books: &[ContainerUsage],
        containers: &AttestedState,
    ) {
        let gpu = &seen.gpu;
        let with_driver = driver_users(gpu, books, containers);
        let mut of_them = with_driver.iter().map(|(books, ..)| books.allocation);
        let first = of_them.next();
        let only = first.filter(|first| of_them.all(|other| other == *first));
        self.findings.push(Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: only,
        });
        let is_listed = |pid: u32| seen.processes.iter().any(|listed| listed.pid == pid);
        let is_holder = |(books, pid, running): &&(&ContainerUsage, u32, &AttestedProcess)| {
            let known_before = running.has_shim && running.start < containers.agent_start;
            !is_listed(*pid)
                && !known_before
                && !books.has_session(*pid, running.start)
                && !is_forked_copy(running, books, containers)
        };
        let holders: Vec<_> = with_driver.iter().filter(is_holder).collect();
        for (books, pid, running) in &holders {
            let allocation = books.allocation;
            let mut all = holders.iter();
            self.findings.push(Finding::Holder {
                gpu: gpu.clone(),
                process: Process {
                    pid: *pid,
                    start: running.start,
                },
                bytes,
                allocation,
                is_only_suspect: all.all(|(of_it, ..)| of_it.allocation == allocation),
            });
        }
    }

    fn compare_container(
        &mut self,
        gpu: &GpuUuid,
        books: &ContainerUsage,
        listed: &[&ListedProcess],
        limits: &AuditConfig,
    ) {
        let index = account_index(books, gpu);
        let Some((index, account)) = index.and_then(|i| Some((i, books.accounts.get(i)?))) else {
            return;
        };
        let AccountBalance {
            quota,
            granted,
            used,
            exited: retired,
            ..
        } = account;
        let charged: u64 = listed
            .iter()
            .filter_map(|listed| listed.bytes)
            .fold(0, |sum, bytes| sum.saturating_add(bytes.0));
        let known = used.0.saturating_add(retired.0);
        let key = (books.allocation, gpu.clone());
        self.drift.insert(key, signed_difference(charged, known));
        let allowance = allowance_of(listed.len(), *quota, limits);
        // A quota that was made smaller holds once frees have caught up.
        let allowed = quota.0.max(granted.0.saturating_add(retired.0));
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
            let member =
                |member: &&crate::sessions::ProcessCredit| member.process.pid == listed.pid;
            let member = books.processes.iter().find(member);
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
            allocation: books.allocation,
            gpu: gpu.clone(),
            quota: *quota,
            charged: Bytes(charged),
            processes,
        });
    }
}

fn attribute(
    listed: &ListedProcess,
    gpu: &GpuUuid,
    books: &[ContainerUsage],
    known: &AttestedState,
    limits: &AuditConfig,
) -> Attribution {
    let pid = listed.pid;
    let has_gpu = |books: &&ContainerUsage| account_index(books, gpu).is_some();
    let retired = || {
        let retired = |books: &&ContainerUsage| books.exited_pids.contains(&pid);
        books.iter().filter(has_gpu).find(retired)
    };
    let Some(LiveProcess { start, owner }) = &listed.live else {
        return retired().map_or(Attribution::Exited, |books| {
            Attribution::Tracked(books.allocation)
        });
    };
    let is_member = |books: &&ContainerUsage| books.has_session(pid, *start);
    if let Some(books) = books.iter().filter(has_gpu).find(is_member) {
        return Attribution::Tracked(books.allocation);
    }
    // A pid comes again while the driver lists the dead process that had it.
    let left = |books: &&ContainerUsage| {
        let account = account_index(books, gpu).and_then(|index| books.accounts.get(index));
        let left = account.map_or(0, |account| account.exited.0);
        let most = left.saturating_add(limits.process_allowance.0);
        listed.bytes.is_some_and(|bytes| bytes.0 <= most)
    };
    if let Some(books) = retired().filter(left) {
        return Attribution::Tracked(books.allocation);
    }
    // The driver listed the exited process that had this pid, and has given its memory back since.
    if retired().is_none() && known.exited_pids.contains(&pid) {
        return Attribution::Exited;
    }
    let ProcessOwner::Container { pod, cgroup } = owner else {
        return Attribution::Untracked(None);
    };
    let at_home =
        |books: &&ContainerUsage| books.pod == *pod && books.cgroup.as_ref() == Some(cgroup);
    let allocation = known
        .allocations
        .get(&(pod.clone(), cgroup.clone()))
        .copied()
        .or_else(|| books.iter().find(at_home).map(|books| books.allocation));
    let Some(allocation) = allocation else {
        return Attribution::Untracked(None);
    };
    let of_it = books.iter().find(|books| books.allocation == allocation);
    let attested = known.processes.get(&pid);
    let has_shim = attested.is_none_or(|(_, running)| running.has_shim);
    // The shim says hello before it makes a context.
    match of_it.filter(has_gpu) {
        Some(_) if has_shim && *start < known.agent_start => Attribution::SessionLost(allocation),
        _ => Attribution::Untracked(Some(allocation)),
    }
}

fn untracked_finding(
    gpu: &GpuUuid,
    listed: &ListedProcess,
    allocation: Option<AllocationId>,
) -> Option<Finding> {
    let LiveProcess { start, owner } = listed.live.clone()?;
    let pid = listed.pid;
    Some(Finding::UntrackedProcess {
        gpu: gpu.clone(),
        process: Process { pid, start },
        bytes: listed.bytes,
        owner,
        allocation,
    })
}

fn account_index(books: &ContainerUsage, gpu: &GpuUuid) -> Option<usize> {
    let is_it =
        |account: &AccountBalance| matches!(&account.account, Account::Gpu(uuid) if uuid == gpu);
    books.accounts.iter().position(is_it)
}

/// The processes that use the driver, of containers with this GPU, each with the books of its container.
fn driver_users<'a>(
    gpu: &GpuUuid,
    books: &'a [ContainerUsage],
    containers: &'a AttestedState,
) -> Vec<(&'a ContainerUsage, u32, &'a AttestedProcess)> {
    let processes = containers.processes.iter();
    let uses_it = |(pid, (allocation, running)): (&u32, &'a (AllocationId, AttestedProcess))| {
        let of_it = books.iter().find(|books| books.allocation == *allocation)?;
        let uses_it = !running.device_mappings.is_empty() && account_index(of_it, gpu).is_some();
        uses_it.then_some((of_it, *pid, running))
    };
    processes.filter_map(uses_it).collect()
}

/// Whether all that a process has of the driver it has from a process with a session that forked it: the driver refuses
/// to be used in a child, and what a child has of its own is mapped elsewhere. Where the parent is dead nobody can tell:
/// what it had stays charged as long as the child has it too.
fn is_forked_copy(
    running: &AttestedProcess,
    books: &ContainerUsage,
    containers: &AttestedState,
) -> bool {
    if running.forked && !books.exited_pids.is_empty() {
        return true;
    }
    let mut members = books.processes.iter();
    members.any(|member| {
        let of_it = containers.processes.get(&member.process.pid);
        of_it.is_some_and(|(_, parent)| {
            parent.start == member.process.start
                && running.device_mappings.is_subset(&parent.device_mappings)
        })
    })
}

/// What so many processes of a container may have besides its quota: the process allowance for each, and for all
/// together one and a tenth of the quota.
fn allowance_of(processes: usize, quota: Bytes, limits: &AuditConfig) -> u64 {
    let each = limits.process_allowance.0.saturating_mul(processes as u64);
    let most = limits.process_allowance.0.saturating_add(quota.0 / 10);
    each.min(most)
}

/// What the driver may list for nobody on a GPU and a container's ledger knows, at most.
fn known_unattributed(
    books: &ContainerUsage,
    gpu: &GpuUuid,
    listed: &[ListedProcess],
    limits: &AuditConfig,
) -> u64 {
    let account = account_index(books, gpu).and_then(|index| books.accounts.get(index));
    let Some(account) = account else { return 0 };
    let of_it = |listed: &&ListedProcess| match &listed.live {
        Some(LiveProcess { start, .. }) => books.has_session(listed.pid, *start),
        None => books.exited_pids.contains(&listed.pid),
    };
    let of_it: Vec<&ListedProcess> = listed.iter().filter(of_it).collect();
    let charged = of_it.iter().filter_map(|listed| listed.bytes);
    let charged = charged.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0));
    let of_dead = account.exited.0.saturating_add(account.leased.0);
    let may = of_dead.saturating_add(account.exported.0);
    let has = of_dead
        .saturating_add(account.used.0)
        .saturating_add(allowance_of(of_it.len(), account.quota, limits));
    let managed = books.accounts.iter();
    let managed = managed.filter(|of_it| of_it.account == Account::Managed);
    // Managed memory that is on a GPU is charged to no process, and which GPU it is on cannot be told.
    let managed = managed.fold(0, |sum: u64, managed| sum.saturating_add(managed.used.0));
    may.min(has.saturating_sub(charged)).saturating_add(managed)
}

fn signed_difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(if a > b { i64::MAX } else { i64::MIN })
}

#[cfg(test)]
mod tests;
