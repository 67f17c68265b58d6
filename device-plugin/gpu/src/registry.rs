//! Records every GPU that NVML listed since the agent started, with its health.

mod probe_result;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use bursar_ledger::units::GpuUuid;

use super::health::{HealthEvent, HealthMonitor, HealthThresholds, PersistedHealth};
use super::pci::PciAddress;
use super::{Gpu, GpuState, Inventory};

pub(crate) use probe_result::ProbeResult;

/// A GPU as the previous agent of the same boot recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistedGpu {
    /// The GPU's description, where the record has one.
    pub gpu: Option<Gpu>,
    /// The recorded part of its health.
    pub health: PersistedHealth,
}

/// The GPUs since the agent's start, and those that the previous agent of the same boot recorded.
#[derive(Debug)]
pub(crate) struct GpuRegistry {
    policy: HealthThresholds,
    /// GPUs that the previous agent recorded and NVML has not listed yet.
    persisted: BTreeMap<GpuUuid, PersistedGpu>,
    /// Whether NVML has listed its GPUs.
    has_listed: bool,
    entries: Vec<Entry>,
    /// GPUs that the agent does not probe.
    drained: BTreeSet<GpuUuid>,
    /// The inventory while no GPU was ever listed.
    without_gpus: Inventory,
    driver: Option<String>,
}

#[derive(Debug)]
struct Entry {
    gpu: Gpu,
    monitor: HealthMonitor,
}

impl GpuRegistry {
    /// An empty registry. With NVML's first list the GPUs that were `persisted` from earlier in
    /// this boot are added.
    pub(crate) fn new(
        policy: HealthThresholds,
        persisted: BTreeMap<GpuUuid, PersistedGpu>,
    ) -> Self {
        Self {
            policy,
            persisted,
            has_listed: false,
            entries: Vec::new(),
            drained: BTreeSet::new(),
            without_gpus: Inventory::Starting,
            driver: None,
        }
    }

    pub(crate) fn record_probe(&mut self, probe: ProbeResult, now: Instant) {
        match &probe {
            ProbeResult::NoDriver(why) => {
                self.without_gpus = Inventory::NoDriver(why.clone());
                self.driver = None;
            }
            ProbeResult::Listed { driver, gpus, .. } => {
                self.without_gpus = Inventory::NoGpu;
                self.driver.clone_from(driver);
                self.remove_repartitioned(gpus);
            }
        }
        let Self {
            entries, drained, ..
        } = self;
        for entry in entries.iter_mut().filter(|entry| !entry.gpu.is_in(drained)) {
            let (event, found) = probe.event_of(&entry.gpu);
            if let Some(found) = found {
                entry.gpu = found.clone();
            }
            entry.monitor.record(event, now);
        }
        if let ProbeResult::Listed { gpus, .. } = &probe {
            self.add_listed(gpus, now);
            self.add_persisted(&probe, gpus, now);
        }
    }

    /// Records an XID of a physical GPU; the XID of an unlisted GPU is dropped.
    pub(crate) fn record_xid(&mut self, uuid: &GpuUuid, code: u64, now: Instant) {
        // An XID names the physical GPU, so all its MIG instances get the event.
        for entry in self.entries_of(uuid) {
            entry.monitor.record(HealthEvent::Xid(code), now);
        }
    }

    /// Records that a call about a physical GPU hangs.
    pub(crate) fn record_timeout(&mut self, uuid: &GpuUuid, now: Instant) {
        for entry in self.entries_of(uuid) {
            entry.monitor.record(HealthEvent::CallTimedOut, now);
        }
    }

    fn entries_of(&mut self, uuid: &GpuUuid) -> impl Iterator<Item = &mut Entry> {
        let entries = self.entries.iter_mut();
        entries.filter(|entry| is_part_of(&entry.gpu, uuid))
    }

