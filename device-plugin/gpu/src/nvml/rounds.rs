//! Probes all GPUs in rounds.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::debug;

use super::process::NvmlProcess;
use super::protocol::{GpuProbe, Scope};
use super::slot::{ProbeSlot, SlotProcess};
use super::{ANSWER, NvmlWatcher};
use crate::NoDriver;
use crate::pci::PciAddress;
use crate::registry::ProbeResult;

/// How long a search for the library may delay a round of probes.
const FIND_TIMEOUT: Duration = Duration::from_secs(1);

impl NvmlWatcher {
    pub(super) fn is_round_pending(&self) -> bool {
        let mut slots = self.gpu_slots.iter().chain([&self.driver_slot]);
        slots.any(ProbeSlot::is_awaited) || self.lacks_slots()
    }

    /// Whether GPUs are to be probed by NVML's index, which no slot does.
    fn lacks_slots(&self) -> bool {
        self.gpu_slots.is_empty() && self.gpu_count > 0 && self.probed_addresses().is_none()
    }

    /// The addresses of the GPUs to probe; none where no GPU is drained or a GPU is unknown.
    fn probed_addresses(&self) -> Option<BTreeSet<PciAddress>> {
        self.addresses_except(self.registry.drained())
    }

    /// The addresses to probe if `drained` were the drained GPUs; none where a GPU is unknown, as
    /// one whose first probe hangs.
    pub(super) fn addresses_except(
        &self,
        drained: &BTreeSet<GpuUuid>,
    ) -> Option<BTreeSet<PciAddress>> {
        let knows_all = self.registry.physical_count() >= self.known_count as usize;
        let addresses = self.registry.addresses_except(drained);
        addresses.filter(|_| knows_all)
    }

    pub(super) async fn begin_round(&mut self) {
        let addresses = self.probed_addresses();
        self.next_round = Instant::now() + self.intervals.probe_unhealthy;
        if addresses.as_ref().is_some_and(BTreeSet::is_empty) {
            return;
        }
        let needs_process = |slot: &ProbeSlot| slot.process.is_none();
        let needs_process =
            needs_process(&self.driver_slot) || self.gpu_slots.iter().any(needs_process);
        if (needs_process || self.library.is_none())
            && let Err(why) = self.find_library().await
        {
            return self.reset_driver(NoDriver::Missing(why));
        }
        self.retire_drained(&self.registry.drained().clone());
        if let Some(addresses) = addresses {
            self.retain_at(&addresses);
            let missing = addresses.into_iter().map(Scope::Address);
            let is_there = |scope: &Scope| self.gpu_slots.iter().any(|slot| slot.scope == *scope);
            let missing: Vec<_> = missing.filter(|scope| !is_there(scope)).collect();
            // A GPU that answers only now may be one of them.
            let is_starting = self.gpu_slots.iter().any(ProbeSlot::is_starting);
            if self.exiting.is_empty() && !is_starting {
                self.gpu_slots
                    .extend(missing.into_iter().map(ProbeSlot::new));
            }
        }
        self.round_deadline = Some(Instant::now() + ANSWER);
        self.probe_all();
    }

    /// Stops the processes of all GPUs except those at these addresses. A process that waits for
    /// its first answer names its GPU with it; another process would wait as long.
    pub(super) fn retain_at(&mut self, addresses: &BTreeSet<PciAddress>) {
        let is_retired = |slot: &mut ProbeSlot| !slot.is_at(addresses) && !slot.is_starting();
        let retired: Vec<ProbeSlot> = self.gpu_slots.extract_if(.., is_retired).collect();
        retired.into_iter().for_each(|slot| self.retire(slot));
    }

    /// Stops the processes of GPUs that are `drained` whole.
    pub(super) fn retire_drained(&mut self, drained: &BTreeSet<GpuUuid>) {
        let registry = &self.registry;
        let is_retired = |slot: &mut ProbeSlot| {
            let uuid = slot.uuid.as_ref();
            uuid.is_some_and(|uuid| registry.is_drained_by(uuid, drained))
        };
        let retired: Vec<ProbeSlot> = self.gpu_slots.extract_if(.., is_retired).collect();
        retired.into_iter().for_each(|slot| self.retire(slot));
    }

