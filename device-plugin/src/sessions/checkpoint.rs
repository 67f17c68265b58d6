//! What a container's processes were granted, on disk: so that a restarted agent charges them.
//!
//! The file is on tmpfs (`<run-dir>/sessions`): it is gone after a reboot, as the processes are.
//! A grant is written before the process learns of it; credit that comes back may be written
//! later, for charging too much is safe and corrected by the next write.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use bursar_protocol::units::Units;

use super::Process;
use super::recovery::FaultLog;
use crate::units::{Bytes, GpuUuid};

/// The file of one container.
#[derive(Debug)]
pub(super) struct SessionCheckpoint {
    path: PathBuf,
    /// What the file holds, where that is known: the same is not written again.
    written: Option<CheckpointContent>,
    /// The allocation has ended, and the file is removed for good.
    closed: bool,
}

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CheckpointContent {
    /// Living processes.
    pub(super) processes: Vec<ProcessEntry>,
    /// Pids of ended images that are still charged, with their units by account.
    pub(super) retired: Vec<(u32, Vec<u32>)>,
    /// What accounts were lowered to, in units, by account.
    #[serde(default)]
    pub(super) orders: Vec<Option<u32>>,
    /// The same of what ended images had exported, and others may hold.
    #[serde(default)]
    pub(super) kept: Vec<(u32, Vec<u32>)>,
    /// Kept leases that the container owns: each with its account and its units.
    #[serde(default)]
    pub(super) leases: Vec<(u64, usize, u32)>,
    /// The GPUs, in the order of the accounts: for whoever finds the record when the container is gone.
    #[serde(default)]
    pub(super) gpus: Vec<GpuUuid>,
    /// There may be more processes with memory than these: an earlier record was lost, and the driver was not
    /// asked yet who they are, or they have not said hello since.
    #[serde(default)]
    pub(super) incomplete: bool,
    /// P of the image that said hello last.
    #[serde(default)]
    pub(super) generation: u64,
    /// Poisoned images, and what is done about them.
    #[serde(default)]
    pub(super) poisonings: FaultLog,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessEntry {
    /// The process.
    pub(super) process: Process,
    /// Its image, from its hello.
    pub(super) image: u64,
    /// P, the number of that image.
    #[serde(default)]
    pub(super) generation: u64,
    /// Its grants in units, by account.
    pub(super) granted: Vec<u32>,
    /// What of its use it had exported when it last told.
    #[serde(default)]
    pub(super) exported: Vec<u32>,
}

impl CheckpointContent {
    /// The kept leases, each with its GPU and what it has.
    pub(super) fn leases_by_id(&self) -> BTreeMap<u64, (GpuUuid, Bytes)> {
        let leases = self.leases.iter();
        let on_gpu = |(lease, index, units): &(u64, usize, u32)| {
            let bytes = Bytes(Units(*units).min(Units::MAX).bytes());
            Some((*lease, (self.gpus.get(*index)?.clone(), bytes)))
        };
        leases.filter_map(on_gpu).collect()
    }

    /// What of each GPU processes had exported, living or dead.
    pub(super) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let of = |units: &[u32], index: usize| units.get(index).copied().unwrap_or_default();
        let exported = |index: usize| {
            let living = self.processes.iter();
            let living =
                living.map(|entry| of(&entry.exported, index).min(of(&entry.granted, index)));
            let dead = self.kept.iter().map(|(_, units)| of(units, index));
            let units = living.chain(dead).map(|units| Units(units).min(Units::MAX));
            Bytes(units.sum::<Units>().bytes())
        };
        let gpus = self.gpus.iter().enumerate();
        gpus.map(|(index, gpu)| (gpu.clone(), exported(index)))
            .collect()
    }
}

impl SessionCheckpoint {
    /// The record at `path`, whose folder is made.
    pub(super) fn open(path: PathBuf) -> io::Result<SessionCheckpoint> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        Ok(SessionCheckpoint {
            path,
            written: None,
            closed: false,
        })
    }

    /// Ends all writes: a task that is polled while the allocation ends may still want to write.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// What was written last; `None` when nothing was, or when it cannot be read.
    pub(super) fn read(&self) -> Option<CheckpointContent> {
        match std::fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text)
                .inspect_err(|error| tracing::warn!(path = %self.path.display(), %error, "session record is malformed"))
                .ok(),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %self.path.display(), %error, "session record is unreadable");
                }
                None
            }
        }
    }

    /// Replaces the content; nothing where it is the same.
    pub(super) fn write(&mut self, content: CheckpointContent) -> io::Result<()> {
        if self.written.as_ref() == Some(&content) {
            return Ok(());
        }
        self.written = None;
        let text = serde_json::to_vec(&content)?;
        let temporary = temporary_path(&self.path);
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, &self.path)?;
        self.written = Some(content);
        Ok(())
    }
}

/// Where a record is written before it replaces the one at `path`.
pub(super) fn temporary_path(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}
