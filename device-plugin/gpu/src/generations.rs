//! Counts each GPU's generations: how often its memory was lost. A generation outlives boots.
//!
//! A generation grows with every boot and with every return of an absent GPU: a reset or a return
//! to the bus clears the memory. A GPU that recovers without an absence keeps its generation.
//!
//! MIG instances and replaced GPUs leave entries behind; the agent keeps [`MAX_ENTRIES`] of them.
//! The agent drops the entries of absent GPUs with the lowest generations and never the highest, so
//! any number above all kept ones is new. Once entries may have been dropped, a GPU without an
//! entry gets such a number, so that no GPU has the same generation twice.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use bursar_host::checkpoint::Checkpoint;
use bursar_host::checkpoint::write_behind::{LateWrite, WriteBehindFile};
use bursar_ledger::units::GpuUuid;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use tracing::warn;

use crate::health::PersistedHealth;
use crate::registry::PersistedGpu;
use crate::{Gpu, GpuState};

/// The most entries; those of present GPUs are always kept. A node of 16 GPUs with seven MIG
/// instances each has 112.
const MAX_ENTRIES: usize = 512;

/// One GPU's entry. Unknown fields are ignored: a file of another version must not restart the
/// numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    #[serde(deserialize_with = "clamp_generation")]
    generation: u64,
    /// The boot in which the GPU was last observed.
    boot: String,
    /// Its health at that time.
    #[serde(default)]
    memory: PersistedHealth,
    /// Its description at that time; none where another version wrote one that cannot be parsed.
    #[serde(default, deserialize_with = "parse_or_none")]
    gpu: Option<Gpu>,
}

/// The largest generation that the agent reads from a file. All later ones fit an `i64`, which the
/// API uses.
const MAX_READ_GENERATION: u64 = 1 << 53;

fn clamp_generation<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Ok(u64::deserialize(from)?.min(MAX_READ_GENERATION))
}

fn parse_or_none<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Gpu>, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(from)?).ok())
}

type Entries = BTreeMap<GpuUuid, Entry>;

/// How long the agent's start waits for the disk.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The generation of a GPU without an entry: above all others where its own entry may have been
/// dropped.
fn first_generation(entries: &Entries) -> u64 {
    let largest = entries.values().map(|entry| entry.generation).max();
    match entries.len() < MAX_ENTRIES {
        true => 1,
        false => largest.unwrap_or_default() + 1,
    }
}

/// A GPU whose memory was lost: its generation before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationChange {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The generation of the lost memory.
    pub before: u64,
    /// The generation of the memory now.
    pub after: u64,
}

impl fmt::Display for GenerationChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, before, after } = self;
        write!(
            f,
            "the memory of {gpu} has generation {after} instead of {before}: its contents are lost"
        )
    }
}

/// The generations of present GPUs and of the last absent ones, with their two files. One file is
/// in the run folder, which a reboot clears and which needs no disk; the other is on the disk.
/// Either file is enough for the agent.
#[derive(Debug)]
pub struct GpuGenerations {
    run_file: Checkpoint,
    disk_file: WriteBehindFile<Entries>,
    boot: String,
    entries: Entries,
    /// Neither file could be read so far, so nothing is written: the numbers are unknown.
    is_unread: bool,
    /// The run folder's file lacks the latest change.
    has_unsaved: bool,
    /// Whether the write to the disk was late at the last look.
    is_lagging: bool,
}

