//! Saves the grants of a container's processes, so that a restarted agent charges them.
//!
//! The file is on tmpfs (`<run-dir>/sessions`), and so is gone after a reboot, as the processes
//! are. The agent writes a grant before the process learns of it. Returned credit may be written
//! later: to charge too much is safe, and the next write corrects it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use bursar_host::checkpoint::set_aside;
use bursar_host::checkpoint::version::Version;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::units::Units;
use serde::{Deserialize, Serialize};

use super::Process;
use super::recovery::FaultLog;

/// The checkpoint file of one container.
#[derive(Debug)]
pub(super) struct SessionCheckpoint {
    path: PathBuf,
    /// The content of the file, where the agent knows it; equal content is not written again.
    written: Option<CheckpointContent>,
    /// Whether the allocation has ended and the file is removed.
    closed: bool,
}

/// The content of a checkpoint file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CheckpointContent {
    /// The version. An earlier version ignores fields that it does not know.
    pub(super) version: Version,
    /// The live processes.
    pub(super) processes: Vec<ProcessEntry>,
    /// The pids of exited images that are still charged, with their units by account.
    pub(super) exited: Vec<(u32, Vec<Units>)>,
    /// The quota overrides in units, by account.
    #[serde(default)]
    pub(super) overrides: Vec<Option<Units>>,
    /// The orphaned exports of exited images, by pid, with their units by account.
    #[serde(default)]
    pub(super) orphaned: Vec<(u32, Vec<Units>)>,
    /// The leases that the container owns, each with its account and units.
    #[serde(default)]
    pub(super) leases: Vec<(u64, usize, Units)>,
    /// The GPUs, in the order of the accounts, for a reader without the container's binding.
    #[serde(default)]
    pub(super) gpus: Vec<GpuUuid>,
    /// Whether further processes may have memory: an earlier checkpoint was lost, and the agent has
    /// not sampled since, or these processes have not said hello.
    #[serde(default)]
    pub(super) incomplete: bool,
    /// The process generation of the last image that said hello.
    #[serde(default)]
    pub(super) generation: u64,
    /// The poisoned images, and the decisions about them.
    #[serde(default)]
    pub(super) fault_log: FaultLog,
}

/// One process of the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessEntry {
    pub(super) process: Process,
    /// The image number from the hello.
    pub(super) image: u64,
    /// The process generation of that image.
    #[serde(default)]
    pub(super) generation: u64,
    /// The grants in units, by account.
    pub(super) granted: Vec<Units>,
    /// The units that the process last reported as exported, by account.
    #[serde(default)]
    pub(super) exported: Vec<Units>,
}

impl CheckpointContent {
    pub(super) fn leases_by_id(&self) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        let leases = self.leases.iter();
        let on_gpu = |(lease, index, units): &(u64, usize, Units)| {
            let gpu = self.gpus.get(*index)?.clone();
            Some((LeaseId(*lease), (gpu, Bytes(units.bytes()))))
        };
        leases.filter_map(on_gpu).collect()
    }

    /// The bytes of each GPU that processes have exported, live or exited.
    pub(super) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let of = |units: &[Units], index: usize| units.get(index).copied().unwrap_or_default();
        let exported = |index: usize| {
            let living = self.processes.iter();
            let living =
                living.map(|entry| of(&entry.exported, index).min(of(&entry.granted, index)));
            let dead = self.orphaned.iter().map(|(_, units)| of(units, index));
            Bytes(living.chain(dead).sum::<Units>().bytes())
        };
        let gpus = self.gpus.iter().enumerate();
        gpus.map(|(index, gpu)| (gpu.clone(), exported(index)))
            .collect()
    }
}

impl SessionCheckpoint {
    /// Opens the checkpoint at `path`, and creates its folder.
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

    /// Reads the last content; `None` when there is none, or when it cannot be read. A file that
    /// cannot be parsed is kept under another name, because the next write replaces it.
    pub(super) fn read(&self) -> Option<CheckpointContent> {
        match std::fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text)
                .inspect_err(|error| set_aside(&self.path, error))
                .ok(),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %self.path.display(), %error, "failed to read a session checkpoint");
                }
                None
            }
        }
    }

    /// Replaces the content, unless it is equal.
    pub(super) fn write(&mut self, content: CheckpointContent) -> io::Result<()> {
        if self.written.as_ref() == Some(&content) {
            return Ok(());
        }
        self.written = None;
        let text = serde_json::to_vec(&content)?;
        let temporary = temporary_path(&self.path);
        std::fs::write(&temporary, text)
            .and_then(|()| std::fs::rename(&temporary, &self.path))
            .inspect_err(|_| {
                // On a full disk the partial file would take the space that the next attempt needs.
                let _ = std::fs::remove_file(&temporary);
            })?;
        self.written = Some(content);
        Ok(())
    }
}

/// The path of the temporary file that a write renames to `path`.
pub(super) fn temporary_path(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}

#[cfg(test)]
mod tests {
    use bursar_host::clock::ClockReading;
    use bursar_protocol::testing::{assert_keeps_all, for_each_record};

    use super::*;
    use crate::ProcessImage;
    use crate::recovery::FaultSource;

    #[test]
    fn golden_session_checkpoint_is_read_without_a_loss() {
        let process = Process {
            pid: 4_711,
            start: 123_456,
        };
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let image = ProcessImage {
            process,
            generation: 3,
        };
        let source = FaultSource::Cuda {
            code: 719,
            can_reexec: true,
        };
        let now = ClockReading {
            wall: "2026-01-01T00:00:00Z".parse().unwrap(),
            moment: bursar_ledger::BootTime(90_000),
        };
        let mut fault_log = FaultLog::default();
        fault_log.record(image, &gpu, source, Some(process), now);
        let content = CheckpointContent {
            version: Version,
            processes: vec![ProcessEntry {
                process,
                image: 7,
                generation: 3,
                granted: vec![Units(512), Units(0)],
                exported: vec![Units(16), Units(0)],
            }],
            exited: vec![(42, vec![Units(8), Units(1)])],
            overrides: vec![Some(Units(1_024)), None],
            orphaned: vec![(43, vec![Units(4), Units(0)])],
            leases: vec![(9, 0, Units(256))],
            gpus: vec![gpu],
            incomplete: true,
            generation: 3,
            fault_log,
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0000000000000007.json");
        let mut file = SessionCheckpoint::open(path.clone()).unwrap();
        let today = || {
            file.write(content.clone()).unwrap();
            std::fs::read(&path).unwrap()
        };
        for_each_record("session.json", today, |golden| {
            std::fs::write(&path, golden).unwrap();
            let read = SessionCheckpoint::open(path.clone()).unwrap().read();
            let text = serde_json::from_slice(golden).unwrap();
            assert_keeps_all(&serde_json::to_value(read.unwrap()).unwrap(), &text);
        });
    }
}