    /// The PCI address of a physical GPU, if the GPU or an instance of it is listed.
    pub(crate) fn pci_address_of(&self, uuid: &GpuUuid) -> Option<PciAddress> {
        let mut gpus = self.entries.iter().map(|entry| &entry.gpu);
        gpus.find(|gpu| is_part_of(gpu, uuid))
            .and_then(|gpu| gpu.pci)
    }

    /// Records the GPUs that are to be drained, and returns whether that changes a record.
    pub(crate) fn set_draining(&mut self, requested: &BTreeSet<GpuUuid>) -> bool {
        let mut changed = false;
        for entry in &mut self.entries {
            changed |= entry.monitor.set_draining(entry.gpu.is_in(requested));
        }
        changed
    }

    /// Replaces the set of drained GPUs, which the agent neither probes nor holds.
    pub(crate) fn set_drained(&mut self, drained: BTreeSet<GpuUuid>, now: Instant) {
        for entry in &mut self.entries {
            if entry.gpu.is_in(&drained) {
                entry.monitor.record(HealthEvent::Drained, now);
            }
        }
        self.drained = drained;
    }

    /// The GPUs that the agent does not probe.
    pub(crate) fn drained(&self) -> &BTreeSet<GpuUuid> {
        &self.drained
    }

    fn physical_gpus(&self) -> BTreeSet<&GpuUuid> {
        let gpus = self.entries.iter().map(|entry| &entry.gpu);
        gpus.map(|gpu| gpu.mig_parent.as_ref().unwrap_or(&gpu.uuid))
            .collect()
    }

    /// The number of physical GPUs.
    pub(crate) fn physical_count(&self) -> usize {
        self.physical_gpus().len()
    }

    /// The number of physical GPUs that are drained whole.
    pub(crate) fn drained_count(&self) -> usize {
        let physical = self.physical_gpus().into_iter();
        physical
            .filter(|uuid| self.is_drained_by(uuid, &self.drained))
            .count()
    }

    /// Whether a physical GPU is listed and all of it is in `drained`.
    pub(crate) fn is_drained_by(&self, uuid: &GpuUuid, drained: &BTreeSet<GpuUuid>) -> bool {
        let gpus = self.entries.iter().map(|entry| &entry.gpu);
        let mut parts = gpus.filter(|gpu| is_part_of(gpu, uuid)).peekable();
        parts.peek().is_some() && parts.all(|gpu| gpu.is_in(drained))
    }

    /// The addresses to probe if `drained` were the drained GPUs; none where no GPU is in it or an
    /// address is unknown.
    pub(crate) fn addresses_except(
        &self,
        drained: &BTreeSet<GpuUuid>,
    ) -> Option<BTreeSet<PciAddress>> {
        let entries = || self.entries.iter();
        let remaining = entries().filter(|entry| !entry.gpu.is_in(drained));
        let addresses = remaining.map(|entry| entry.gpu.pci).collect::<Option<_>>();
        addresses.filter(|_| entries().any(|entry| entry.gpu.is_in(drained)))
    }

