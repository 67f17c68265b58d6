//! Defines the messages between the agent and a process that calls NVML: one line of JSON each.

use std::path::PathBuf;

use bursar_ledger::units::{Bytes, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::cgroup_limit::CgroupLimit;
use crate::memory_sample::GpuMemorySample;
use crate::pci::PciAddress;
use crate::{Gpu, NoDriver};

/// The part of the driver about which a process calls NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Scope {
    /// No GPU: the number of GPUs, and the driver's version.
    Driver,
    /// The GPU of this index in NVML's order.
    Index(u32),
    /// The GPU at this PCI address.
    Address(PciAddress),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    /// Probe the scope.
    Probe,
    /// Return the GPU's XIDs since the last query.
    Xids,
    /// Return the memory and processes of the GPU, or of one of its MIG instances.
    Sample {
        gpu: GpuUuid,
        /// Return the processes' SM utilization too.
        with_utilization: bool,
    },
    /// Set the driver's memory limit of a cgroup, if one is given, and return it.
    Limit {
        gpu: GpuUuid,
        cgroup: PathBuf,
        hard: Option<Bytes>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Response {
    /// The library cannot be used.
    NoDriver(NoDriver),
    /// The answer to a probe of [`Scope::Driver`].
    Driver {
        gpus: u32,
        version: Option<String>,
    },
    /// The answer to a probe of a GPU.
    Gpu {
        /// NVML's UUID of the GPU, where NVML reports it.
        uuid: Option<GpuUuid>,
        found: GpuProbe,
    },
    Xids(Vec<u64>),
    Sample(Result<GpuMemorySample, CallError>),
    Limit(Result<CgroupLimit, CallError>),
}

/// The result of a probe of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum GpuProbe {
    /// The GPU, or its MIG instances if it is partitioned, with the PCI address.
    Gpus(Vec<Gpu>, Option<PciAddress>),
    /// NVML answered about the GPU with this error.
    Failed(String),
    /// NVML does not find the GPU, or calls it lost.
    Lost,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum CallError {
    /// The driver does not support the call, at all or for this GPU.
    #[error("the driver does not support the call")]
    Unsupported,
    /// Another error, with NVML's text.
    #[error("{0}")]
    Nvml(String),
}
