//! Keeps the node's GPUs as NVML lists them, with what the driver offers on them.

use std::collections::BTreeMap;

use bursar_config::ResourcesConfig;
use bursar_gpu::GpuState;
use bursar_gpu::health::{Health, UnhealthyReason};
use bursar_gpu::uvm::UvmModule;
use bursar_ledger::Placement;
use bursar_ledger::units::GpuUuid;

use super::super::capacity;
use super::super::host::HostError;

/// The node's GPUs.
#[derive(Debug, Default)]
pub(crate) struct NodeGpus {
    /// The GPUs of the inventory, for their device nodes.
    states: Vec<GpuState>,
    generations: BTreeMap<GpuUuid, u64>,
    /// The driver's module for managed memory, as it was read last.
    uvm: UvmModule,
}

impl NodeGpus {
    /// Replaces the GPUs by those that NVML lists now.
    pub(super) fn set_states(&mut self, states: Vec<GpuState>) {
        self.states = states;
    }

    pub(super) fn set_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.generations = generations;
    }

    /// The generation of each GPU.
    pub(super) fn generations(&self) -> &BTreeMap<GpuUuid, u64> {
        &self.generations
    }

    /// Replaces the module for managed memory. Returns the one before.
    pub(super) fn set_uvm(&mut self, module: UvmModule) -> UvmModule {
        std::mem::replace(&mut self.uvm, module)
    }

    /// The module for managed memory.
    pub(super) fn uvm(&self) -> &UvmModule {
        &self.uvm
    }

    /// The resources of `config` that the node offers now.
    pub(super) fn offered(&self, config: &ResourcesConfig) -> ResourcesConfig {
        capacity::offered(config, &self.uvm)
    }

    /// The resources of `config` that the node offers once the first starts have results.
    pub(super) fn offered_after_first_starts(&self, config: &ResourcesConfig) -> ResourcesConfig {
        let module = UvmModule {
            awaits_first_starts: false,
            ..self.uvm.clone()
        };
        capacity::offered(config, &module)
    }

    /// A GPU of the placement that is being drained.
    pub(super) fn find_drained(&self, placement: &Placement) -> Option<GpuUuid> {
        let Placement::Device(shares) = placement else {
            return None;
        };
        let is_drained = |state: &&GpuState| {
            matches!(
                state.health,
                Health::Unhealthy(UnhealthyReason::Draining | UnhealthyReason::Drained)
            )
        };
        let mut drained = self.states.iter().filter(is_drained);
        let bound = |state: &&GpuState| shares.iter().any(|share| share.gpu == state.gpu.uuid);
        drained.find(bound).map(|state| state.gpu.uuid.clone())
    }

    /// The device nodes of a GPU.
    pub(super) fn device_nodes(&self, uuid: &GpuUuid) -> Result<Vec<String>, HostError> {
        let state = self.states.iter().find(|state| state.gpu.uuid == *uuid);
        let gpu = &state
            .ok_or_else(|| HostError::GpuNotListed(uuid.clone()))?
            .gpu;
        let capability = |number: &u32| format!("nvidia-caps/nvidia-cap{number}");
        let nodes = [format!("nvidia{}", gpu.minor)].into_iter();
        Ok(nodes
            .chain(gpu.capabilities.iter().map(capability))
            .collect())
    }
}
