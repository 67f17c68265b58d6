//! Discovers the node's GPUs and decides which of them are fit for new pods.
//!
//! | module | job |
//! |---|---|
//! | [`health`] | decides whether one GPU is fit: pure |
//! | [`channel_groups`] | finds the channel groups of other processes, and sets their time slices |
//! | [`holders`] | asks the kernel module which processes hold memory without a context |
//! | [`memory_sample`] | describes one sample of a GPU's memory and processes |
//! | [`rm`] | calls NVIDIA's kernel module |
//! | [`registry`] | records the GPUs that NVML listed, with their health: pure |
//! | [`cgroup_limit`] | sets and reads the driver's own memory limit of a cgroup |
//! | [`mig`] | finds the capability nodes of a MIG instance |
//! | [`pci`] | parses a GPU's address on the PCI bus |
//! | [`cuda_fitness`] | defines what the starts of allocator runtimes show of CUDA |
//! | [`drain`] | decides and carries out the drain of GPUs |
//! | [`generations`] | counts how often each GPU's memory was lost |
//! | [`nvml`] | asks NVML, through a process for each GPU |
//! | [`uvm`] | reads how the kernel module for managed memory is configured |
//! | [`xid`] | lists the remedy of each XID: a table |

pub mod cgroup_limit;
pub mod channel_groups;
pub mod cuda_fitness;
pub mod drain;
pub mod generations;
pub mod health;
pub mod holders;
pub mod memory_sample;
pub mod mig;
pub mod nvml;
pub mod pci;
pub mod registry;
pub mod rm;
pub mod uvm;
pub mod xid;

use std::collections::BTreeSet;

use bursar_ledger::units::{Bytes, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::cuda_fitness::{CudaFitnesses, CudaVerdict};
use crate::drain::DrainState;
use health::{Health, PersistedHealth, UnhealthyReason};
use pci::PciAddress;

/// A GPU, or a MIG instance, which programs use like a GPU.
///
/// The agent saves it with the GPU's generation. A new field needs a default, or the next agent
/// drops the descriptions of absent GPUs that an earlier one saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// The number of the device node (`/dev/nvidia<minor>`); a MIG instance has its parent's.
    pub minor: u32,
    /// NVML's name of the model.
    pub model: String,
    /// The bytes that programs can allocate in all: NVML's total less the driver's own reserve.
    pub memory: Bytes,
    /// The address on the PCI bus; a MIG instance has its parent's. None where NVML reports none.
    pub pci: Option<PciAddress>,
    /// The GPU of which a MIG instance is a part.
    pub mig_parent: Option<GpuUuid>,
    /// The numbers of a MIG instance's capability nodes (`/dev/nvidia-caps/nvidia-cap<N>`).
    pub capabilities: Vec<u32>,
}

impl Gpu {
    /// A simulated GPU of 16 GiB.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_uuid(uuid: &str) -> Self {
        Self {
            uuid: uuid.parse().expect("a UUID"),
            minor: 0,
            model: "Simulated".to_owned(),
            memory: Bytes::gib(16),
            pci: None,
            mig_parent: None,
            capabilities: Vec::new(),
        }
    }

    /// Whether `gpus` has this GPU, or the parent of this MIG instance.
    pub fn is_in(&self, gpus: &BTreeSet<GpuUuid>) -> bool {
        let parent = self.mig_parent.as_ref();
        gpus.contains(&self.uuid) || parent.is_some_and(|parent| gpus.contains(parent))
    }
}

/// A GPU with its present health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// The GPU.
    pub gpu: Gpu,
    /// Whether new pods may use the GPU.
    pub health: Health,
    /// The part of its health that outlives the agent.
    pub persisted: PersistedHealth,
}

/// The node's GPUs, or why the agent knows none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inventory {
    /// NVML has not answered yet.
    Starting,
    /// No driver answers. The agent tries again and logs nothing more.
    NoDriver(NoDriver),
    /// The driver answers, and the node has no GPU. The agent tries again and logs nothing more.
    NoGpu,
    /// NVML has listed at least one GPU.
    Gpus {
        /// The driver's version; none while the driver does not answer.
        driver: Option<String>,
        /// The GPUs in NVML's order. A missing GPU stays in the list as unhealthy.
        gpus: Vec<GpuState>,
    },
}

/// Why NVML cannot be used, in a text for logs and status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoDriver {
    /// The driver's files or device nodes are missing.
    Missing(String),
    /// The driver is installed and does not work.
    Failed(String),
    /// The driver says that its kernel module is not loaded: GPUs keep no memory without the
    /// module.
    NotLoaded(String),
}

impl std::fmt::Display for NoDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing(why) | Self::Failed(why) | Self::NotLoaded(why) => f.write_str(why),
        }
    }
}

impl Inventory {
    /// The GPUs; empty where the agent knows none.
    pub fn gpus(&self) -> &[GpuState] {
        match self {
            Self::Gpus { gpus, .. } => gpus,
            Self::Starting | Self::NoDriver(_) | Self::NoGpu => &[],
        }
    }

    /// The GPU at `address`, or its MIG instances.
    pub fn gpus_at(&self, address: PciAddress) -> Vec<GpuUuid> {
        let gpus = self.gpus().iter().map(|state| &state.gpu);
        let gpus = gpus.filter(|gpu| gpu.pci == Some(address));
        gpus.map(|gpu| gpu.uuid.clone()).collect()
    }

    /// Marks these GPUs unhealthy, since their provisioners show that CUDA does not work there.
    /// Other programs would hang or fail on such a GPU too, however well it answers NVML.
    #[must_use]
    pub fn with_unfit_for_cuda(mut self, fitnesses: &CudaFitnesses) -> Self {
        if let Self::Gpus { gpus, .. } = &mut self {
            for state in gpus.iter_mut().filter(|state| state.health.is_healthy()) {
                let fitness = fitnesses.get(&state.gpu.uuid);
                if let Some(CudaVerdict::Unfit(reason)) = fitness.map(|fitness| fitness.verdict) {
                    state.health = Health::Unhealthy(reason);
                }
            }
        }
        self
    }

    /// Marks all GPUs unhealthy, since another device plugin offers them too.
    #[must_use]
    pub fn with_other_owner(mut self) -> Self {
        if let Self::Gpus { gpus, .. } = &mut self {
            for state in gpus.iter_mut().filter(|state| state.health.is_healthy()) {
                state.health = Health::Unhealthy(UnhealthyReason::OtherOwner);
            }
        }
        self
    }

    /// Marks the GPUs unhealthy whose drain was requested and which are still in use.
    #[must_use]
    pub fn with_draining(
        mut self,
        DrainState {
            requested, in_use, ..
        }: &DrainState,
    ) -> Self {
        if let Self::Gpus { gpus, .. } = &mut self {
            for state in gpus {
                let is_in_use = in_use.contains(&state.gpu.uuid) || !state.persisted.drained;
                if is_in_use && state.gpu.is_in(requested) {
                    state.health = Health::Unhealthy(UnhealthyReason::Draining);
                }
            }
        }
        self
    }
}