    /// Searches for the library. At most one search waits; while a disk hangs the last known path
    /// is used.
    async fn find_library(&mut self) -> Result<(), String> {
        let find = self.locate_library.clone();
        let mut finding = match self.locating.take() {
            Some(finding) => finding,
            None => spawn_blocking(move || find()),
        };
        match timeout(FIND_TIMEOUT, &mut finding).await {
            Ok(found) => {
                let found = found.map_err(|error| error.to_string());
                self.library = Some(found.flatten()?);
            }
            Err(_) => self.locating = Some(finding),
        }
        let late =
            || format!("failed to find the driver within {FIND_TIMEOUT:?}: a file system hangs");
        self.library.as_ref().map(|_| ()).ok_or_else(late)
    }

    fn probe_all(&mut self) {
        let Self {
            driver_slot: driver,
            gpu_slots: gpus,
            library,
            hidden,
            next_process: started,
            report_sender: report,
            intervals: pace,
            ..
        } = self;
        for slot in gpus.iter_mut().chain([driver]) {
            if let (None, Some(library)) = (&slot.process, library.as_ref()) {
                let process = NvmlProcess::start(library, slot.scope, hidden);
                slot.process = SlotProcess::run(slot.scope, process, started, report, pace);
            }
            slot.probe();
        }
    }

    /// Probes all GPUs by NVML's index, once no other process is left.
    pub(super) fn enumerate_gpus(&mut self) {
        if self.lacks_slots() && self.exiting.is_empty() && self.round_deadline.is_some() {
            self.gpu_slots = (0..self.gpu_count)
                .map(|i| ProbeSlot::new(Scope::Index(i)))
                .collect();
            self.next_round = Instant::now();
            self.round_deadline = None;
        }
    }

    pub(super) fn end_round(&mut self) {
        self.round_deadline = None;
        for slot in self.gpu_slots.iter_mut().chain([&mut self.driver_slot]) {
            slot.is_hung |= slot.is_awaited();
        }
        if self.gpu_slots.is_empty() && self.driver_slot.is_hung {
            let why = format!("NVML does not answer within {ANSWER:?}");
            self.record_probe(ProbeResult::NoDriver(NoDriver::Failed(why)));
        } else {
            self.record_probe(self.round_result());
        }
        for slot in &mut self.gpu_slots {
            slot.replace_failed(self.intervals.replace_failed);
        }
        let is_well = !self.gpu_slots.is_empty() && !self.registry.has_unhealthy();
        let pause = if is_well {
            self.intervals.probe
        } else {
            self.intervals.probe_unhealthy
        };
        self.next_round = Instant::now() + pause;
    }

    /// The result of a round, for the registry.
    fn round_result(&self) -> ProbeResult {
        let (mut gpus, mut unresponsive, mut lost, mut timed_out) =
            <(Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
        let addresses = self.probed_addresses();
        let expected = match &addresses {
            Some(addresses) => addresses.len(),
            None => usize::from(self.gpu_count > 0),
        };
        let (mut failures_named, mut timeouts_named) = (true, self.gpu_slots.len() >= expected);
        for ProbeSlot {
            uuid,
            found,
            is_hung: hangs,
            ..
        } in &self.gpu_slots
        {
            let uuid = uuid.clone();
            match found {
                _ if *hangs => match uuid {
                    Some(uuid) => timed_out.push(uuid),
                    None => timeouts_named = false,
                },
                Some(GpuProbe::Gpus(found, _)) => gpus.extend(found.iter().cloned()),
                // Without an UUID the registry takes the unlisted GPU for the lost one.
                Some(GpuProbe::Lost) => lost.extend(uuid),
                Some(GpuProbe::Failed(why)) => {
                    debug!(
                        gpu = uuid.as_ref().map(GpuUuid::as_str),
                        why, "gpu does not answer"
                    );
                    failures_named &= uuid.is_some();
                    unresponsive.extend(uuid);
                }
                None => {
                    failures_named &= uuid.is_some();
                    unresponsive.extend(uuid);
                }
            }
        }
        ProbeResult::Listed {
            driver: self.driver_version.clone(),
            gpus,
            unresponsive,
            lost,
            timed_out,
            failures_named,
            timeouts_named,
        }
    }
}
