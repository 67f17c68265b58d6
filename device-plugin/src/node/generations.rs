//! G of each GPU: how often its memory was lost (design, section 8). It only grows, and outlives boots.
//!
//! It grows when nothing on the GPU can have survived: with every boot, and when a GPU is back that was away,
//! for a reset or a return to the bus is the end of what was in it. A recovery without that is none.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use tracing::warn;

use crate::checkpoint::{Checkpoint, LoadError};
use crate::inventory::health::Memory;
use crate::inventory::roster::Remembered;
use crate::inventory::{Gpu, GpuState};
use crate::units::GpuUuid;

/// One GPU's entry. Fields that it does not know are left alone: numbers that start again are worse.
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

/// The generations of every GPU that was ever on this node, with the file that keeps them.
#[derive(Debug)]
pub struct Generations {
    file: Checkpoint,
    boot: String,
    entries: Entries,
    /// The file could not be read so far: it is not written before its numbers are known.
    unread: bool,
    /// The file lacks something.
    unsaved: bool,
}

impl Generations {
    /// Reads `file`. One that makes no sense is moved aside: the numbers start again at 1. One that
    /// cannot be read now is tried again with every [`see`](Self::see).
    pub fn load(file: Checkpoint, boot: String) -> Self {
        let mut generations = Self {
            file,
            boot,
            entries: Entries::new(),
            unread: true,
            unsaved: false,
        };
        if let Err(error) = generations.read() {
            warn!(%error, "generations of GPUs not known yet");
        }
        generations
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

    fn read(&mut self) -> Result<(), LoadError> {
        let read: Entries = match self.file.load() {
            Ok(read) => read.unwrap_or_default(),
            Err(error @ LoadError::Read { .. }) => return Err(error),
            Err(error @ LoadError::Malformed { .. }) => {
                warn!(%error, "generations of GPUs start again");
                // It is in the way of nothing: the next save replaces it.
                let _ = self.file.set_aside();
                Entries::new()
            }
        };
        self.unread = false;
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
        Ok(())
    }

    /// Takes in the GPUs as they are now. What cannot be written is written with the next call.
    pub fn see(&mut self, gpus: &[GpuState]) {
        if self.unread {
            // Said once, when it was loaded.
            let _ = self.read();
        }
        let before = self.entries.clone();
        for state in gpus {
            let entry = self
                .entries
                .entry(state.gpu.uuid.clone())
                .or_insert_with(|| Entry {
                    generation: 1,
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
        let changed = self.entries != before;
        self.unsaved |= changed;
        if self.unsaved && !self.unread {
            match self.file.save_durably(&self.entries) {
                Ok(()) => self.unsaved = false,
                Err(error) if changed => warn!(%error, "generations not written"),
                Err(_) => {}
            }
        }
    }

    /// G of every GPU that was ever seen; of none before the file was read: another number than that of before means
    /// that what a GPU had is lost.
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
    use crate::inventory::health::{Health, Sickness};
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

        fn agent(&self, boot: &str) -> Generations {
            Generations::load(Checkpoint::new(self.path()), boot.into())
        }
    }

    #[test]
    fn a_generation_grows_with_each_boot_and_each_return_and_with_nothing_else() {
        let bed = Bed::new();
        let mut agent = bed.agent("boot-1");
        agent.see(&state(WELL));
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 1);
        agent.see(&state(AWAY));
        assert_eq!(g(&agent), 1);
        let mut agent = bed.agent("boot-1");
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 2, "a return while no agent ran");
        let mut agent = bed.agent("boot-2");
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
            let agent = bed.agent("boot-1");
            assert_eq!(g(&agent), 7);
            assert_eq!(agent.remembered().into_values().next().unwrap().gpu, None);
        }
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
        // A folder in its place: reading it is an error of the system.
        std::fs::create_dir(bed.path()).unwrap();
        let mut agent = bed.agent("boot-3");
        agent.see(&state(WELL));
        assert!(bed.path().is_dir());
        assert_eq!(agent.all(), BTreeMap::new(), "it is not 1");
        std::fs::remove_dir(bed.path()).unwrap();
        std::fs::rename(&away, bed.path()).unwrap();
        agent.see(&state(WELL));
        assert_eq!(g(&agent), 3);
        assert_eq!(g(&bed.agent("boot-3")), 3);
    }
}
