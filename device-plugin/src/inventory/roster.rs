//! Keeps the GPUs that NVML listed since the agent started, each with its health.

use std::time::Instant;

use super::health::{Monitor, News, Policy};
use super::{Gpu, GpuState, Inventory, NoDriver};
use crate::units::GpuUuid;

/// What one probe of all GPUs found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// NVML cannot be used.
    NoDriver(NoDriver),
    /// The GPUs that NVML lists; those that could be found and not read are `silent`.
    Listed {
        /// The driver's version.
        driver: Option<String>,
        /// GPUs that answered.
        gpus: Vec<Gpu>,
        /// GPUs that NVML knows and that did not answer.
        silent: Vec<GpuUuid>,
    },
}

/// Every GPU since the start.
#[derive(Debug)]
pub struct Roster {
    policy: Policy,
    entries: Vec<Entry>,
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
    /// No GPU yet.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            entries: Vec::new(),
            without: Inventory::Starting,
            driver: None,
        }
    }

    /// Takes a probe in.
    pub fn probed(&mut self, probe: Probe, now: Instant) {
        match probe {
            Probe::NoDriver(why) => {
                self.without = Inventory::NoDriver(why);
                self.driver = None;
                self.tell_all(&[], &[], now);
            }
            Probe::Listed {
                driver,
                gpus,
                silent,
            } => {
                self.without = Inventory::NoGpu;
                self.driver = driver;
                self.forget_recut(&gpus);
                self.tell_all(&gpus, &silent, now);
                self.add(gpus);
            }
        }
    }

    /// Takes in an XID of a GPU; one of a GPU that is not listed is dropped.
    pub fn xid(&mut self, uuid: &GpuUuid, code: u64, now: Instant) {
        // An XID names the physical GPU: its MIG instances share its fate.
        let hit = |gpu: &Gpu| gpu.uuid == *uuid || gpu.mig_parent.as_ref() == Some(uuid);
        for entry in self.entries.iter_mut().filter(|entry| hit(&entry.gpu)) {
            entry.monitor.hear(News::Xid(code), now);
        }
    }

    /// Whether some GPU is not well: probe sooner, and open NVML afresh.
    pub fn is_ailing(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| !entry.monitor.health().is_healthy())
    }

    /// The GPUs as they stand.
    pub fn inventory(&self) -> Inventory {
        if self.entries.is_empty() {
            return self.without.clone();
        }
        let state = |entry: &Entry| GpuState {
            gpu: entry.gpu.clone(),
            health: entry.monitor.health(),
        };
        Inventory::Gpus {
            driver: self.driver.clone(),
            gpus: self.entries.iter().map(state).collect(),
        }
    }

    fn tell_all(&mut self, gpus: &[Gpu], silent: &[GpuUuid], now: Instant) {
        for entry in &mut self.entries {
            let news = if let Some(found) = gpus.iter().find(|gpu| gpu.uuid == entry.gpu.uuid) {
                entry.gpu = found.clone();
                News::Answered
            } else if silent.contains(&entry.gpu.uuid) {
                News::Silent
            } else {
                News::Missing
            };
            entry.monitor.hear(news, now);
        }
    }

    fn add(&mut self, gpus: Vec<Gpu>) {
        for gpu in gpus {
            if !self.entries.iter().any(|entry| entry.gpu.uuid == gpu.uuid) {
                self.entries.push(Entry {
                    gpu,
                    monitor: Monitor::new(self.policy),
                });
            }
        }
    }

    /// A GPU that was cut into MIG instances, or made whole again, has not died: its old shape is
    /// forgotten where the new one is listed.
    fn forget_recut(&mut self, gpus: &[Gpu]) {
        let recut = |old: &Gpu| {
            let listed = gpus.iter().any(|gpu| gpu.uuid == old.uuid);
            let cut = gpus
                .iter()
                .any(|gpu| gpu.mig_parent.as_ref() == Some(&old.uuid));
            let parent = old.mig_parent.as_ref();
            let sibling_or_whole = |gpu: &Gpu| {
                parent == Some(&gpu.uuid) || (parent.is_some() && gpu.mig_parent.as_ref() == parent)
            };
            !listed && (cut || gpus.iter().any(sibling_or_whole))
        };
        self.entries.retain(|entry| !recut(&entry.gpu));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::health::{Health, Sickness};
    use super::*;
    use crate::units::Bytes;

    fn uuid(name: &str) -> GpuUuid {
        name.parse().unwrap()
    }

    fn gpu(name: &str) -> Gpu {
        Gpu {
            uuid: uuid(name),
            minor: 0,
            model: "T".into(),
            memory: Bytes::gib(16),
            mig_parent: None,
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
        let mut roster = Roster::new(Policy::default());
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
        let (mut roster, start) = (Roster::new(Policy::default()), Instant::now());
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

    #[test]
    fn a_driver_that_goes_away_takes_every_gpu_with_it() {
        let mut roster = Roster::new(Policy::default());
        roster.probed(listed(&[gpu("GPU-a")]), Instant::now());
        roster.probed(
            Probe::NoDriver(NoDriver::Failed("unloaded".into())),
            Instant::now(),
        );
        assert_eq!(
            healths(&roster),
            [("GPU-a".into(), Health::Unhealthy(Sickness::Lost))]
        );
    }

    #[test]
    fn an_xid_of_a_gpu_hits_its_mig_instances_and_no_other_gpu() {
        let mut roster = Roster::new(Policy::default());
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
        let mut roster = Roster::new(Policy::default());
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
