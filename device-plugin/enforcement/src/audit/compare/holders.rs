//! Finds the processes that may hold unaccounted memory.

use std::collections::BTreeMap;

use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_sessions::{AccountBalance, ContainerUsage, Process};

use super::finding::Finding;
use super::{
    AttestedState, AuditResult, DeviceUser, GpuSample, ListedProcess, LiveProcess, account_of,
    allocation_of,
};
use crate::attestation::AttestedProcess;

impl AuditResult {
    /// Finds processes that may hold unaccounted memory, of which the driver's figures leave at most
    /// `most_unaccounted`.
    pub(super) fn unaccounted(
        &mut self,
        sample: &GpuSample,
        bytes: Bytes,
        most_unaccounted: Bytes,
        usage: &[ContainerUsage],
        containers: &AttestedState,
    ) {
        let gpu = &sample.gpu;
        let users = driver_users(gpu, usage, containers);
        // A process that only has a descriptor shows no use of the driver, so the container is known
        // only if no other has memory of the GPU.
        let has_gpu = |container: &&ContainerUsage| account_of(container, gpu).is_some();
        let mut owners = usage.iter().filter(has_gpu);
        let only = owners.next().filter(|_| owners.next().is_none());
        let only = only.map(|container| container.allocation);
        let uses = |allocation: &AllocationId| {
            let mut users = users.iter();
            users.any(|(container, ..)| container.allocation == *allocation)
        };
        let only = only.filter(uses);
        self.findings.push(Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: only,
        });
        let mut suspects = suspects(sample, &users, usage, containers);
        suspects.extend(importers(sample, most_unaccounted, usage, containers));
        let mut pods = suspects.iter().map(|suspect| &suspect.pod);
        let first = pods.next();
        let is_only_suspect = pods.all(|pod| Some(pod) == first);
        for suspect in suspects {
            let Suspect {
                process,
                pod,
                allocation,
                imported,
            } = suspect;
            self.findings.push(Finding::Holder {
                gpu: gpu.clone(),
                process,
                bytes,
                pod,
                allocation,
                imported,
                is_only_suspect,
            });
        }
    }
}

/// A process that may hold unaccounted memory.
struct Suspect {
    process: Process,
    pod: PodUid,
    /// Its container's allocation, or one of its pod; none where the pod has none of the GPU.
    allocation: Option<AllocationId>,
    /// What it has imported, if that makes it a suspect.
    imported: Option<Bytes>,
}

/// The processes without a session that have device nodes of the driver mapped.
fn suspects(
    sample: &GpuSample,
    users: &[(&ContainerUsage, u32, &AttestedProcess)],
    usage: &[ContainerUsage],
    containers: &AttestedState,
) -> Vec<Suspect> {
    let listed = sample
        .processes
        .iter()
        .filter(|listed| listed.live.is_some());
    let is_listed = |pid: u32| listed.clone().any(|listed| listed.pid == pid);
    let is_old = |start: u64, has_shim: bool| has_shim && start < containers.agent_start;
    let is_mapped = |(container, pid, running): &&(&ContainerUsage, u32, &AttestedProcess)| {
        !is_listed(*pid)
            && !is_old(running.start, running.has_shim)
            && !container.has_session(*pid, running.start)
            && !is_forked_copy(running, container, containers)
    };
    let mut suspects: BTreeMap<u32, Suspect> = BTreeMap::new();
    for (container, pid, running) in users.iter().filter(is_mapped) {
        let suspect = Suspect {
            process: Process {
                pid: *pid,
                start: running.start,
            },
            pod: container.pod.clone(),
            allocation: Some(container.allocation),
            imported: None,
        };
        suspects.insert(*pid, suspect);
    }
    for (pid, user) in &containers.device_users {
        if is_listed(*pid) || may_have_session(*pid, user, usage, containers) {
            continue;
        }
        let DeviceUser { start, pod, cgroup } = user;
        let (pid, start) = (*pid, *start);
        suspects.entry(pid).or_insert_with(|| Suspect {
            process: Process { pid, start },
            pod: pod.clone(),
            allocation: allocation_of(pod, cgroup, &sample.gpu, usage, containers),
            imported: None,
        });
    }
    suspects.into_values().collect()
}