impl GpuGenerations {
    /// Reads both files. A file that cannot be parsed is moved aside; without the other file the
    /// numbers start again at 1. If the run folder has no file and the disk does not answer in
    /// time, each [`observe`](Self::observe) tries the disk again.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn load(run: Checkpoint, disk: Checkpoint, boot: String) -> std::io::Result<Self> {
        let disk = WriteBehindFile::open(disk, Checkpoint::save_durably)?;
        let disk_entries: Option<Entries> = disk.read(READ_TIMEOUT);
        let run_entries: Option<Entries> = run.load_or_set_aside().unwrap_or_else(|error| {
            warn!(%error, "failed to read generations from the run folder; using those on the disk");
            None
        });
        if disk_entries.is_none() {
            warn!(
                known = run_entries.is_some(),
                "failed to read generations from the disk yet"
            );
        }
        let unread = disk_entries.is_none() && run_entries.is_none();
        let mut entries = disk_entries.unwrap_or_default();
        for (uuid, entry) in run_entries.unwrap_or_default() {
            // An agent of another version may have written the disk's file alone.
            let newer = entries.get(&uuid).map(|other| other.generation);
            if newer <= Some(entry.generation) {
                entries.insert(uuid, entry);
            }
        }
        Ok(Self {
            run_file: run,
            disk_file: disk,
            boot,
            entries,
            is_unread: unread,
            has_unsaved: false,
            is_lagging: false,
        })
    }

    /// The GPUs that the previous agent of this boot recorded.
    pub fn persisted_gpus(&self) -> BTreeMap<GpuUuid, PersistedGpu> {
        let current_boot = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.boot == self.boot);
        current_boot
            .map(|(uuid, Entry { gpu, memory, .. })| {
                let (gpu, memory) = (gpu.clone(), *memory);
                (
                    uuid.clone(),
                    PersistedGpu {
                        gpu,
                        health: memory,
                    },
                )
            })
            .collect()
    }

    /// Merges the disk's entries, which were read late.
    fn merge_disk(&mut self, read: Entries) {
        self.is_unread = false;
        let first = first_generation(&read);
        for (_, entry) in self
            .entries
            .iter_mut()
            .filter(|(uuid, _)| !read.contains_key(*uuid))
        {
            entry.generation += first - 1;
        }
        for (uuid, read) in read {
            // Entries made meanwhile started at 1: they continue from the recorded number.
            let meanwhile = self.entries.remove(&uuid);
            let mut entry = read;
            if let Some(observed) = meanwhile {
                let is_lost =
                    entry.boot != self.boot || (entry.memory.away && !observed.memory.away);
                entry.generation += observed.generation - 1 + u64::from(is_lost);
                entry.boot = observed.boot;
                entry.memory = observed.memory;
                entry.gpu = observed.gpu;
            }
            self.entries.insert(uuid, entry);
        }
    }

    /// Records the present GPUs, and returns those whose generation has grown. The run folder has
    /// the change when this returns, or with a later call if the write fails. The disk has it
    /// later.
    pub fn observe(&mut self, gpus: &[GpuState]) -> Vec<GenerationChange> {
        let mut changed = false;
        let mut known = self.by_gpu();
        if self.is_unread
            && let Some(read) = self.disk_file.read(Duration::ZERO)
        {
            known = numbers(&read);
            self.merge_disk(read);
            changed = true;
        }
        let before = self.entries.clone();
        self.update_entries(gpus);
        self.warn_of_late_write();
        self.evict_absent();
        changed |= self.entries != before;
        self.has_unsaved |= changed;
        let grown = grown(&known, self.by_gpu());
        if self.is_unread || !self.has_unsaved {
            return grown;
        }
        if changed {
            self.disk_file.write(self.entries.clone());
        }
        match self.run_file.save(&self.entries) {
            Ok(()) => self.has_unsaved = false,
            Err(error) if changed => warn!(%error, "failed to write generations to the run folder"),
            Err(_) => {}
        }
        grown
    }

    fn update_entries(&mut self, gpus: &[GpuState]) {
        let first = first_generation(&self.entries);
        for state in gpus {
            let entry = self
                .entries
                .entry(state.gpu.uuid.clone())
                .or_insert_with(|| Entry {
                    generation: first,
                    boot: self.boot.clone(),
                    memory: state.persisted,
                    gpu: None,
                });
            if entry.boot != self.boot || (entry.memory.away && !state.persisted.away) {
                entry.generation += 1;
            }
            entry.boot.clone_from(&self.boot);
            entry.memory = state.persisted;
            entry.gpu = Some(state.gpu.clone());
        }
        // Lost GPUs are among the listed ones, so unlisted GPUs were repartitioned.
        let is_here = |uuid: &GpuUuid| gpus.iter().any(|state| state.gpu.uuid == *uuid);
        for (uuid, entry) in &mut self.entries {
            if !gpus.is_empty() && !is_here(uuid) {
                entry.gpu = None;
            }
        }
    }

    fn warn_of_late_write(&mut self) {
        let late = self.late_write();
        if let Some(LateWrite { directory, lag }) = &late
            && !self.is_lagging
        {
            warn!(
                ?lag,
                ?directory,
                "failed to write generations yet; check the disk of paths.state-dir"
            );
        }
        self.is_lagging = late.is_some();
    }

    /// The write of the file on the disk, if it is late.
    pub fn late_write(&self) -> Option<LateWrite> {
        self.disk_file.late_write()
    }

    /// Waits until the disk has every change.
    #[cfg(any(test, feature = "testing"))]
    pub fn flush(&self) -> bool {
        self.disk_file.flush(Duration::from_secs(20))
    }

    /// Drops the entries of absent GPUs above [`MAX_ENTRIES`], lowest generations first, except
    /// one.
    fn evict_absent(&mut self) {
        let over = self.entries.len().saturating_sub(MAX_ENTRIES);
        // The disk's file may have more entries, which decide which generations are the lowest.
        if over == 0 || self.is_unread {
            return;
        }
        let absent = self.entries.iter().filter(|(_, entry)| entry.gpu.is_none());
        let mut absent: Vec<(u64, GpuUuid)> = absent
            .map(|(uuid, entry)| (entry.generation, uuid.clone()))
            .collect();
        absent.sort_unstable();
        // The entry with the highest generation stays, which keeps later numbers above all others.
        absent.pop();
        for (_, uuid) in absent.into_iter().take(over) {
            self.entries.remove(&uuid);
        }
    }

    /// The generation of every GPU that has an entry. Empty before a file was read, since another
    /// generation would mean that a GPU's memory is lost.
    pub fn by_gpu(&self) -> BTreeMap<GpuUuid, u64> {
        match self.is_unread {
            true => BTreeMap::new(),
            false => numbers(&self.entries),
        }
    }
}

