//! Bounds the managed memory of a GPU that the accounts explain.

use std::collections::BTreeSet;

use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_sessions::{Account, ContainerUsage, ProcessCredit};

use super::finding::Finding;
use super::{AttestedState, AuditResult, GpuAccount, GpuFigures, GpuSample};

/// The free memory that the driver keeps on a GPU once managed memory was there. The driver takes
/// 64 chunks of 2 MiB at a time, and keeps them until the GPU's last context ends.
pub(super) const MANAGED_CACHE: Bytes = Bytes::mib(128);

/// The mappings of the driver's node of managed memory in a process that uses no managed memory. A
/// context maps 2 MiB.
const UNMANAGED_MAPPING: Bytes = Bytes::mib(8);

/// The mappings of managed memory of a container's processes.
struct ManagedMappings {
    /// The bytes of these mappings.
    sum: Bytes,
    /// The bytes that the processes would have mapped without managed memory.
    slack: Bytes,
    /// Whether the mappings of all processes with a session are known.
    is_complete: bool,
}

fn managed_mapped(container: &ContainerUsage, containers: &AttestedState) -> ManagedMappings {
    let processes = containers.processes.values();
    let of_container = processes.filter(|(allocation, _)| *allocation == container.allocation);
    let mapped = of_container.map(|(_, running)| running.managed_mapped);
    let mapped: Vec<u64> = mapped.collect();
    let is_known = |member: &ProcessCredit| {
        let known = containers.processes.get(&member.process.pid);
        known.is_some_and(|(_, running)| running.start == member.process.start)
    };
    ManagedMappings {
        sum: mapped.iter().copied().map(Bytes).sum(),
        slack: Bytes(UNMANAGED_MAPPING.0.saturating_mul(mapped.len() as u64)),
        is_complete: container.processes.iter().all(is_known),
    }
}

impl GpuAccount<'_> {
    /// The managed memory that the container was charged, whether the quota of the GPU covers it or
    /// not.
    fn managed_charge(&self) -> Bytes {
        let managed = self.container.accounts.iter();
        let managed = managed.filter(|account| account.account == Account::Managed);
        self.balance.managed + managed.map(|managed| managed.used).sum()
    }

    /// The most managed memory of the GPU that the container's accounts explain: what it was
    /// charged, and its processes have mapped.
    pub(super) fn known_managed(&self, containers: &AttestedState) -> Bytes {
        let charged = self.managed_charge();
        let mapped = managed_mapped(self.container, containers);
        match mapped.is_complete {
            true => charged.min(mapped.sum),
            false => charged,
        }
    }
}

/// Whether a container has or had managed memory, or its processes have it mapped. A program may
/// allocate it and free it between two audits.
fn had_managed(container: &ContainerUsage, containers: &AttestedState) -> bool {
    let mapped = managed_mapped(container, containers);
    mapped.sum > mapped.slack || container.had_managed
}

/// Updates the GPUs on which the driver may keep free memory for managed memory. They are those of
/// containers that had some since the driver last listed no process there. What containers had
/// before the agent's start is unknown, so a GPU whose processes are older counts too.
pub(crate) fn update_managed_gpus(
    gpus: &mut BTreeSet<GpuUuid>,
    samples: &[GpuSample],
    usage: &[ContainerUsage],
    containers: &AttestedState,
) {
    for GpuSample { gpu, processes, .. } in samples {
        let mut live = processes.iter().filter_map(|listed| listed.live.as_ref());
        if processes.is_empty() {
            gpus.remove(gpu);
        } else if live.any(|process| process.start < containers.agent_start) {
            gpus.insert(gpu.clone());
        }
    }
    let users = usage
        .iter()
        .filter(|container| had_managed(container, containers));
    gpus.extend(users.flat_map(|container| container.gpus().cloned()));
}

impl AuditResult {
    /// Finds containers that may have `excess` bytes of a GPU as managed memory beyond their
    /// charges. Returns the bytes that they may have together.
    pub(super) fn over_managed(&mut self, figures: &GpuFigures<'_>, excess: Bytes) -> Bytes {
        let mut explained = Bytes::ZERO;
        for account in &figures.accounts {
            let charged = account.managed_charge();
            let mapped = managed_mapped(account.container, figures.containers);
            let beyond = mapped.sum.saturating_sub(charged + mapped.slack);
            if beyond > Bytes::ZERO {
                explained = explained + beyond;
                self.findings.push(Finding::OverManaged {
                    allocation: account.container.allocation,
                    gpu: figures.sample.gpu.clone(),
                    charged,
                    mapped: mapped.sum,
                    bytes: excess.min(beyond),
                });
            }
        }
        explained
    }
}