/// The processes that have imported more than anybody is known to have exported, even if each
/// imported all of it twice, while as much is unaccounted.
fn importers(
    sample: &GpuSample,
    most_unaccounted: Bytes,
    usage: &[ContainerUsage],
    containers: &AttestedState,
) -> Vec<Suspect> {
    let accounts = usage
        .iter()
        .filter_map(|container| account_of(container, &sample.gpu));
    let exported = accounts.flat_map(|(_, account)| {
        let AccountBalance {
            exported,
            exited,
            leased,
            ..
        } = account;
        [exported.0, exited.0, leased.0]
    });
    let left = sample.unreclaimed_or_retained.0;
    let exported = exported.fold(left, u64::saturating_add);
    let suspect = |listed: &ListedProcess| {
        let LiveProcess { start, owner } = listed.live.as_ref()?;
        let ProcessOwner::Container { pod, cgroup } = owner else {
            return None;
        };
        let imported = listed.bytes?;
        let beyond = imported.0.saturating_sub(exported);
        if beyond <= exported || beyond == 0 || beyond > most_unaccounted.0 {
            return None;
        }
        Some(Suspect {
            process: Process {
                pid: listed.pid,
                start: *start,
            },
            pod: pod.clone(),
            allocation: allocation_of(pod, cgroup, &sample.gpu, usage, containers),
            imported: Some(imported),
        })
    };
    sample.importers.iter().filter_map(suspect).collect()
}

/// Whether a process outside of the attested ones may have the mappings of a session: its own, or
/// one whose record is lost. One that the attestation has not read yet counts so.
fn may_have_session(
    pid: u32,
    user: &DeviceUser,
    usage: &[ContainerUsage],
    containers: &AttestedState,
) -> bool {
    let DeviceUser { start, pod, cgroup } = user;
    let mut all = usage.iter();
    *start < containers.agent_start
        || all.any(|container| container.has_session(pid, *start))
        || containers
            .allocations
            .contains_key(&(pod.clone(), cgroup.clone()))
}

/// The processes that use the driver, of containers with this GPU, each with its container's usage.
fn driver_users<'a>(
    gpu: &GpuUuid,
    usage: &'a [ContainerUsage],
    containers: &'a AttestedState,
) -> Vec<(&'a ContainerUsage, u32, &'a AttestedProcess)> {
    let processes = containers.processes.iter();
    let uses_gpu = |(pid, (allocation, running)): (&u32, &'a (AllocationId, AttestedProcess))| {
        let container = usage
            .iter()
            .find(|container| container.allocation == *allocation)?;
        let uses_gpu = !running.device_mappings.is_empty() && account_of(container, gpu).is_some();
        uses_gpu.then_some((container, *pid, running))
    };
    processes.filter_map(uses_gpu).collect()
}

/// Whether all driver mappings of a process come from a fork of a process with a session. The
/// driver refuses to work in a forked child, and a child's own mappings have other addresses. If
/// the parent has exited, a comparison is impossible; its memory stays charged as long as the child
/// holds it.
fn is_forked_copy(
    running: &AttestedProcess,
    container: &ContainerUsage,
    containers: &AttestedState,
) -> bool {
    if running.forked && !container.exited_pids.is_empty() {
        return true;
    }
    let mut members = container.processes.iter();
    members.any(|member| {
        let attested = containers.processes.get(&member.process.pid);
        attested.is_some_and(|(_, parent)| {
            parent.start == member.process.start
                && running.device_mappings.is_subset(&parent.device_mappings)
        })
    })
}
