//! G of each GPU: how often its memory was lost. It only grows, and outlives boots.
//!
//! It grows when nothing on the GPU can have survived: with every boot, and when a GPU is back that
//! was away, for a reset or a return to the bus is the end of what was in it. A recovery without
//! that is none.
//!
//! MIG instances and replaced GPUs leave entries behind, and the agent keeps [`MOST`] of them. The
//! agent drops entries of absent GPUs with the least G and never the largest, so any number above
//! all kept ones is new. Once entries may have been dropped, a GPU without an entry gets such a
//! number: no GPU gets a G that it had before.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::disk::Disk;
use crate::gpu::health::Memory;
use crate::gpu::registry::Remembered;
use crate::gpu::{Gpu, GpuState};
use crate::units::GpuUuid;

/// The most entries of present and absent GPUs; present ones are always kept. A node of 16 GPUs
/// with seven MIG instances each has 112.
const MOST: usize = 512;

/// One GPU's entry. Fields that it does not know are left alone: numbers that start again are
/// worse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    generation: u64,
    /// The boot that it was last seen in.
    boot: String,
    /// What was known of its health then.
    #[serde(default)]
    memory: Memory,
    /// What it was then; none where another agent's record of that makes no sense here.
    #[serde(default, deserialize_with = "if_it_makes_sense")]
    gpu: Option<Gpu>,
}

fn if_it_makes_sense<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Gpu>, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(from)?).ok())
}

type Entries = BTreeMap<GpuUuid, Entry>;

/// How long the disk may take before that is logged.
const LATE: Duration = Duration::from_secs(5);

/// How long the agent's start waits for the disk.
const READ: Duration = Duration::from_secs(1);

/// G of a GPU without an entry: above all others where its own entry may have been dropped.
fn first(entries: &Entries) -> u64 {
    let largest = entries.values().map(|entry| entry.generation).max();
    match entries.len() < MOST {
        true => 1,
        false => largest.unwrap_or_default() + 1,
    }
}

/// The generations of this node's GPUs and of the last that have left, with the files that keep
/// them. One file is in the run folder, which a reboot clears and no disk can hold up; the other is
/// on the disk. An agent needs either.
#[derive(Debug)]
pub struct Generations {
    run: Checkpoint,
    disk: Disk<Entries>,
    boot: String,
    entries: Entries,
    /// Neither file could be read so far: nothing is written before the numbers are known.
    unread: bool,
    /// The run folder's file lacks something.
    unsaved: bool,
    /// The disk has not taken the newest numbers for long.
    lags: bool,
}

impl Generations {
    /// Reads both files. One that makes no sense is moved aside: without the other the numbers
    /// start again at 1. Where there is none in the run folder and the disk does not tell in time,
    /// it is looked at again with every [`see`](Self::see).
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn load(run: Checkpoint, disk: Checkpoint, boot: String) -> std::io::Result<Self> {
        let disk = Disk::open(disk, Checkpoint::save_durably)?;
        let of_disk: Option<Entries> = disk.read(READ);
        let of_run: Option<Entries> = run.load().unwrap_or_else(|error| {
            warn!(%error, "generations of GPUs are read from the disk alone");
            let _ = run.set_aside();
            None
        });
        if of_disk.is_none() {
            warn!(
                known = of_run.is_some(),
                "generations of GPUs are not read from the disk yet"
            );
        }
        let unread = of_disk.is_none() && of_run.is_none();
        let mut entries = of_disk.unwrap_or_default();
        for (uuid, entry) in of_run.unwrap_or_default() {
            // An agent of another version may have written the disk's alone.
            let newer = entries.get(&uuid).map(|other| other.generation);
            if newer <= Some(entry.generation) {
                entries.insert(uuid, entry);
            }
        }
        Ok(Self {
            run,
            disk,
            boot,
            entries,
            unread,
            unsaved: false,
            lags: false,
        })
    }

