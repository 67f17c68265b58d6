//! Keeps the GPUs that NVML listed since the agent started, each with its health.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::health::{Memory, Monitor, News, Policy};
use super::pci::PciAddress;
use super::{Gpu, GpuState, Inventory, NoDriver};
use crate::units::GpuUuid;

/// What one probe of all GPUs found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// NVML cannot be used. Says nothing about the GPUs that were there, unless the driver is not loaded.
    NoDriver(NoDriver),
    /// The GPUs that NVML lists.
    Listed {
        /// The driver's version.
        driver: Option<String>,
        /// GPUs that answered.
        gpus: Vec<Gpu>,
        /// GPUs that NVML knows and that did not answer; for MIG instances, the GPU that they are cut from.
        silent: Vec<GpuUuid>,
        /// GPUs that NVML knows and calls lost, in the same way.
        lost: Vec<GpuUuid>,
        /// GPUs about which a call hangs, in the same way.
        hung: Vec<GpuUuid>,
        /// False where NVML could not name some GPU: one that is not listed may be that one.
        complete: bool,
        /// False where a call hangs before its GPU was named: one that is not listed may be that one.
        all_told: bool,
    },
}

impl Probe {
    /// The news of `gpu`, with what was found of it.
    fn news(&self, gpu: &Gpu) -> (News, Option<&Gpu>) {
        let Self::Listed {
            gpus,
            silent,
            lost,
            hung,
            complete,
            all_told,
            driver: _,
        } = self
        else {
            let is_unloaded = matches!(self, Self::NoDriver(NoDriver::NotLoaded(_)));
            let news = if is_unloaded {
                News::Silent
            } else {
                News::NotAsked
            };
            return (news, None);
        };
        let is_in = |list: &[GpuUuid]| {
            list.contains(&gpu.uuid) || gpu.mig_parent.as_ref().is_some_and(|p| list.contains(p))
        };
        match gpus.iter().find(|found| found.uuid == gpu.uuid) {
            Some(found) => (News::Answered, Some(found)),
            None if is_in(lost) => (News::Missing, None),
            None if is_in(hung) => (News::Hung, None),
            None if is_in(silent) || !complete => (News::Silent, None),
            None if !all_told => (News::Hung, None),
            None => (News::Missing, None),
        }
    }
}

/// What a predecessor in the same boot left of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remembered {
    /// The GPU, where that is on record.
    pub gpu: Option<Gpu>,
    /// What of its health is.
    pub memory: Memory,
}

/// Every GPU since the start, and those of the same boot that a predecessor knew.
#[derive(Debug)]
pub struct Roster {
    policy: Policy,
    /// What a predecessor in the same boot left of GPUs that are not here.
    remembered: BTreeMap<GpuUuid, Remembered>,
    /// NVML has listed its GPUs.
    listed: bool,
    entries: Vec<Entry>,
    /// Those that nobody is to look at.
    drained: BTreeSet<GpuUuid>,
    /// What stands where there has never been a GPU.
    without: Inventory,
    driver: Option<String>,
}

#[derive(Debug)]
struct Entry {
    gpu: Gpu,
    monitor: Monitor,
}

impl Roster {
    /// No GPU before NVML has listed those that there are; then also those that are `remembered` from earlier in this
    /// boot.
    pub fn new(policy: Policy, remembered: BTreeMap<GpuUuid, Remembered>) -> Self {
        Self {
            policy,
            remembered,
            listed: false,
            entries: Vec::new(),
            drained: BTreeSet::new(),
            without: Inventory::Starting,
            driver: None,
        }
    }

    /// Takes a probe in.
    pub fn probed(&mut self, probe: Probe, now: Instant) {
        match &probe {
            Probe::NoDriver(why) => {
                self.without = Inventory::NoDriver(why.clone());
                self.driver = None;
            }
            Probe::Listed { driver, gpus, .. } => {
                self.without = Inventory::NoGpu;
                self.driver.clone_from(driver);
                self.forget_recut(gpus);
            }
        }
        let Self {
            entries, drained, ..
        } = self;
        for entry in entries.iter_mut().filter(|entry| !entry.gpu.is_in(drained)) {
            let (news, found) = probe.news(&entry.gpu);
            if let Some(found) = found {
                entry.gpu = found.clone();
            }
            entry.monitor.hear(news, now);
        }
        if let Probe::Listed { gpus, .. } = &probe {
            self.add(gpus, now);
            self.add_unlisted(&probe, gpus, now);
        }
    }

