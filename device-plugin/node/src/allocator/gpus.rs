//! Applies changes of the node's GPUs to the ledger.

use std::collections::{BTreeMap, BTreeSet};

use bursar_config::ResourcesConfig;
use bursar_crds::gpu_node::Reservation;
use bursar_gpu::GpuState;
use bursar_gpu::cuda_fitness::{CudaFitnesses, CudaVerdict, gpus_where};
use bursar_gpu::uvm::UvmModule;
use bursar_ledger::BootTime;
use bursar_ledger::units::{Bytes, GpuUuid};
use tracing::{info, warn};

use super::super::capacity;
use super::super::host::HostOps;
use super::NodeAllocator;

impl<H: HostOps> NodeAllocator<H> {
    /// Replaces the GPUs by those that NVML lists now.
    pub async fn set_gpus(&mut self, gpus: Vec<GpuState>, now: BootTime) {
        self.ledger
            .set_gpus(capacity::ledger_gpus(&gpus, &self.config));
        if !gpus.is_empty() && std::mem::take(&mut self.reclaim_all_pending) {
            // The lost record may have listed any amount of unreclaimed memory.
            for state in &gpus {
                self.ledger.mark_tenants_unknown(&state.gpu.uuid);
                self.ledger
                    .add_unreclaimed(state.gpu.uuid.clone(), state.gpu.memory, now);
            }
        }
        self.gpus = gpus;
        self.checkpoint_dirty = true;
        self.bind_queued(now).await;
    }

    pub(crate) fn set_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.gpu_generations = generations;
    }

    /// Binds managed memory only while the driver's module allows it. Bound memory stays bound.
    pub async fn set_uvm_module(&mut self, module: UvmModule, now: BootTime) {
        if self.uvm == module {
            return;
        }
        let before = std::mem::replace(&mut self.uvm, module).check_eviction();
        let offered = capacity::managed_capacity(&self.offered());
        self.ledger.set_managed_capacity(offered);
        let after = self.uvm.check_eviction();
        if self.config.managed_capacity > Bytes::ZERO && after != before {
            match after {
                Ok(()) => info!("managed memory is offered"),
                Err(why) => warn!(%why, "managed memory is not offered"),
            }
        }
        self.bind_queued(now).await;
    }

    /// The resources that the node offers now.
    pub(crate) fn offered(&self) -> ResourcesConfig {
        capacity::offered(&self.config, &self.uvm)
    }

    /// The resources that the node offers once the first starts have results.
    pub(crate) fn offered_after_first_starts(&self) -> ResourcesConfig {
        let module = UvmModule {
            awaits_first_starts: false,
            ..self.uvm.clone()
        };
        capacity::offered(&self.config, &module)
    }

    /// Restricts GPUs of several namespaces to those whose driver was proven to clear freed memory.
    pub async fn set_scrubbed_gpus(&mut self, cleared: BTreeSet<GpuUuid>, now: BootTime) {
        if self.ledger.set_shareable_gpus(cleared) {
            self.bind_queued(now).await;
        }
    }

    /// Excludes GPUs that CUDA refused last, until a start succeeds there, and GPUs on which CUDA
    /// was not tried yet. An unfit GPU is excluded here too: the inventory, which marks it
    /// unhealthy, may come before or after.
    pub async fn set_cuda_fitness(&mut self, fitnesses: &CudaFitnesses, now: BootTime) {
        let refused = gpus_where(fitnesses, |fitness| {
            matches!(
                fitness.verdict,
                CudaVerdict::Refused | CudaVerdict::Unfit(_)
            )
        });
        let tried = gpus_where(fitnesses, |fitness| fitness.verdict != CudaVerdict::Untried);
        let has_refused_changed = self.ledger.set_refused_gpus(refused);
        let has_tried_changed = self.ledger.set_tried_gpus(tried);
        if has_refused_changed || has_tried_changed {
            self.bind_queued(now).await;
        }
    }

    /// Excludes memory that is in use and charged to no container from binding.
    pub async fn set_withheld(&mut self, withheld: BTreeMap<GpuUuid, Bytes>, now: BootTime) {
        if self.ledger.set_withheld(withheld) {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }

    /// Applies the operator's reservations.
    pub async fn set_reservations(&mut self, reservations: &[Reservation], now: BootTime) {
        if self
            .ledger
            .set_reservations(capacity::parse_reservations(reservations))
        {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }
}
