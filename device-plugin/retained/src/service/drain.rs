//! Releases GPUs that are drained.

use std::collections::BTreeSet;

use bursar_ledger::units::GpuUuid;

use super::State;
use super::keep_alive::KeepAlive;

impl State {
    /// Takes the GPUs to drain; releases the new ones.
    pub(super) fn apply_drain(&mut self) {
        let drained = self.service.drain.borrow_and_update().requested.clone();
        if drained == self.drained {
            return;
        }
        self.service.provisioners.drain(drained.clone());
        self.leases.drain(drained.clone());
        // Until the GPU's generation has grown, the driver may be replaced or loaded with other
        // options.
        let verdicts = &mut self.service.scrub_cache;
        drained.iter().for_each(|gpu| verdicts.forget(gpu));
        self.drained = drained;
        self.close_misplaced_keep_alive();
        // The driver may have been replaced.
        self.driver_version = self.service.program.driver_version();
        self.service
            .sessions
            .set_driver_version(&self.driver_version);
        self.failed_checks.clear();
        self.unmeasured.clear();
    }

    /// The drained GPUs of which this service holds nothing.
    pub(super) fn released_gpus(&self) -> BTreeSet<GpuUuid> {
        let may_be_held = self.service.store_events.is_some() && !self.leases.is_store_connected();
        let is_held = |gpu: &GpuUuid| {
            let may_be_keep_alive = match &self.keep_alive {
                KeepAlive::None => false,
                KeepAlive::Creating(at) | KeepAlive::Stored(Some(at)) => at == gpu,
                KeepAlive::Stored(None) | KeepAlive::Closing => true,
            };
            may_be_held
                || may_be_keep_alive
                || self.leases.has_leases_on(gpu)
                || self.scrub_checks.contains(gpu)
                || self.service.provisioners.may_hold(gpu)
        };
        let drained = self.drained.iter();
        drained.filter(|gpu| !is_held(gpu)).cloned().collect()
    }
}
