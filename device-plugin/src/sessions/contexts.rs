//! What a context takes of each GPU: measured once there is one, and remembered.
//!
//! The driver does not tell. It is what NVML charges a process that has made its first context and has
//! allocated nothing yet; of several measurements the largest counts. A tenant has a part in them, so
//! only what a context can plausibly take is believed. A program waits for its measurement, milliseconds
//! on a real GPU, so that each agent makes one of each GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedMutexGuard;

use super::lock;
use crate::units::{Bytes, GpuUuid};

/// What a context is taken to need where none was measured yet: a little less than on an H200
/// (design F5), so that a quota of 1 GiB is usable.
const UNMEASURED: Bytes = Bytes(512 << 20);

/// The most that is believed of a context.
const LARGEST: Bytes = Bytes::gib(1);

/// The sizes on this node, kept in a file.
#[derive(Debug)]
pub(super) struct ContextSizes {
    path: PathBuf,
    known: Mutex<BTreeMap<String, u64>>,
    /// The GPUs whose contexts this agent has measured.
    measured: Mutex<BTreeSet<GpuUuid>>,
    /// Whose turn it is to measure one of each GPU.
    turns: Mutex<BTreeMap<GpuUuid, Arc<tokio::sync::Mutex<()>>>>,
    /// The GPUs of which a size was told that is none: said once.
    doubted: Mutex<BTreeSet<GpuUuid>>,
}

impl ContextSizes {
    /// The sizes that the file at `path` remembers; none where it cannot be read, for they can be
    /// measured again.
    pub(super) fn at(path: PathBuf) -> ContextSizes {
        let known = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_else(|error| {
                tracing::warn!(path = %path.display(), %error, "context sizes are malformed");
                BTreeMap::new()
            }),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %error, "context sizes are unreadable");
                }
                BTreeMap::new()
            }
        };
        ContextSizes {
            path,
            known: Mutex::new(known),
            measured: Mutex::default(),
            turns: Mutex::default(),
            doubted: Mutex::default(),
        }
    }

    /// Whether a context of `gpu` should be measured.
    pub(super) fn want(&self, gpu: &GpuUuid) -> bool {
        !lock(&self.measured).contains(gpu)
    }

    /// Waits for the turn to measure a context of `gpu`; none where one was measured meanwhile. One is measured at a
    /// time: each takes a thread, for as long as the GPU does not answer.
    pub(super) async fn turn(&self, gpu: &GpuUuid) -> Option<OwnedMutexGuard<()>> {
        let turn = lock(&self.turns).entry(gpu.clone()).or_default().clone();
        let turn = turn.lock_owned().await;
        self.want(gpu).then_some(turn)
    }

    /// What a context of `gpu` takes, as far as it is known.
    pub(super) fn of(&self, gpu: &GpuUuid) -> Bytes {
        let known = lock(&self.known).get(gpu.as_str()).copied();
        known.map_or(UNMEASURED, |bytes| Bytes(bytes).min(LARGEST))
    }

    /// A context of `gpu` was seen to take `bytes`.
    pub(super) fn measured(&self, gpu: &GpuUuid, bytes: Bytes) {
        if bytes == Bytes::ZERO || bytes > LARGEST {
            if lock(&self.doubted).insert(gpu.clone()) {
                tracing::warn!(%gpu, bytes = bytes.0, "no size of a context");
            }
            return;
        }
        lock(&self.measured).insert(gpu.clone());
        let mut known = lock(&self.known);
        if known
            .get(gpu.as_str())
            .is_some_and(|before| *before >= bytes.0)
        {
            return;
        }
        known.insert(gpu.as_str().to_owned(), bytes.0);
        tracing::info!(%gpu, bytes = bytes.0, "context measured");
        if let Err(error) = self.write(&known) {
            tracing::warn!(path = %self.path.display(), %error, "context sizes are not kept");
        }
    }

    fn write(&self, known: &BTreeMap<String, u64>) -> io::Result<()> {
        let temporary = self.path.with_extension("tmp");
        std::fs::write(&temporary, serde_json::to_vec(known)?)?;
        std::fs::rename(&temporary, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-5e000000-0000-0000-0000-000000000001";

    fn gpu() -> GpuUuid {
        GPU.parse().unwrap()
    }

    #[test]
    fn the_largest_measurement_counts_and_outlives_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.json");
        let sizes = ContextSizes::at(path.clone());
        assert_eq!(sizes.of(&gpu()), UNMEASURED);
        for mebibytes in [300, 518, 517] {
            sizes.measured(&gpu(), Bytes(mebibytes << 20));
        }
        assert_eq!(sizes.of(&gpu()), Bytes(518 << 20));
        assert_eq!(ContextSizes::at(path).of(&gpu()), Bytes(518 << 20));
    }

    #[test]
    fn each_agent_measures_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.json");
        let sizes = ContextSizes::at(path.clone());
        sizes.measured(&gpu(), Bytes::ZERO);
        assert!(sizes.want(&gpu()), "that was no measurement");
        sizes.measured(&gpu(), Bytes(518 << 20));
        assert!(!sizes.want(&gpu()));
        assert!(
            ContextSizes::at(path).want(&gpu()),
            "another driver may be installed by now"
        );
    }

    #[test]
    fn what_no_context_takes_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.json");
        let sizes = ContextSizes::at(path.clone());
        sizes.measured(&gpu(), Bytes::ZERO);
        sizes.measured(&gpu(), Bytes(LARGEST.0 + 1));
        assert_eq!(sizes.of(&gpu()), UNMEASURED);
        std::fs::write(&path, format!("{{\"{GPU}\": 99999999999}}")).unwrap();
        assert_eq!(ContextSizes::at(path.clone()).of(&gpu()), LARGEST);
        std::fs::write(&path, "half").unwrap();
        assert_eq!(ContextSizes::at(path).of(&gpu()), UNMEASURED);
    }
}