    /// What a predecessor in this boot knew of its GPUs.
    pub fn remembered(&self) -> BTreeMap<GpuUuid, Remembered> {
        let of_this_boot = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.boot == self.boot);
        of_this_boot
            .map(|(uuid, Entry { gpu, memory, .. })| {
                let (gpu, memory) = (gpu.clone(), *memory);
                (uuid.clone(), Remembered { gpu, memory })
            })
            .collect()
    }

    /// Takes in what the disk has told at last.
    fn take_in(&mut self, read: Entries) {
        self.unread = false;
        let first = first(&read);
        for (_, seen) in self
            .entries
            .iter_mut()
            .filter(|(uuid, _)| !read.contains_key(*uuid))
        {
            seen.generation += first - 1;
        }
        for (uuid, read) in read {
            // What was seen meanwhile started at 1: it goes on from what is on record.
            let meanwhile = self.entries.remove(&uuid);
            let mut entry = read;
            if let Some(seen) = meanwhile {
                let of_before = entry.boot != self.boot || (entry.memory.away && !seen.memory.away);
                entry.generation += seen.generation - 1 + u64::from(of_before);
                entry.boot = seen.boot;
                entry.memory = seen.memory;
                entry.gpu = seen.gpu;
            }
            self.entries.insert(uuid, entry);
        }
    }

    /// Takes in the GPUs as they are now. The run folder has them before this returns, unless it
    /// takes nothing: then with the next call. The disk has them when it takes them.
    pub fn see(&mut self, gpus: &[GpuState]) {
        let mut changed = false;
        if self.unread
            && let Some(read) = self.disk.read(Duration::ZERO)
        {
            self.take_in(read);
            changed = true;
        }
        let before = self.entries.clone();
        let first = first(&self.entries);
        for state in gpus {
            let entry = self
                .entries
                .entry(state.gpu.uuid.clone())
                .or_insert_with(|| Entry {
                    generation: first,
                    boot: self.boot.clone(),
                    memory: state.memory,
                    gpu: None,
                });
            if entry.boot != self.boot || (entry.memory.away && !state.memory.away) {
                entry.generation += 1;
            }
            entry.boot.clone_from(&self.boot);
            entry.memory = state.memory;
            entry.gpu = Some(state.gpu.clone());
        }
        // Who is lost is among them: the others were cut anew.
        let is_here = |uuid: &GpuUuid| gpus.iter().any(|state| state.gpu.uuid == *uuid);
        for (uuid, entry) in &mut self.entries {
            if !gpus.is_empty() && !is_here(uuid) {
                entry.gpu = None;
            }
        }
        let lags = self.disk.lag() >= LATE;
        if lags && !self.lags {
            warn!(after = ?LATE, "failed to write generations to the disk yet; check the disk of paths.state-dir");
        }
        self.lags = lags;
        self.drop_least();
        changed |= self.entries != before;
        self.unsaved |= changed;
        if self.unread || !self.unsaved {
            return;
        }
        if changed {
            self.disk.write(self.entries.clone());
        }
        match self.run.save(&self.entries) {
            Ok(()) => self.unsaved = false,
            Err(error) if changed => warn!(%error, "generations not written"),
            Err(_) => {}
        }
    }

    /// Waits for the disk to have everything that was seen.
    #[cfg(test)]
    pub(crate) fn is_on_disk(&self) -> bool {
        self.disk.flush(Duration::from_secs(20))
    }

    /// Drops entries of absent GPUs above [`MOST`], those with the least G, but for one.
    fn drop_least(&mut self) {
        let over = self.entries.len().saturating_sub(MOST);
        // The file may have more entries, and decides which are the least.
        if over == 0 || self.unread {
            return;
        }
        let absent = self.entries.iter().filter(|(_, entry)| entry.gpu.is_none());
        let mut absent: Vec<(u64, GpuUuid)> = absent
            .map(|(uuid, entry)| (entry.generation, uuid.clone()))
            .collect();
        absent.sort_unstable();
        // The last entry has the largest G of the absent, which keeps later numbers above all
        // others.
        absent.pop();
        for (_, uuid) in absent.into_iter().take(over) {
            self.entries.remove(&uuid);
        }
    }

    /// G of every GPU that has an entry; of none before a file was read, since another G means that
    /// a GPU's memory is lost.
    pub fn all(&self) -> BTreeMap<GpuUuid, u64> {
        let known = self.entries.iter().filter(|_| !self.unread);
        known
            .map(|(uuid, entry)| (uuid.clone(), entry.generation))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::health::{Health, Sickness};
    use crate::units::Bytes;

    const WELL: Memory = Memory {
        away: false,
        awaits_reset: None,
        drained: false,
    };
    const AWAY: Memory = Memory {
        away: true,
        awaits_reset: None,
        drained: false,
    };
    const AWAITS_RESET: Memory = Memory {
        away: false,
        awaits_reset: Some(48),
        drained: false,
    };

    fn state(memory: Memory) -> Vec<GpuState> {
        let uuid = "GPU-a".parse().unwrap();
        let gpu = Gpu {
            uuid,
            minor: 0,
            model: "T".into(),
            memory: Bytes::gib(1),
            pci: None,
            mig_parent: None,
            capabilities: Vec::new(),
        };
        let health = if memory == WELL {
            Health::Healthy
        } else {
            Health::Unhealthy(Sickness::Lost)
        };
        vec![GpuState {
            gpu,
            health,
            memory,
        }]
    }

    fn g(generations: &Generations) -> u64 {
        generations.all()[&"GPU-a".parse().unwrap()]
    }

    struct Bed(tempfile::TempDir);

    impl Bed {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> std::path::PathBuf {
            self.0.path().join("generations.json")
        }

        /// Of that boot, whose run folder is its own.
        fn agent(&self, boot: &str) -> Generations {
            let run = Checkpoint::new(self.0.path().join(boot));
            Generations::load(run, Checkpoint::new(self.path()), boot.into()).unwrap()
        }

        /// The same, once the disk has what was seen.
        fn agent_after(&self, before: &Generations, boot: &str) -> Generations {
            assert!(before.is_on_disk());
            self.agent(boot)
        }
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_generation_grows_with_each_boot_and_each_return_and_with_nothing_else() {
        let bed = Bed::new();
        let mut agent = bed.agent("boot-1");
        agent.see(&state(WELL));
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 1);
        agent.see(&state(AWAY));
        assert_eq!(g(&agent), 1);
        let mut agent = bed.agent_after(&agent, "boot-1");
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 2, "a return while no agent ran");
        let mut agent = bed.agent_after(&agent, "boot-2");
        agent.see(&state(WELL));
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 3);
    }

    #[test]
    fn a_gpu_that_recovers_without_having_been_away_keeps_its_generation() {
        let mut agent = Bed::new().agent("boot-1");
        let mut sick = state(WELL);
        sick[0].health = Health::Unhealthy(Sickness::Xid(74));
        agent.see(&sick);
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 1);
    }

    #[test]
    fn a_gpu_and_a_reset_that_is_due_are_remembered_within_the_boot() {
        let bed = Bed::new();
        let seen = state(AWAITS_RESET);
        bed.agent("boot-1").see(&seen);
        let remembered = Remembered {
            gpu: Some(seen[0].gpu.clone()),
            memory: AWAITS_RESET,
        };
        let uuid = "GPU-a".parse().unwrap();
        assert_eq!(bed.agent("boot-1").remembered()[&uuid], remembered);
        assert!(bed.agent("boot-2").remembered().is_empty());
    }

    #[test]
    fn a_shape_that_a_gpu_has_no_more_is_not_remembered_as_one() {
        let bed = Bed::new();
        let mut agent = bed.agent("boot-1");
        let whole = state(Memory::default());
        agent.see(&whole);
        agent.see(&[]);
        let uuid: GpuUuid = "GPU-a".parse().unwrap();
        assert!(agent.remembered()[&uuid].gpu.is_some(), "NVML said nothing");
        let mut cut = whole.clone();
        cut[0].gpu.uuid = "MIG-1".parse().unwrap();
        agent.see(&cut);
        assert!(agent.remembered()[&uuid].gpu.is_none());
    }

    #[test]
    fn what_another_agent_said_that_a_gpu_is_costs_no_number() {
        let bed = Bed::new();
        for gpu in [
            "",
            r#","gpu":null"#,
            r#","gpu":{"uuid":"GPU-a","shape":"new"}"#,
        ] {
            let text = format!(r#"{{"GPU-a":{{"generation":7,"boot":"boot-1"{gpu}}}}}"#);
            let entries: Entries = serde_json::from_str(&text).unwrap();
            Checkpoint::new(bed.path()).save_durably(&entries).unwrap();
            let _ = std::fs::remove_file(bed.0.path().join("boot-1"));
            let agent = bed.agent("boot-1");
            assert_eq!(g(&agent), 7);
            assert_eq!(agent.remembered().into_values().next().unwrap().gpu, None);
        }
    }

    #[test]
    fn generations_are_bounded_and_unique_when_gpus_are_recut() {
        let bed = Bed::new();
        let mut agent = bed.agent("boot-1");
        let see = |agent: &mut Generations, numbers: &[usize]| {
            let cut = numbers.iter().map(|number| {
                let mut gpu = state(WELL).remove(0);
                gpu.gpu.uuid = format!("MIG-{number}").parse().unwrap();
                gpu
            });
            agent.see(&cut.collect::<Vec<_>>());
            let of_it = |number: &usize| agent.all()[&format!("MIG-{number}").parse().unwrap()];
            numbers.iter().map(of_it).collect::<Vec<u64>>()
        };
        let all: Vec<usize> = (0..3 * MOST).collect();
        let mut given = Vec::new();
        for cut in all.chunks(64) {
            given.extend(see(&mut agent, cut));
            assert!(agent.entries.len() <= MOST, "{}", agent.entries.len());
        }
        let mut agent = bed.agent_after(&agent, "boot-2");
        for number in [0, 1, MOST, 2 * MOST, 3 * MOST - 1] {
            let now = see(&mut agent, &[number])[0];
            assert!(now > given[number], "{number}: {now}");
        }
        // The next agent sees a GPU before it has read the file.
        assert!(agent.is_on_disk());
        let away = bed.path().with_extension("away");
        std::fs::rename(bed.path(), &away).unwrap();
        std::os::unix::fs::symlink("generations.json", bed.path()).unwrap();
        let mut agent = bed.agent("boot-3");
        let mut recut = state(WELL);
        recut[0].gpu.uuid = "MIG-2".parse().unwrap();
        agent.see(&recut);
        std::fs::rename(&away, bed.path()).unwrap();
        let begun = std::time::Instant::now();
        while agent.all().is_empty() && begun.elapsed() < SOON {
            agent.see(&recut);
            std::thread::sleep(Duration::from_millis(5));
        }
        let largest = given.iter().max().unwrap();
        assert!(agent.all()[&recut[0].gpu.uuid] > *largest);
    }

    #[test]
    fn a_malformed_file_is_moved_aside() {
        let bed = Bed::new();
        std::fs::write(bed.path(), "{").unwrap();
        let mut agent = bed.agent("boot-1");
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 1);
        assert!(bed.path().with_extension("malformed").exists());
    }

    #[test]
    fn a_file_that_cannot_be_read_for_a_while_is_neither_moved_nor_replaced() {
        let bed = Bed::new();
        bed.agent("boot-1").see(&state(WELL));
        bed.agent("boot-2").see(&state(WELL));
        let away = bed.path().with_extension("away");
        std::fs::rename(bed.path(), &away).unwrap();
        // A link to itself in its place: reading it is an error of the system.
        std::os::unix::fs::symlink("generations.json", bed.path()).unwrap();
        let mut agent = bed.agent("boot-3");
        agent.see(&state(WELL));
        assert!(bed.path().is_symlink());
        assert_eq!(agent.all(), BTreeMap::new(), "it is not 1");
        std::fs::rename(&away, bed.path()).unwrap();
        let begun = std::time::Instant::now();
        while agent.all().is_empty() && begun.elapsed() < SOON {
            agent.see(&state(WELL));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(g(&agent), 3);
        assert_eq!(g(&bed.agent_after(&agent, "boot-3")), 3);
    }

    #[test]
    fn generations_go_on_within_a_boot_when_the_disk_hangs() {
        let bed = Bed::new();
        bed.agent("boot-0").see(&state(WELL));
        // Nobody reads it: each write of the disk's file hangs.
        let beside = bed.path().with_extension("new");
        let made = std::process::Command::new("mkfifo").arg(&beside).status();
        assert!(made.unwrap().success());
        let mut agent = bed.agent("boot-1");
        agent.see(&state(WELL));
        agent.see(&state(AWAY));
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 3);
        // Nor does the disk tell the next agent anything.
        std::fs::remove_file(bed.path()).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(bed.path())
            .status();
        assert!(made.unwrap().success());
        let mut next = bed.agent("boot-1");
        assert_eq!(g(&next), 3);
        next.see(&state(WELL));
        assert_eq!(g(&next), 3, "the agent's restart is no loss");
        assert!(next.remembered().len() == 1);
    }
}
