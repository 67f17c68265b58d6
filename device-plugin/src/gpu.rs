//! What GPUs the node has and whether each is fit for new pods, as a `watch`.
//!
//! | module | job |
//! |---|---|
//! | [`health`] | decides whether one GPU is fit: pure |
//! | [`holders`] | asks the kernel module which processes hold memory without a context |
//! | [`registry`] | keeps the GPUs that NVML listed, with their health: pure |
//! | [`cgroup_limit`] | sets the driver's own memory limit of a cgroup |
//! | [`mig`] | finds the capability nodes of a MIG instance |
//! | [`pci`] | where a GPU is on the PCI bus |
//! | [`drain`] | decides and carries out the drain of GPUs |
//! | [`gpu_generations`] | counts how often each GPU's memory was lost |
//! | [`read_nvml`] | asks NVML, through a process for each GPU |
//! | [`xid`] | what each XID asks for: a table |

pub mod cgroup_limit;
pub mod drain;
pub mod generations;
pub mod health;
pub mod holders;
pub mod mig;
pub mod nvml;
pub mod pci;
pub mod registry;
pub mod xid;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::gpu::drain::DrainState;
use crate::units::{Bytes, GpuUuid};
use health::{Health, PersistedHealth, UnhealthyReason};
use pci::PciAddress;

/// A GPU, or a MIG instance, which is a GPU to its programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// The number of its device node (`/dev/nvidia<minor>`); a MIG instance has its parent's.
    pub minor: u32,
    /// The model, as NVML names it.
    pub model: String,
    /// What programs can allocate in all: NVML's total less what the driver keeps for itself.
    pub memory: Bytes,
    /// Where it is on the PCI bus; a MIG instance is where its parent is. None where NVML does not tell.
    pub pci: Option<PciAddress>,
    /// The GPU that a MIG instance is cut from.
    pub mig_parent: Option<GpuUuid>,
    /// The numbers of a MIG instance's capability nodes (`/dev/nvidia-caps/nvidia-cap<N>`).
    pub capabilities: Vec<u32>,
}

impl Gpu {
    /// Whether these are it, or the GPU that it is cut from.
    pub fn is_in(&self, gpus: &BTreeSet<GpuUuid>) -> bool {
        let parent = self.mig_parent.as_ref();
        gpus.contains(&self.uuid) || parent.is_some_and(|parent| gpus.contains(parent))
    }
}

/// A GPU as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// The GPU.
    pub gpu: Gpu,
    /// Whether new pods may get it.
    pub health: Health,
    /// What of its health outlives the agent.
    pub persisted: PersistedHealth,
}

/// The node's GPUs as they stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inventory {
    /// NVML has not answered yet.
    Starting,
    /// There is no driver that answers. Tried again quietly.
    NoDriver(NoDriver),
    /// The driver answers, and there is no GPU. Tried again quietly.
    NoGpu,
    /// There are GPUs.
    Gpus {
        /// The driver's version, while it answers.
        driver: Option<String>,
        /// In NVML's order. A GPU that went missing stays in the list, Unhealthy.
        gpus: Vec<GpuState>,
    },
}

/// Why there is no driver to ask; the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoDriver {
    /// Its files or device nodes are not there.
    Missing(String),
    /// It is there and does not work.
    Failed(String),
    /// It is there and says that its kernel module is not loaded: no GPU keeps any memory then.
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
    /// The GPUs, where there are any.
    pub fn gpus(&self) -> &[GpuState] {
        match self {
            Self::Gpus { gpus, .. } => gpus,
            Self::Starting | Self::NoDriver(_) | Self::NoGpu => &[],
        }
    }

    /// The GPU at `address`, or the MIG instances that it is cut into.
    pub fn gpus_at(&self, address: PciAddress) -> Vec<GpuUuid> {
        let there = self.gpus().iter().map(|state| &state.gpu);
        let there = there.filter(|gpu| gpu.pci == Some(address));
        there.map(|gpu| gpu.uuid.clone()).collect()
    }

    /// The same, where a worker of these GPUs hangs in the driver: what a GPU does to one process it may do to the next,
    /// however well it answers NVML.
    #[must_use]
    pub fn with_stuck_provisioners(mut self, stuck: &BTreeSet<GpuUuid>) -> Self {
        if let Self::Gpus { gpus, .. } = &mut self {
            let hang = |state: &&mut GpuState| {
                state.health.is_healthy() && stuck.contains(&state.gpu.uuid)
            };
            for state in gpus.iter_mut().filter(hang) {
                state.health = Health::Unhealthy(UnhealthyReason::WorkerStuck);
            }
        }
        self
    }

    /// The same, where these GPUs are to be drained and something holds some still.
    #[must_use]
    pub fn with_draining(
        mut self,
        DrainState {
            requested: ordered,
            in_use: busy,
            ..
        }: &DrainState,
    ) -> Self {
        if let Self::Gpus { gpus, .. } = &mut self {
            for state in gpus {
                let holds = busy.contains(&state.gpu.uuid) || !state.persisted.drained;
                if holds && state.gpu.is_in(ordered) {
                    state.health = Health::Unhealthy(UnhealthyReason::Draining);
                }
            }
        }
        self
    }
}