    /// Takes in an XID of a GPU; one of a GPU that is not listed is dropped.
    pub fn xid(&mut self, uuid: &GpuUuid, code: u64, now: Instant) {
        // An XID names the physical GPU: its MIG instances share its fate.
        for entry in self.of_physical(uuid) {
            entry.monitor.hear(News::Xid(code), now);
        }
    }

    /// A call about a physical GPU hangs.
    pub fn hung(&mut self, uuid: &GpuUuid, now: Instant) {
        for entry in self.of_physical(uuid) {
            entry.monitor.hear(News::Hung, now);
        }
    }

    fn of_physical(&mut self, uuid: &GpuUuid) -> impl Iterator<Item = &mut Entry> {
        let is = |gpu: &Gpu| gpu.uuid == *uuid || gpu.mig_parent.as_ref() == Some(uuid);
        self.entries.iter_mut().filter(move |entry| is(&entry.gpu))
    }

    /// Where a physical GPU is, if it or an instance of it is listed.
    pub fn place(&self, uuid: &GpuUuid) -> Option<PciAddress> {
        let is = |gpu: &Gpu| gpu.uuid == *uuid || gpu.mig_parent.as_ref() == Some(uuid);
        let mut gpus = self.entries.iter().map(|entry| &entry.gpu);
        gpus.find(|gpu| is(gpu)).and_then(|gpu| gpu.pci)
    }

    /// Nobody looks at these from now on, nor holds them.
    pub fn drain(&mut self, drained: BTreeSet<GpuUuid>, now: Instant) {
        for entry in &mut self.entries {
            if entry.gpu.is_in(&drained) {
                entry.monitor.hear(News::Drained, now);
            }
        }
        self.drained = drained;
    }

    /// Those that nobody looks at.
    pub fn drained(&self) -> &BTreeSet<GpuUuid> {
        &self.drained
    }

    /// Whether there is a GPU that nobody is to look at.
    pub fn has_drained(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| entry.gpu.is_in(&self.drained))
    }

    /// Where the GPUs are that may be looked at; none where all may, or where that is not known.
    pub fn places(&self) -> Option<BTreeSet<PciAddress>> {
        self.places_without(&self.drained)
    }

    /// The same if these were those that nobody is to look at.
    pub fn places_without(&self, drained: &BTreeSet<GpuUuid>) -> Option<BTreeSet<PciAddress>> {
        let entries = || self.entries.iter();
        let spared = entries().filter(|entry| !entry.gpu.is_in(drained));
        let places = spared.map(|entry| entry.gpu.pci).collect::<Option<_>>();
        places.filter(|_| entries().any(|entry| entry.gpu.is_in(drained)))
    }

    /// A GPU, if it may be looked at.
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        let entry = self.entries.iter().find(|entry| entry.gpu.uuid == *uuid)?;
        (!entry.gpu.is_in(&self.drained)).then_some(&entry.gpu)
    }

    /// Whether some GPU is not well: probe sooner, and open NVML afresh. None that is drained will be better for that.
    pub fn is_ailing(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| !entry.monitor.health().is_healthy() && !entry.gpu.is_in(&self.drained))
    }

    /// The GPUs as they stand.
    pub fn inventory(&self) -> Inventory {
        if self.entries.is_empty() {
            return self.without.clone();
        }
        let state = |entry: &Entry| GpuState {
            gpu: entry.gpu.clone(),
            health: entry.monitor.health(),
            memory: entry.monitor.memory(),
        };
        Inventory::Gpus {
            driver: self.driver.clone(),
            gpus: self.entries.iter().map(state).collect(),
        }
    }

    fn add(&mut self, gpus: &[Gpu], now: Instant) {
        for gpu in gpus {
            if !self.entries.iter().any(|entry| entry.gpu.uuid == gpu.uuid) {
                let before = self.remembered.remove(&gpu.uuid);
                let memory = before.map(|before| before.memory).unwrap_or_default();
                self.entries.push(Entry {
                    gpu: gpu.clone(),
                    monitor: Monitor::new(self.policy, memory, now),
                });
            }
        }
    }

    /// What else a predecessor knew did not go with it: this `probe`, the first that lists `gpus`, has news of that.
    fn add_unlisted(&mut self, probe: &Probe, gpus: &[Gpu], now: Instant) {
        if std::mem::replace(&mut self.listed, true) {
            return;
        }
        for (uuid, Remembered { gpu, memory }) in std::mem::take(&mut self.remembered) {
            let Some(gpu) = gpu.filter(|gpu| !is_recut(gpu, gpus)) else {
                // Its memory is that of who is listed by this name later.
                self.remembered
                    .insert(uuid, Remembered { gpu: None, memory });
                continue;
            };
            let mut monitor = Monitor::unlisted(self.policy, memory, now);
            if !gpu.is_in(&self.drained) {
                monitor.hear(probe.news(&gpu).0, now);
                monitor.doubt(now);
            }
            self.entries.push(Entry { gpu, monitor });
        }
    }

    fn forget_recut(&mut self, gpus: &[Gpu]) {
        self.entries.retain(|entry| !is_recut(&entry.gpu, gpus));
    }
}

