//! Defines what the agent asks a process that calls NVML, and what that answers: one line of JSON
//! each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::gpu::pci::PciAddress;
use crate::gpu::{Gpu, NoDriver};
use crate::sessions::GpuMemorySample;
use crate::units::{Bytes, GpuUuid};

/// The part of the driver that a process calls NVML about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Scope {
    /// No GPU: how many there are, and the driver's version.
    Driver,
    /// The GPU of this number in NVML's order.
    Index(u32),
    /// The GPU at this place on the PCI bus.
    Address(PciAddress),
}

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    /// What there is in the scope.
    Probe,
    /// The XIDs of the GPU since the last question.
    Xids,
    /// The memory and processes of the GPU, or of a MIG instance that is cut from it.
    Sample(GpuUuid),
    /// Have the driver hold the processes of a cgroup to so much of the GPU.
    SetLimit {
        gpu: GpuUuid,
        cgroup: PathBuf,
        hard: Bytes,
    },
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Response {
    /// The library cannot be used.
    NoDriver(NoDriver),
    /// To a probe of [`Scope::Driver`].
    Driver {
        gpus: u32,
        version: Option<String>,
    },
    /// To a probe of a GPU.
    Gpu {
        /// NVML's UUID, where it tells.
        uuid: Option<GpuUuid>,
        found: GpuProbe,
    },
    Xids(Vec<u64>),
    Sample(Result<GpuMemorySample, CallError>),
    SetLimit(Result<(), CallError>),
}

/// What a probe found of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum GpuProbe {
    /// The GPU, or its MIG instances where it is cut, and its place on the PCI bus.
    Gpus(Vec<Gpu>, Option<PciAddress>),
    /// NVML answers about it with this error.
    Failed(String),
    /// NVML does not find it, or calls it lost.
    Lost,
}

/// Why NVML did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum CallError {
    /// This driver has no such call, or not for this GPU.
    #[error("the driver does not offer it")]
    Unsupported,
    /// Another error, in NVML's words.
    #[error("{0}")]
    Nvml(String),
}
