//! G of each GPU: how often its memory was lost (design, section 8). It only grows, and outlives boots.
//!
//! It grows when nothing on the GPU can have survived: with every boot, and when a GPU is healthy again
//! after it was not, for only a reset or a return to the bus ends that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::inventory::GpuState;
use crate::units::GpuUuid;

/// One GPU's entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    generation: u64,
    /// The boot that it was last seen in.
    boot: String,
    /// Whether it was healthy when it was last seen.
    healthy: bool,
}

/// The generations of every GPU that was ever on this node, with the file that keeps them.
#[derive(Debug)]
pub struct Generations {
    file: Checkpoint,
    boot: String,
    entries: BTreeMap<GpuUuid, Entry>,
}

impl Generations {
    /// Reads `file`. One that makes no sense is moved aside: the numbers start again at 1.
    pub fn load(file: Checkpoint, boot: String) -> Self {
        let entries = file.load().unwrap_or_else(|error| {
            warn!(%error, "generations of GPUs start again");
            // It is in the way of nothing: the next save replaces it.
            let _ = file.set_aside();
            None
        });
        Self {
            file,
            boot,
            entries: entries.unwrap_or_default(),
        }
    }

    /// Takes in the GPUs as they are now. What cannot be written is written with the next change.
    pub fn see(&mut self, gpus: &[GpuState]) {
        let before = self.entries.clone();
        for state in gpus {
            let healthy = state.health.is_healthy();
            let entry = self
                .entries
                .entry(state.gpu.uuid.clone())
                .or_insert_with(|| Entry {
                    generation: 1,
                    boot: self.boot.clone(),
                    healthy,
                });
            if entry.boot != self.boot || (healthy && !entry.healthy) {
                entry.generation += 1;
            }
            entry.boot.clone_from(&self.boot);
            entry.healthy = healthy;
        }
        if self.entries != before
            && let Err(error) = self.file.save(&self.entries)
        {
            warn!(%error, "generations not written");
        }
    }

    /// G of every GPU that was ever seen.
    pub fn all(&self) -> BTreeMap<GpuUuid, u64> {
        self.entries
            .iter()
            .map(|(uuid, entry)| (uuid.clone(), entry.generation))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Gpu;
    use crate::inventory::health::{Health, Sickness};
    use crate::units::Bytes;

    fn state(health: Health) -> Vec<GpuState> {
        let uuid = "GPU-a".parse().unwrap();
        let gpu = Gpu {
            uuid,
            minor: 0,
            model: "T".into(),
            memory: Bytes::gib(1),
            mig_parent: None,
        };
        vec![GpuState { gpu, health }]
    }

    fn g(generations: &Generations) -> u64 {
        generations.all()[&"GPU-a".parse().unwrap()]
    }

    #[test]
    fn a_generation_grows_with_each_boot_and_each_recovery_and_with_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let load = |boot: &str| {
            Generations::load(
                Checkpoint::new(folder.path().join("generations.json")),
                boot.into(),
            )
        };
        let mut agent = load("boot-1");
        agent.see(&state(Health::Healthy));
        agent.see(&state(Health::Healthy));
        assert_eq!(g(&agent), 1);
        agent.see(&state(Health::Unhealthy(Sickness::Lost)));
        assert_eq!(g(&agent), 1);
        let mut agent = load("boot-1");
        agent.see(&state(Health::Healthy));
        assert_eq!(g(&agent), 2, "a recovery while no agent ran");
        let mut agent = load("boot-2");
        agent.see(&state(Health::Healthy));
        agent.see(&state(Health::Healthy));
        assert_eq!(g(&agent), 3);
    }

    #[test]
    fn a_malformed_file_is_moved_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generations.json");
        std::fs::write(&path, "{").unwrap();
        let mut agent = Generations::load(Checkpoint::new(path), "boot-1".into());
        agent.see(&state(Health::Healthy));
        assert_eq!(g(&agent), 1);
        assert!(folder.path().join("generations.malformed").exists());
    }
}