    /// A listed GPU that is not drained.
    pub(crate) fn probed_gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        let entry = self.entries.iter().find(|entry| entry.gpu.uuid == *uuid)?;
        (!entry.gpu.is_in(&self.drained)).then_some(&entry.gpu)
    }

    /// Whether some GPU that is not drained is unhealthy, so that NVML is reopened and probed
    /// sooner.
    pub(crate) fn has_unhealthy(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| !entry.monitor.health().is_healthy() && !entry.gpu.is_in(&self.drained))
    }

    /// The GPUs with their present health.
    pub(crate) fn inventory(&self) -> Inventory {
        if self.entries.is_empty() {
            return self.without_gpus.clone();
        }
        let state = |entry: &Entry| GpuState {
            gpu: entry.gpu.clone(),
            health: entry.monitor.health(),
            persisted: entry.monitor.memory(),
        };
        Inventory::Gpus {
            driver: self.driver.clone(),
            gpus: self.entries.iter().map(state).collect(),
        }
    }

    fn add_listed(&mut self, gpus: &[Gpu], now: Instant) {
        for gpu in gpus {
            if !self.entries.iter().any(|entry| entry.gpu.uuid == gpu.uuid) {
                let before = self.persisted.remove(&gpu.uuid);
                let memory = before.map(|before| before.health).unwrap_or_default();
                self.entries.push(Entry {
                    gpu: gpu.clone(),
                    monitor: HealthMonitor::new(self.policy, memory, now),
                });
            }
        }
    }

    /// Adds the GPUs that only the previous agent knew. Their first event comes from this `probe`,
    /// which is the first that lists `gpus`.
    fn add_persisted(&mut self, probe: &ProbeResult, gpus: &[Gpu], now: Instant) {
        if std::mem::replace(&mut self.has_listed, true) {
            return;
        }
        for (
            uuid,
            PersistedGpu {
                gpu,
                health: memory,
            },
        ) in std::mem::take(&mut self.persisted)
        {
            let Some(gpu) = gpu.filter(|gpu| !is_repartitioned(gpu, gpus)) else {
                // A GPU that is listed under this UUID later gets the recorded health.
                self.persisted.insert(
                    uuid,
                    PersistedGpu {
                        gpu: None,
                        health: memory,
                    },
                );
                continue;
            };
            let mut monitor = HealthMonitor::unlisted(self.policy, memory, now);
            if !gpu.is_in(&self.drained) {
                monitor.record(probe.event_of(&gpu).0, now);
                monitor.mark_unverified(now);
            }
            self.entries.push(Entry { gpu, monitor });
        }
    }

    fn remove_repartitioned(&mut self, gpus: &[Gpu]) {
        self.entries
            .retain(|entry| !is_repartitioned(&entry.gpu, gpus));
    }
}

/// Whether a GPU is the physical GPU or an instance of it.
fn is_part_of(gpu: &Gpu, physical: &GpuUuid) -> bool {
    gpu.uuid == *physical || gpu.mig_parent.as_ref() == Some(physical)
}