/// A GPU that was cut into MIG instances, or made whole again, has not died: its old shape is
/// forgotten where the new one is listed.
fn is_recut(old: &Gpu, gpus: &[Gpu]) -> bool {
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

    use super::super::health::{Health, Sickness};
    use super::*;
    use crate::units::Bytes;

    fn roster() -> Roster {
        after([])
    }

    /// With what a predecessor left.
    fn after<const N: usize>(remembered: [(GpuUuid, Remembered); N]) -> Roster {
        Roster::new(Policy::default(), remembered.into())
    }

    fn uuid(name: &str) -> GpuUuid {
        name.parse().unwrap()
    }

    fn gpu(name: &str) -> Gpu {
        Gpu {
            uuid: uuid(name),
            minor: 0,
            model: "T".into(),
            memory: Bytes::gib(16),
            pci: None,
            mig_parent: None,
            capabilities: Vec::new(),
        }
    }

    fn mig(name: &str, parent: &str) -> Gpu {
        Gpu {
            mig_parent: Some(uuid(parent)),
            ..gpu(name)
        }
    }

    fn listed(gpus: &[Gpu]) -> Probe {
        Probe::Listed {
            driver: None,
            gpus: gpus.to_vec(),
            silent: Vec::new(),
            lost: Vec::new(),
            hung: Vec::new(),
            all_told: true,
            complete: true,
        }
    }

    fn healths(roster: &Roster) -> Vec<(String, Health)> {
        let inventory = roster.inventory();
        inventory
            .gpus()
            .iter()
            .map(|state| (state.gpu.uuid.to_string(), state.health))
            .collect()
    }

    #[test]
    fn without_a_driver_or_a_gpu_the_inventory_says_which() {
        let mut roster = roster();
        assert_eq!(roster.inventory(), Inventory::Starting);
        roster.probed(
            Probe::NoDriver(NoDriver::Missing("no libnvidia-ml".into())),
            Instant::now(),
        );
        assert_eq!(
            roster.inventory(),
            Inventory::NoDriver(NoDriver::Missing("no libnvidia-ml".into()))
        );
        roster.probed(listed(&[]), Instant::now());
        assert_eq!(roster.inventory(), Inventory::NoGpu);
        roster.probed(listed(&[gpu("GPU-a")]), Instant::now());
        assert_eq!(roster.inventory().gpus().len(), 1);
    }

    #[test]
    fn a_gpu_that_goes_missing_stays_listed_as_unhealthy_and_comes_back() {
        let (mut roster, start) = (roster(), Instant::now());
        roster.probed(listed(&[gpu("GPU-a"), gpu("GPU-b")]), start);
        roster.probed(listed(&[gpu("GPU-b")]), start);
        assert!(roster.is_ailing());
        let lost = Health::Unhealthy(Sickness::Lost);
        assert_eq!(
            healths(&roster),
            [("GPU-a".into(), lost), ("GPU-b".into(), Health::Healthy)]
        );
        for second in 1..=10 {
            roster.probed(
                listed(&[gpu("GPU-a"), gpu("GPU-b")]),
                start + Duration::from_secs(second),
            );
        }
        assert!(!roster.is_ailing());
    }

    /// Which of `gpus` are well after each of `looks`.
    fn well_after(gpus: &[Gpu], looks: &[Probe]) -> Vec<usize> {
        let mut roster = roster();
        roster.probed(listed(gpus), Instant::now());
        let well = |look: &Probe| {
            roster.probed(look.clone(), Instant::now());
            let healthy = |(_, health): &(String, Health)| health.is_healthy();
            healths(&roster).iter().filter(|gpu| healthy(gpu)).count()
        };
        looks.iter().map(well).collect()
    }

    #[test]
    fn a_driver_that_goes_away_takes_every_gpu_with_it_and_one_that_hesitates_takes_none() {
        let away = Probe::NoDriver(NoDriver::Failed("nvmlDeviceGetCount: unknown".into()));
        let two = [gpu("GPU-a"), gpu("GPU-b")];
        let looks = [away.clone(), away.clone(), listed(&two), away.clone()];
        assert_eq!(well_after(&two, &looks), [2, 2, 2, 2]);
        assert_eq!(
            well_after(&two, &[away.clone(), away.clone(), away]),
            [2, 2, 0]
        );
    }

    #[test]
    fn without_nvml_gpus_are_unhealthy_and_their_memory_is_lost_only_if_the_driver_is_not_loaded() {
        let why = || "because".to_owned();
        for (why, is_lost) in [
            (NoDriver::Missing(why()), false),
            (NoDriver::Failed(why()), false),
            (NoDriver::NotLoaded(why()), true),
        ] {
            let (mut roster, now) = (roster(), Instant::now());
            let two = listed(&[gpu("GPU-a"), gpu("GPU-b")]);
            roster.probed(two.clone(), now);
            roster.xid(&uuid("GPU-a"), 48, now);
            let memories = |roster: &Roster| {
                let inventory = roster.inventory();
                let of = |state: &GpuState| (state.memory.away, state.memory.awaits_reset);
                inventory.gpus().iter().map(of).collect::<Vec<_>>()
            };
            for _ in 0..3 {
                roster.probed(Probe::NoDriver(why.clone()), now);
            }
            let sick = Health::Unhealthy(Sickness::NoAnswer);
            assert_eq!(healths(&roster)[1], ("GPU-b".into(), sick), "{why:?}");
            let expected = [(is_lost, Some(48)), (is_lost, None)];
            assert_eq!(memories(&roster), expected, "{why:?}");
            roster.probed(two, now);
            let awaits_reset = (!is_lost).then_some(48);
            assert_eq!(memories(&roster)[0], (false, awaits_reset), "{why:?}");
        }
    }

    #[test]
    fn gpu_does_not_answer_when_a_call_hangs_named_or_not() {
        let two = [gpu("GPU-a"), gpu("GPU-b")];
        for (named, told) in [(vec![uuid("GPU-a")], true), (Vec::new(), false)] {
            let (mut roster, now) = (roster(), Instant::now());
            roster.probed(listed(&two), now);
            let probe = Probe::Listed {
                driver: None,
                gpus: vec![gpu("GPU-b")],
                silent: Vec::new(),
                lost: Vec::new(),
                hung: named,
                complete: true,
                all_told: told,
            };
            for _ in 0..9 {
                roster.probed(probe.clone(), now);
            }
            let hangs = Health::Unhealthy(Sickness::NoAnswer);
            let well = ("GPU-b".to_owned(), Health::Healthy);
            assert_eq!(healths(&roster), [("GPU-a".to_owned(), hangs), well]);
            assert!(!roster.inventory().gpus()[0].memory.away);
        }
    }

    #[test]
    fn a_gpu_that_nvml_cannot_name_may_be_any_that_is_not_listed_and_is_lost_only_after_a_while() {
        let unnamed = Probe::Listed {
            driver: None,
            gpus: vec![gpu("GPU-b")],
            silent: Vec::new(),
            lost: Vec::new(),
            hung: Vec::new(),
            all_told: true,
            complete: false,
        };
        let looks = [unnamed.clone(), unnamed.clone(), unnamed];
        assert_eq!(well_after(&[gpu("GPU-a"), gpu("GPU-b")], &looks), [2, 2, 1]);
    }

    #[test]
    fn a_gpu_that_nvml_calls_lost_is_lost_at_once() {
        let lost = Probe::Listed {
            driver: None,
            gpus: vec![gpu("GPU-b")],
            silent: Vec::new(),
            lost: vec![uuid("GPU-a")],
            hung: Vec::new(),
            all_told: true,
            complete: false,
        };
        assert_eq!(well_after(&[gpu("GPU-a"), gpu("GPU-b")], &[lost]), [1]);
    }

    #[test]
    fn mig_instances_of_a_silent_gpu_are_silent_with_it_and_not_missing() {
        let silent = Probe::Listed {
            driver: None,
            gpus: Vec::new(),
            silent: vec![uuid("GPU-a")],
            lost: Vec::new(),
            hung: Vec::new(),
            all_told: true,
            complete: true,
        };
        let instances = [mig("MIG-1", "GPU-a"), mig("MIG-2", "GPU-a")];
        let looks = [silent.clone(), silent.clone(), silent];
        assert_eq!(well_after(&instances, &looks), [2, 2, 0]);
    }

    #[test]
    fn a_gpu_that_awaits_a_reset_still_does_after_an_agents_restart() {
        let awaits = Memory {
            away: false,
            awaits_reset: Some(48),
            drained: false,
        };
        let remembered = Remembered {
            gpu: None,
            memory: awaits,
        };
        let mut roster = after([(uuid("GPU-a"), remembered)]);
        roster.probed(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        let sick = Health::Unhealthy(Sickness::Xid(48));
        assert_eq!(
            healths(&roster),
            [("GPU-a".into(), sick), ("GPU-b".into(), Health::Healthy)]
        );
        assert_eq!(roster.inventory().gpus()[0].memory, awaits);
    }

    #[test]
    fn a_gpu_that_was_there_earlier_in_this_boot_is_lost_and_not_forgotten_by_the_next_agent() {
        let was = |gpu: Gpu, memory: Memory| {
            let uuid = gpu.uuid.clone();
            let gpu = Some(gpu);
            (uuid, Remembered { gpu, memory })
        };
        let well = Memory::default();
        let away = Memory { away: true, ..well };
        let awaits_reset = Some(79);
        let fell = Memory {
            awaits_reset,
            ..away
        };
        let mut roster = after([
            was(gpu("GPU-a"), well),
            was(gpu("GPU-b"), well),
            was(gpu("GPU-c"), away),
            was(gpu("GPU-d"), fell),
            // It is cut now.
            was(gpu("GPU-e"), well),
            was(gpu("GPU-f"), away),
        ]);
        let now = Instant::now();
        roster.probed(Probe::NoDriver(NoDriver::Failed("not yet".into())), now);
        assert_eq!(
            healths(&roster),
            [],
            "nothing is said before NVML has listed any"
        );
        let mut first = listed(&[gpu("GPU-a"), mig("MIG-1", "GPU-e")]);
        if let Probe::Listed { silent, .. } = &mut first {
            silent.push(uuid("GPU-f"));
        }
        roster.probed(first, now);
        let lost = Health::Unhealthy(Sickness::Lost);
        let expected = [
            ("GPU-a", Health::Healthy),
            ("MIG-1", Health::Healthy),
            ("GPU-b", lost),
            ("GPU-c", lost),
            ("GPU-d", Health::Unhealthy(Sickness::Xid(79))),
            ("GPU-f", lost),
        ];
        assert_eq!(
            healths(&roster),
            expected.map(|(gpu, why)| (gpu.to_owned(), why))
        );
        let inventory = roster.inventory();
        let memories: Vec<_> = inventory.gpus().iter().map(|gpu| gpu.memory).collect();
        assert_eq!(memories, [well, well, away, away, fell, away]);
        roster.probed(
            listed(&[gpu("GPU-a"), gpu("GPU-d"), mig("MIG-1", "GPU-e")]),
            now,
        );
        assert_eq!(roster.inventory().gpus()[4].memory, well, "it is back");
    }

    #[test]
    fn a_gpu_that_the_next_agent_never_saw_answer_is_not_offered_and_its_due_reset_is_not_forgotten()
     {
        let awaits = Memory {
            awaits_reset: Some(48),
            ..Memory::default()
        };
        let remembered = |gpu, memory| Remembered { gpu, memory };
        let mut roster = after([
            (
                uuid("GPU-b"),
                remembered(Some(gpu("GPU-b")), Memory::default()),
            ),
            // As an agent that did not say what a GPU is left it.
            (uuid("GPU-c"), remembered(None, awaits)),
        ]);
        let now = Instant::now();
        let mut first = listed(&[gpu("GPU-a")]);
        if let Probe::Listed { silent, .. } = &mut first {
            silent.extend([uuid("GPU-b"), uuid("GPU-c")]);
        }
        roster.probed(first, now);
        let silent = Health::Unhealthy(Sickness::NoAnswer);
        let well = ("GPU-a".to_owned(), Health::Healthy);
        assert_eq!(healths(&roster), [well, ("GPU-b".to_owned(), silent)]);
        assert!(!roster.inventory().gpus()[1].memory.away);
        roster.probed(listed(&[gpu("GPU-a"), gpu("GPU-c")]), now);
        let due = Health::Unhealthy(Sickness::Xid(48));
        assert_eq!(healths(&roster)[2], ("GPU-c".to_owned(), due));
    }

    #[test]
    fn a_drained_gpu_is_not_looked_at_with_all_its_instances_and_the_others_are_by_their_place() {
        let at = |place: &str, gpu: Gpu| Gpu {
            pci: place.parse().ok(),
            ..gpu
        };
        let (one, two) = ("00000000:3B:00.0", "00000000:86:00.0");
        let gpus = [
            at(one, mig("MIG-1", "GPU-a")),
            at(one, mig("MIG-2", "GPU-a")),
            at(two, gpu("GPU-b")),
        ];
        let (mut roster, start) = (roster(), Instant::now());
        roster.probed(listed(&gpus), start);
        assert_eq!((roster.has_drained(), roster.places()), (false, None));
        roster.drain(BTreeSet::from([uuid("GPU-a")]), start);
        assert!(roster.has_drained() && !roster.is_ailing());
        assert_eq!(
            roster.places(),
            Some(BTreeSet::from([two.parse().unwrap()]))
        );
        assert!(roster.gpu(&uuid("MIG-1")).is_none() && roster.gpu(&uuid("GPU-b")).is_some());
        // Nobody looked: that it is not listed is no news.
        roster.probed(listed(&gpus[2..]), start);
        let drained = Health::Unhealthy(Sickness::Drained);
        let expected = [
            ("MIG-1", drained),
            ("MIG-2", drained),
            ("GPU-b", Health::Healthy),
        ];
        assert_eq!(
            healths(&roster),
            expected.map(|(gpu, health)| (gpu.to_owned(), health))
        );
        roster.drain(BTreeSet::new(), start);
        roster.probed(listed(&gpus), start);
        let memories: Vec<_> = roster
            .inventory()
            .gpus()
            .iter()
            .map(|gpu| gpu.memory)
            .collect();
        assert_eq!(memories, [Memory::default(); 3]);
    }

    #[test]
    fn an_xid_of_a_gpu_hits_its_mig_instances_and_no_other_gpu() {
        let mut roster = roster();
        roster.probed(
            listed(&[mig("MIG-1", "GPU-a"), mig("MIG-2", "GPU-a"), gpu("GPU-b")]),
            Instant::now(),
        );
        roster.xid(&uuid("GPU-a"), 79, Instant::now());
        let sick = Health::Unhealthy(Sickness::Xid(79));
        assert_eq!(
            healths(&roster),
            [
                ("MIG-1".into(), sick),
                ("MIG-2".into(), sick),
                ("GPU-b".into(), Health::Healthy)
            ]
        );
    }

    #[test]
    fn a_gpu_that_was_recut_is_forgotten_in_its_old_shape() {
        let mut roster = roster();
        roster.probed(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        roster.probed(
            listed(&[mig("MIG-1", "GPU-a"), gpu("GPU-b")]),
            Instant::now(),
        );
        assert!(!roster.is_ailing());
        roster.probed(listed(&[gpu("GPU-a"), gpu("GPU-b")]), Instant::now());
        let names: Vec<_> = healths(&roster).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["GPU-b", "GPU-a"]);
    }
}