fn numbers(entries: &Entries) -> BTreeMap<GpuUuid, u64> {
    let entries = entries.iter();
    entries
        .map(|(uuid, entry)| (uuid.clone(), entry.generation))
        .collect()
}

/// The GPUs that have a higher generation than before; a new GPU has none before.
fn grown(known: &BTreeMap<GpuUuid, u64>, now: BTreeMap<GpuUuid, u64>) -> Vec<GenerationChange> {
    let changes = now.into_iter().filter_map(|(gpu, after)| {
        let before = known.get(&gpu).copied()?;
        (before < after).then_some(GenerationChange { gpu, before, after })
    });
    changes.collect()
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::health::{Health, UnhealthyReason};

    const HEALTHY: PersistedHealth = PersistedHealth {
        away: false,
        awaits_reset: None,
        draining: false,
        drained: false,
    };
    const ABSENT: PersistedHealth = PersistedHealth {
        away: true,
        awaits_reset: None,
        draining: false,
        drained: false,
    };
    const AWAITS_RESET: PersistedHealth = PersistedHealth {
        away: false,
        awaits_reset: Some(48),
        draining: false,
        drained: false,
    };

    fn state(memory: PersistedHealth) -> Vec<GpuState> {
        let health = if memory == HEALTHY {
            Health::Healthy
        } else {
            Health::Unhealthy(UnhealthyReason::Lost)
        };
        vec![GpuState {
            gpu: Gpu::with_uuid("GPU-a"),
            health,
            persisted: memory,
        }]
    }

    fn generation(generations: &GpuGenerations) -> u64 {
        generations.by_gpu()[&"GPU-a".parse().unwrap()]
    }

    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> std::path::PathBuf {
            self.0.path().join("generations.json")
        }

        /// An agent of that boot, which has a run folder of its own.
        fn load(&self, boot: &str) -> GpuGenerations {
            let run = Checkpoint::new(self.0.path().join(boot));
            GpuGenerations::load(run, Checkpoint::new(self.path()), boot.into()).unwrap()
        }

        /// An agent that starts after the disk has all changes of `before`.
        fn load_after(&self, before: &GpuGenerations, boot: &str) -> GpuGenerations {
            assert!(before.flush());
            self.load(boot)
        }
    }

    #[test]
    fn golden_generations_are_read() {
        let entry = |generation, memory, gpu| Entry {
            generation,
            boot: "6f5902ac-0000-4000-8000-000000000001".to_owned(),
            memory,
            gpu,
        };
        let instance = Gpu {
            minor: 3,
            pci: "00000000:4e:00.0".parse().ok(),
            mig_parent: "GPU-a".parse().ok(),
            capabilities: vec![21, 22],
            ..Gpu::with_uuid("MIG-a")
        };
        let away = PersistedHealth {
            away: true,
            awaits_reset: Some(48),
            draining: true,
            drained: true,
        };
        let entries: Entries = [
            ("GPU-a", entry(7, HEALTHY, Some(Gpu::with_uuid("GPU-a")))),
            ("GPU-b", entry(2, away, None)),
            ("MIG-a", entry(1, HEALTHY, Some(instance))),
        ]
        .map(|(uuid, entry)| (uuid.parse().unwrap(), entry))
        .into();
        bursar_host::testing::assert_golden_checkpoint("generations.json", &entries);
    }

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn generation_grows_with_each_boot_and_each_return_alone() {
        let fixture = Fixture::new();
        let mut agent = fixture.load("boot-1");
        agent.observe(&state(HEALTHY));
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 1);
        agent.observe(&state(ABSENT));
        assert_eq!(generation(&agent), 1);
        let mut agent = fixture.load_after(&agent, "boot-1");
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 2, "a return while no agent ran");
        let mut agent = fixture.load_after(&agent, "boot-2");
        agent.observe(&state(HEALTHY));
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 3);
    }

    #[test]
    fn each_bump_is_reported_once_with_both_numbers() {
        let fixture = Fixture::new();
        let mut agent = fixture.load("boot-1");
        let observe_changes = |agent: &mut GpuGenerations, memory| {
            let changes = agent.observe(&state(memory)).into_iter();
            changes
                .map(|change| (change.before, change.after))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            observe_changes(&mut agent, HEALTHY),
            [],
            "a new GPU has lost nothing"
        );
        assert_eq!(observe_changes(&mut agent, ABSENT), []);
        assert_eq!(observe_changes(&mut agent, HEALTHY), [(1, 2)]);
        assert_eq!(observe_changes(&mut agent, HEALTHY), []);
        let mut agent = fixture.load_after(&agent, "boot-1");
        assert_eq!(
            observe_changes(&mut agent, HEALTHY),
            [],
            "the agent alone restarted"
        );
        let mut agent = fixture.load_after(&agent, "boot-2");
        assert_eq!(observe_changes(&mut agent, HEALTHY), [(2, 3)]);
        let change = GenerationChange {
            gpu: "GPU-a".parse().unwrap(),
            before: 2,
            after: 3,
        };
        let text = "the memory of GPU-a has generation 3 instead of 2: its contents are lost";
        assert_eq!(change.to_string(), text);
    }

    #[test]
    fn generation_stays_when_gpu_recovers_without_absence() {
        let mut agent = Fixture::new().load("boot-1");
        let mut unhealthy = state(HEALTHY);
        unhealthy[0].health = Health::Unhealthy(UnhealthyReason::Xid(74));
        agent.observe(&unhealthy);
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 1);
    }

    #[test]
    fn gpu_and_required_reset_persist_within_the_boot() {
        let fixture = Fixture::new();
        let states = state(AWAITS_RESET);
        fixture.load("boot-1").observe(&states);
        let expected = PersistedGpu {
            gpu: Some(states[0].gpu.clone()),
            health: AWAITS_RESET,
        };
        let uuid = "GPU-a".parse().unwrap();
        assert_eq!(fixture.load("boot-1").persisted_gpus()[&uuid], expected);
        assert!(fixture.load("boot-2").persisted_gpus().is_empty());
    }

    #[test]
    fn gpu_is_not_persisted_when_it_was_repartitioned() {
        let fixture = Fixture::new();
        let mut agent = fixture.load("boot-1");
        let whole = state(PersistedHealth::default());
        agent.observe(&whole);
        agent.observe(&[]);
        let uuid: GpuUuid = "GPU-a".parse().unwrap();
        assert!(
            agent.persisted_gpus()[&uuid].gpu.is_some(),
            "NVML said nothing"
        );
        let mut cut = whole.clone();
        cut[0].gpu.uuid = "MIG-1".parse().unwrap();
        agent.observe(&cut);
        assert!(agent.persisted_gpus()[&uuid].gpu.is_none());
    }

    #[test]
    fn generation_is_kept_when_gpu_record_is_unreadable() {
        let fixture = Fixture::new();
        for gpu in [
            "",
            r#","gpu":null"#,
            r#","gpu":{"uuid":"GPU-a","shape":"new"}"#,
        ] {
            let text = format!(r#"{{"GPU-a":{{"generation":7,"boot":"boot-1"{gpu}}}}}"#);
            let entries: Entries = serde_json::from_str(&text).unwrap();
            Checkpoint::new(fixture.path())
                .save_durably(&entries)
                .unwrap();
            let _ = std::fs::remove_file(fixture.0.path().join("boot-1"));
            let agent = fixture.load("boot-1");
            assert_eq!(generation(&agent), 7);
            assert_eq!(
                agent.persisted_gpus().into_values().next().unwrap().gpu,
                None
            );
        }
    }

    #[test]
    fn generations_are_bounded_and_unique_when_gpus_are_recut() {
        let fixture = Fixture::new();
        let mut agent = fixture.load("boot-1");
        let observe = |agent: &mut GpuGenerations, numbers: &[usize]| {
            let cut = numbers.iter().map(|number| {
                let mut gpu = state(HEALTHY).remove(0);
                gpu.gpu.uuid = format!("MIG-{number}").parse().unwrap();
                gpu
            });
            agent.observe(&cut.collect::<Vec<_>>());
            let generation_of =
                |number: &usize| agent.by_gpu()[&format!("MIG-{number}").parse().unwrap()];
            numbers.iter().map(generation_of).collect::<Vec<u64>>()
        };
        let all: Vec<usize> = (0..3 * MAX_ENTRIES).collect();
        let mut assigned = Vec::new();
        for cut in all.chunks(64) {
            assigned.extend(observe(&mut agent, cut));
            assert!(
                agent.entries.len() <= MAX_ENTRIES,
                "{}",
                agent.entries.len()
            );
        }
        let mut agent = fixture.load_after(&agent, "boot-2");
        for number in [0, 1, MAX_ENTRIES, 2 * MAX_ENTRIES, 3 * MAX_ENTRIES - 1] {
            let now = observe(&mut agent, &[number])[0];
            assert!(now > assigned[number], "{number}: {now}");
        }
        // The next agent observes a GPU before it has read the file.
        assert!(agent.flush());
        let away = fixture.path().with_extension("away");
        std::fs::rename(fixture.path(), &away).unwrap();
        std::os::unix::fs::symlink("generations.json", fixture.path()).unwrap();
        let mut agent = fixture.load("boot-3");
        let mut recut = state(HEALTHY);
        recut[0].gpu.uuid = "MIG-2".parse().unwrap();
        agent.observe(&recut);
        std::fs::rename(&away, fixture.path()).unwrap();
        let start = std::time::Instant::now();
        while agent.by_gpu().is_empty() && start.elapsed() < TIMEOUT {
            agent.observe(&recut);
            std::thread::sleep(Duration::from_millis(5));
        }
        let largest = assigned.iter().max().unwrap();
        assert!(agent.by_gpu()[&recut[0].gpu.uuid] > *largest);
    }

    #[test]
    fn malformed_file_is_moved_aside() {
        let fixture = Fixture::new();
        std::fs::write(fixture.path(), "{").unwrap();
        let mut agent = fixture.load("boot-1");
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 1);
        assert!(fixture.path().with_extension("unread").exists());
    }

    #[test]
    fn file_stays_in_place_when_it_cannot_be_read() {
        let fixture = Fixture::new();
        fixture.load("boot-1").observe(&state(HEALTHY));
        fixture.load("boot-2").observe(&state(HEALTHY));
        let away = fixture.path().with_extension("away");
        std::fs::rename(fixture.path(), &away).unwrap();
        // A symbolic link to itself makes the read fail.
        std::os::unix::fs::symlink("generations.json", fixture.path()).unwrap();
        let mut agent = fixture.load("boot-3");
        agent.observe(&state(HEALTHY));
        assert!(fixture.path().is_symlink());
        assert_eq!(agent.by_gpu(), BTreeMap::new(), "it is not 1");
        std::fs::rename(&away, fixture.path()).unwrap();
        let start = std::time::Instant::now();
        while agent.by_gpu().is_empty() && start.elapsed() < TIMEOUT {
            agent.observe(&state(HEALTHY));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(generation(&agent), 3);
        assert_eq!(generation(&fixture.load_after(&agent, "boot-3")), 3);
    }

    #[test]
    fn generations_go_on_within_a_boot_when_the_disk_hangs() {
        let fixture = Fixture::new();
        fixture.load("boot-0").observe(&state(HEALTHY));
        // A named pipe without a reader makes each write of the disk's file hang.
        let temporary = fixture.path().with_extension("new");
        let status = std::process::Command::new("mkfifo")
            .arg(&temporary)
            .status();
        assert!(status.unwrap().success());
        let mut agent = fixture.load("boot-1");
        agent.observe(&state(HEALTHY));
        agent.observe(&state(ABSENT));
        agent.observe(&state(HEALTHY));
        assert_eq!(generation(&agent), 3);
        // A named pipe in place of the file makes each read hang.
        std::fs::remove_file(fixture.path()).unwrap();
        let status = std::process::Command::new("mkfifo")
            .arg(fixture.path())
            .status();
        assert!(status.unwrap().success());
        let mut next = fixture.load("boot-1");
        assert_eq!(generation(&next), 3);
        next.observe(&state(HEALTHY));
        assert_eq!(generation(&next), 3, "the agent's restart is no loss");
        assert!(next.persisted_gpus().len() == 1);
    }
}