/// Whether a GPU was partitioned into MIG instances, or is whole again. NVML lists its new shape,
/// so the old shape is not a lost GPU.
fn is_repartitioned(old: &Gpu, gpus: &[Gpu]) -> bool {
    let listed = gpus.iter().any(|gpu| gpu.uuid == old.uuid);
    let cut = gpus
        .iter()
        .any(|gpu| gpu.mig_parent.as_ref() == Some(&old.uuid));
    let parent = old.mig_parent.as_ref();
    let sibling_or_whole = |gpu: &Gpu| {
        parent == Some(&gpu.uuid) || (parent.is_some() && gpu.mig_parent.as_ref() == parent)
    };
    !listed && (cut || gpus.iter().any(sibling_or_whole))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::NoDriver;
    use super::super::health::{Health, UnhealthyReason};
    use super::*;

    fn registry() -> GpuRegistry {
        with_persisted([])
    }

    /// A registry with records of a previous agent.
    fn with_persisted<const N: usize>(persisted: [(GpuUuid, PersistedGpu); N]) -> GpuRegistry {
        GpuRegistry::new(HealthThresholds::default(), persisted.into())
    }

    fn uuid(name: &str) -> GpuUuid {
        name.parse().unwrap()
    }

    fn gpu(name: &str) -> Gpu {
        Gpu::with_uuid(name)
    }

    fn mig(name: &str, parent: &str) -> Gpu {
        Gpu {
            mig_parent: Some(uuid(parent)),
            ..gpu(name)
        }
    }

    fn listed(gpus: &[Gpu]) -> ProbeResult {
        ProbeResult::Listed {
            driver: None,
            gpus: gpus.to_vec(),
            unresponsive: Vec::new(),
            lost: Vec::new(),
            timed_out: Vec::new(),
            timeouts_named: true,
            failures_named: true,
        }
    }

    fn healths(registry: &GpuRegistry) -> Vec<(String, Health)> {
        let inventory = registry.inventory();
        inventory
            .gpus()
            .iter()
            .map(|state| (state.gpu.uuid.to_string(), state.health))
            .collect()
    }

    #[test]
    fn inventory_tells_missing_driver_from_missing_gpus() {
        let mut registry = registry();
        assert_eq!(registry.inventory(), Inventory::Starting);
        registry.record_probe(
            ProbeResult::NoDriver(NoDriver::Missing("no libnvidia-ml".into())),
            Instant::now(),
        );
        assert_eq!(
            registry.inventory(),
            Inventory::NoDriver(NoDriver::Missing("no libnvidia-ml".into()))
        );
        registry.record_probe(listed(&[]), Instant::now());
        assert_eq!(registry.inventory(), Inventory::NoGpu);
        registry.record_probe(listed(&[gpu("GPU-a")]), Instant::now());
        assert_eq!(registry.inventory().gpus().len(), 1);
    }

    #[test]
    fn gpu_stays_listed_as_unhealthy_when_missing() {
        let (mut registry, start) = (registry(), Instant::now());
        registry.record_probe(listed(&[gpu("GPU-a"), gpu("GPU-b")]), start);
        registry.record_probe(listed(&[gpu("GPU-b")]), start);
        assert!(registry.has_unhealthy());
        let lost = Health::Unhealthy(UnhealthyReason::Lost);
        assert_eq!(
            healths(&registry),
            [("GPU-a".into(), lost), ("GPU-b".into(), Health::Healthy)]
        );
        for second in 1..=10 {
            registry.record_probe(
                listed(&[gpu("GPU-a"), gpu("GPU-b")]),
                start + Duration::from_secs(second),
            );
        }
        assert!(!registry.has_unhealthy());
    }

    /// The number of healthy GPUs after each of `probes`.
    fn healthy_counts(gpus: &[Gpu], probes: &[ProbeResult]) -> Vec<usize> {
        let mut registry = registry();
        registry.record_probe(listed(gpus), Instant::now());
        let count_healthy = |probe: &ProbeResult| {
            registry.record_probe(probe.clone(), Instant::now());
            let healthy = |(_, health): &(String, Health)| health.is_healthy();
            healths(&registry).iter().filter(|gpu| healthy(gpu)).count()
        };
        probes.iter().map(count_healthy).collect()
    }

    #[test]
    fn gpus_are_unhealthy_when_driver_fails_repeatedly() {
        let away = ProbeResult::NoDriver(NoDriver::Failed("nvmlDeviceGetCount: unknown".into()));
        let two = [gpu("GPU-a"), gpu("GPU-b")];
        let probes = [away.clone(), away.clone(), listed(&two), away.clone()];
        assert_eq!(healthy_counts(&two, &probes), [2, 2, 2, 2]);
        assert_eq!(
            healthy_counts(&two, &[away.clone(), away.clone(), away]),
            [2, 2, 0]
        );
    }

    #[test]
    fn gpu_memory_is_lost_only_when_driver_is_not_loaded() {
        let why = || "because".to_owned();
        for (why, is_lost) in [
            (NoDriver::Missing(why()), false),
            (NoDriver::Failed(why()), false),
            (NoDriver::NotLoaded(why()), true),
        ] {
            let (mut registry, now) = (registry(), Instant::now());
            let two = listed(&[gpu("GPU-a"), gpu("GPU-b")]);
            registry.record_probe(two.clone(), now);
            registry.record_xid(&uuid("GPU-a"), 48, now);
            let memories = |registry: &GpuRegistry| {
                let inventory = registry.inventory();
                let of = |state: &GpuState| (state.persisted.away, state.persisted.awaits_reset);
                inventory.gpus().iter().map(of).collect::<Vec<_>>()
            };
            for _ in 0..3 {
                registry.record_probe(ProbeResult::NoDriver(why.clone()), now);
            }
            let unhealthy = Health::Unhealthy(UnhealthyReason::NoAnswer);
            assert_eq!(
                healths(&registry)[1],
                ("GPU-b".into(), unhealthy),
                "{why:?}"
            );
            let expected = [(is_lost, Some(48)), (is_lost, None)];
            assert_eq!(memories(&registry), expected, "{why:?}");
            registry.record_probe(two, now);
            let awaits_reset = (!is_lost).then_some(48);
            assert_eq!(memories(&registry)[0], (false, awaits_reset), "{why:?}");
        }
    }

    #[test]
    fn gpu_does_not_answer_when_a_call_hangs_named_or_not() {
        let two = [gpu("GPU-a"), gpu("GPU-b")];
        for (named, timeouts_named) in [(vec![uuid("GPU-a")], true), (Vec::new(), false)] {
            let (mut registry, now) = (registry(), Instant::now());
            registry.record_probe(listed(&two), now);
            let probe = ProbeResult::Listed {
                driver: None,
                gpus: vec![gpu("GPU-b")],
                unresponsive: Vec::new(),
                lost: Vec::new(),
                timed_out: named,
                failures_named: true,
                timeouts_named,
            };
            for _ in 0..9 {
                registry.record_probe(probe.clone(), now);
            }
            let hangs = Health::Unhealthy(UnhealthyReason::NoAnswer);
            let well = ("GPU-b".to_owned(), Health::Healthy);
            assert_eq!(healths(&registry), [("GPU-a".to_owned(), hangs), well]);
            assert!(!registry.inventory().gpus()[0].persisted.away);
        }
    }

    #[test]
    fn unlisted_gpu_is_lost_late_when_a_failure_is_unnamed() {
        let unnamed = ProbeResult::Listed {
            driver: None,
            gpus: vec![gpu("GPU-b")],
            unresponsive: Vec::new(),
            lost: Vec::new(),
            timed_out: Vec::new(),
            timeouts_named: true,
            failures_named: false,
        };
        let probes = [unnamed.clone(), unnamed.clone(), unnamed];
        assert_eq!(
            healthy_counts(&[gpu("GPU-a"), gpu("GPU-b")], &probes),
            [2, 2, 1]
        );
    }

    #[test]
    fn gpu_is_lost_at_once_when_nvml_calls_it_lost() {
        let lost = ProbeResult::Listed {
            driver: None,
            gpus: vec![gpu("GPU-b")],
            unresponsive: Vec::new(),
            lost: vec![uuid("GPU-a")],
            timed_out: Vec::new(),
            timeouts_named: true,
            failures_named: false,
        };
        assert_eq!(healthy_counts(&[gpu("GPU-a"), gpu("GPU-b")], &[lost]), [1]);
    }

    #[test]
    fn mig_instances_are_unresponsive_with_their_gpu() {
        let silent = ProbeResult::Listed {
            driver: None,
            gpus: Vec::new(),
            unresponsive: vec![uuid("GPU-a")],
            lost: Vec::new(),
            timed_out: Vec::new(),
            timeouts_named: true,
            failures_named: true,
        };
        let instances = [mig("MIG-1", "GPU-a"), mig("MIG-2", "GPU-a")];
        let probes = [silent.clone(), silent.clone(), silent];
        assert_eq!(healthy_counts(&instances, &probes), [2, 2, 0]);
    }

    #[test]
    fn gpu_still_awaits_reset_after_agent_restart() {
        let awaits = PersistedHealth {
            away: false,
            awaits_reset: Some(48),
            draining: false,
            drained: false,
        };
        let persisted = PersistedGpu {
            gpu: None,
            health: awaits,
        };
        let mut registry = with_persisted([(uuid("GPU-a"), persisted)]);
        registry.record_probe(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        let unhealthy = Health::Unhealthy(UnhealthyReason::Xid(48));
        assert_eq!(
            healths(&registry),
            [
                ("GPU-a".into(), unhealthy),
                ("GPU-b".into(), Health::Healthy)
            ]
        );
        assert_eq!(registry.inventory().gpus()[0].persisted, awaits);
    }

    #[test]
    fn persisted_gpu_is_lost_when_next_agent_does_not_find_it() {
        let recorded = |gpu: Gpu, memory: PersistedHealth| {
            let uuid = gpu.uuid.clone();
            let gpu = Some(gpu);
            (
                uuid,
                PersistedGpu {
                    gpu,
                    health: memory,
                },
            )
        };
        let well = PersistedHealth::default();
        let away = PersistedHealth { away: true, ..well };
        let awaits_reset = Some(79);
        let off_the_bus = PersistedHealth {
            awaits_reset,
            ..away
        };
        let mut registry = with_persisted([
            recorded(gpu("GPU-a"), well),
            recorded(gpu("GPU-b"), well),
            recorded(gpu("GPU-c"), away),
            recorded(gpu("GPU-d"), off_the_bus),
            // This GPU is partitioned now.
            recorded(gpu("GPU-e"), well),
            recorded(gpu("GPU-f"), away),
        ]);
        let now = Instant::now();
        registry.record_probe(
            ProbeResult::NoDriver(NoDriver::Failed("not yet".into())),
            now,
        );
        assert_eq!(
            healths(&registry),
            [],
            "nothing is said before NVML has listed any"
        );
        let mut first = listed(&[gpu("GPU-a"), mig("MIG-1", "GPU-e")]);
        if let ProbeResult::Listed { unresponsive, .. } = &mut first {
            unresponsive.push(uuid("GPU-f"));
        }
        registry.record_probe(first, now);
        let lost = Health::Unhealthy(UnhealthyReason::Lost);
        let expected = [
            ("GPU-a", Health::Healthy),
            ("MIG-1", Health::Healthy),
            ("GPU-b", lost),
            ("GPU-c", lost),
            ("GPU-d", Health::Unhealthy(UnhealthyReason::Xid(79))),
            ("GPU-f", lost),
        ];
        assert_eq!(
            healths(&registry),
            expected.map(|(gpu, why)| (gpu.to_owned(), why))
        );
        let inventory = registry.inventory();
        let memories: Vec<_> = inventory.gpus().iter().map(|gpu| gpu.persisted).collect();
        assert_eq!(memories, [well, well, away, away, off_the_bus, away]);
        registry.record_probe(
            listed(&[gpu("GPU-a"), gpu("GPU-d"), mig("MIG-1", "GPU-e")]),
            now,
        );
        assert_eq!(registry.inventory().gpus()[4].persisted, well, "it is back");
    }

    #[test]
    fn persisted_gpu_is_unhealthy_until_next_agent_reads_it() {
        let awaits = PersistedHealth {
            awaits_reset: Some(48),
            ..PersistedHealth::default()
        };
        let persisted = |gpu, memory| PersistedGpu {
            gpu,
            health: memory,
        };
        let mut registry = with_persisted([
            (
                uuid("GPU-b"),
                persisted(Some(gpu("GPU-b")), PersistedHealth::default()),
            ),
            // The record of an agent that stored no description.
            (uuid("GPU-c"), persisted(None, awaits)),
        ]);
        let now = Instant::now();
        let mut first = listed(&[gpu("GPU-a")]);
        if let ProbeResult::Listed {
            unresponsive: silent,
            ..
        } = &mut first
        {
            silent.extend([uuid("GPU-b"), uuid("GPU-c")]);
        }
        registry.record_probe(first, now);
        let silent = Health::Unhealthy(UnhealthyReason::NoAnswer);
        let well = ("GPU-a".to_owned(), Health::Healthy);
        assert_eq!(healths(&registry), [well, ("GPU-b".to_owned(), silent)]);
        assert!(!registry.inventory().gpus()[1].persisted.away);
        registry.record_probe(listed(&[gpu("GPU-a"), gpu("GPU-c")]), now);
        let due = Health::Unhealthy(UnhealthyReason::Xid(48));
        assert_eq!(healths(&registry)[2], ("GPU-c".to_owned(), due));
    }

    #[test]
    fn drained_gpu_is_not_probed_and_others_are_by_address() {
        let at = |place: &str, gpu: Gpu| Gpu {
            pci: place.parse().ok(),
            ..gpu
        };
        let (first, second) = ("00000000:3B:00.0", "00000000:86:00.0");
        let gpus = [
            at(first, mig("MIG-1", "GPU-a")),
            at(first, mig("MIG-2", "GPU-a")),
            at(second, gpu("GPU-b")),
        ];
        let (mut registry, start) = (registry(), Instant::now());
        registry.record_probe(listed(&gpus), start);
        assert_eq!(
            (
                registry.drained_count(),
                registry.addresses_except(registry.drained())
            ),
            (0, None)
        );
        registry.set_drained(BTreeSet::from([uuid("GPU-a")]), start);
        assert!(registry.drained_count() == 1 && !registry.has_unhealthy());
        assert_eq!(
            registry.addresses_except(registry.drained()),
            Some(BTreeSet::from([second.parse().unwrap()]))
        );
        assert!(
            registry.probed_gpu(&uuid("MIG-1")).is_none()
                && registry.probed_gpu(&uuid("GPU-b")).is_some()
        );
        // A drained GPU is not probed, so its absence from the list is no event.
        registry.record_probe(listed(&gpus[2..]), start);
        let drained = Health::Unhealthy(UnhealthyReason::Drained);
        let expected = [
            ("MIG-1", drained),
            ("MIG-2", drained),
            ("GPU-b", Health::Healthy),
        ];
        assert_eq!(
            healths(&registry),
            expected.map(|(gpu, health)| (gpu.to_owned(), health))
        );
        registry.set_drained(BTreeSet::new(), start);
        registry.record_probe(listed(&gpus), start);
        let memories: Vec<_> = registry
            .inventory()
            .gpus()
            .iter()
            .map(|gpu| gpu.persisted)
            .collect();
        assert_eq!(memories, [PersistedHealth::default(); 3]);
    }

    #[test]
    fn requested_drain_is_on_record_until_it_is_withdrawn() {
        let mut registry = registry();
        let now = Instant::now();
        let gpus = [mig("MIG-1", "GPU-a"), gpu("GPU-b")];
        registry.record_probe(listed(&gpus), now);
        let records = |registry: &GpuRegistry| -> Vec<bool> {
            let inventory = registry.inventory();
            let gpus = inventory.gpus().iter();
            gpus.map(|gpu| gpu.persisted.draining).collect()
        };
        assert!(registry.set_draining(&BTreeSet::from([uuid("GPU-a")])));
        assert!(!registry.set_draining(&BTreeSet::from([uuid("GPU-a")])));
        registry.record_probe(listed(&gpus), now);
        registry.record_xid(&uuid("GPU-a"), 79, now);
        assert_eq!(records(&registry), [true, false]);
        assert!(registry.set_draining(&BTreeSet::new()));
        assert_eq!(records(&registry), [false, false]);
    }

    #[test]
    fn xid_affects_mig_instances_of_its_gpu_alone() {
        let mut registry = registry();
        registry.record_probe(
            listed(&[mig("MIG-1", "GPU-a"), mig("MIG-2", "GPU-a"), gpu("GPU-b")]),
            Instant::now(),
        );
        registry.record_xid(&uuid("GPU-a"), 79, Instant::now());
        let unhealthy = Health::Unhealthy(UnhealthyReason::Xid(79));
        assert_eq!(
            healths(&registry),
            [
                ("MIG-1".into(), unhealthy),
                ("MIG-2".into(), unhealthy),
                ("GPU-b".into(), Health::Healthy)
            ]
        );
    }

    #[test]
    fn gpu_is_removed_when_it_was_repartitioned() {
        let mut registry = registry();
        registry.record_probe(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        registry.record_probe(
            listed(&[mig("MIG-1", "GPU-a"), gpu("GPU-b")]),
            Instant::now(),
        );
        assert!(!registry.has_unhealthy());
        registry.record_probe(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        let names: Vec<_> = healths(&registry)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["GPU-b", "GPU-a"]);
    }
}
