//! Applies what the processes report.

use std::time::Instant;

use bursar_host::clock;
use bursar_ledger::units::GpuUuid;
use tracing::warn;

use super::NvmlWatcher;
use super::process::{ProcessNumber, ProcessReport};
use super::protocol::{GpuProbe, Response, Scope};
use super::slot::ProbeSlot;

impl NvmlWatcher {
    pub(super) fn handle_report(&mut self, id: ProcessNumber, report: ProcessReport) {
        let runs_process =
            |slot: &&mut ProbeSlot| slot.process.as_ref().is_some_and(|run| run.id == id);
        let slots = self.gpu_slots.iter_mut().chain([&mut self.driver_slot]);
        let Some(slot) = slots.into_iter().find(runs_process) else {
            if matches!(report, ProcessReport::Exited) {
                self.exiting.remove(&id);
            }
            return;
        };
        let now = Instant::now();
        match report {
            ProcessReport::Probed(response) => {
                slot.is_hung = false;
                if let Some(running) = &mut slot.process {
                    running.is_probing = false;
                }
                self.handle_probe(id, response);
            }
            ProcessReport::Xids(codes) => {
                if let Some(uuid) = slot.uuid.clone() {
                    self.handle_xids(&uuid, &codes);
                }
            }
            ProcessReport::TimedOut => {
                if !std::mem::replace(&mut slot.is_hung, true) {
                    let gpu = slot.uuid.as_ref().map(GpuUuid::as_str);
                    warn!(gpu, scope = ?slot.scope, "nvml call hangs");
                }
                slot.stop_process();
                if let Some(uuid) = slot.uuid.clone() {
                    self.registry.record_timeout(&uuid, now);
                    self.publish_inventory();
                }
            }
            ProcessReport::Exited => {
                let ended = slot.process.take();
                if ended.is_some_and(|ended| ended.is_probing) {
                    slot.found = Some(GpuProbe::Failed(
                        "the process that calls NVML has ended".to_owned(),
                    ));
                }
                // Without the driver the next process would fail at once too.
                if !slot.is_hung && self.gpu_count > 0 {
                    // The GPU's XIDs are lost until the next process has registered for them.
                    self.next_round = now;
                }
            }
        }
    }

    fn handle_probe(&mut self, id: ProcessNumber, response: Response) {
        let runs_process =
            |slot: &&mut ProbeSlot| slot.process.as_ref().is_some_and(|run| run.id == id);
        match response {
            Response::Driver { gpus, version } => {
                (self.gpu_count, self.known_count) = (gpus, gpus);
                self.driver_version = version;
                let is_hung = self.gpu_slots.iter().any(|slot| slot.is_hung);
                let slots = self.gpu_slots.len() + self.registry.drained_count();
                if gpus as usize > slots && !is_hung {
                    // The count does not say which of the GPUs is new.
                    for slot in std::mem::take(&mut self.gpu_slots) {
                        self.retire(slot);
                    }
                }
            }
            Response::Gpu { uuid, found } => {
                let drained = self.registry.drained();
                let Some(slot) = self.gpu_slots.iter_mut().find(runs_process) else {
                    return;
                };
                slot.uuid = uuid.or_else(|| slot.uuid.take());
                if let GpuProbe::Gpus(gpus, address) = &found {
                    slot.scope = address.map_or(slot.scope, Scope::Address);
                    if !gpus.is_empty() && gpus.iter().all(|gpu| gpu.is_in(drained)) {
                        // A starting agent probes all GPUs once, since their UUIDs are unknown
                        // before.
                        slot.stop_process();
                    }
                }
                slot.found = Some(found);
            }
            Response::NoDriver(why) => match self.gpu_slots.iter_mut().find(runs_process) {
                Some(slot) => slot.found = Some(GpuProbe::Failed(why.to_string())),
                None => self.reset_driver(why),
            },
            Response::Xids(_) | Response::Sample(_) | Response::Limit(_) => {}
        }
    }

    fn handle_xids(&mut self, uuid: &GpuUuid, codes: &[u64]) {
        let had_unhealthy = self.registry.has_unhealthy();
        for code in codes.iter().copied() {
            warn!(gpu = %uuid, xid = code, "xid");
            self.registry.record_xid(uuid, code, Instant::now());
            if let Some(address) = self.registry.pci_address_of(uuid) {
                self.xids
                    .send_modify(|recent_xids| recent_xids.record(address, code, clock::now()));
            }
        }
        self.publish_inventory();
        if !had_unhealthy && self.registry.has_unhealthy() {
            self.next_round = Instant::now();
        }
    }
}
