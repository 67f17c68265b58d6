//! What a context takes of each GPU: measured by the agent with a process of its own, and
//! remembered for the boot.
//!
//! The driver does not tell. It is what NVML charges a process that has its first context and has
//! allocated nothing: the canary (`kept/scrub.rs`). No tenant has a part in it: what is charged for
//! a context is charged to every tenant of the GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::lock;
use crate::checkpoint::Checkpoint;
use crate::units::{Bytes, GpuUuid};

/// What a context is taken to need where the agent has measured none: a little less than on an H200
/// (F5 in docs/facts.md), so that a quota of 1 GiB is usable.
const UNMEASURED: Bytes = Bytes::mib(512);

/// The most that is believed of a context.
pub(crate) const LARGEST: Bytes = Bytes::gib(1);

/// What a context took when it was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Measured {
    /// The driver's version: another one's contexts are of another size.
    driver: String,
    bytes: Bytes,
}

impl Measured {
    fn is_plausible(&self) -> bool {
        self.bytes > Bytes::ZERO && self.bytes <= LARGEST
    }
}

/// The sizes on this node, kept in a file that a reboot takes away.
#[derive(Debug)]
pub(super) struct ContextSizes {
    file: Checkpoint,
    known: Mutex<BTreeMap<GpuUuid, Measured>>,
}

impl ContextSizes {
    /// The sizes that the file remembers; none where it cannot be read, for they can be measured
    /// again.
    pub(super) fn of(file: Checkpoint) -> ContextSizes {
        let mut known: BTreeMap<GpuUuid, Measured> = match file.load() {
            Ok(known) => known.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "context sizes are measured again");
                BTreeMap::new()
            }
        };
        known.retain(|_, measured| measured.is_plausible());
        let known = Mutex::new(known);
        ContextSizes { file, known }
    }

    /// What a context of `gpu` takes, as far as it is known.
    pub(super) fn of_gpu(&self, gpu: &GpuUuid) -> Bytes {
        let known = lock(&self.known);
        known.get(gpu).map_or(UNMEASURED, |measured| measured.bytes)
    }

    /// Whether a context of `gpu` was measured with this driver.
    pub(super) fn is_measured(&self, gpu: &GpuUuid, driver: &str) -> bool {
        let known = lock(&self.known);
        known
            .get(gpu)
            .is_some_and(|measured| measured.driver == driver)
    }

    /// Forgets the sizes of all other GPUs.
    pub(super) fn keep_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        lock(&self.known).retain(|gpu, _| gpus.contains(gpu));
    }

    /// From now on there is this driver: sizes of others count no more.
    pub(super) fn keep_only(&self, driver: &str) {
        lock(&self.known).retain(|_, measured| measured.driver == driver);
    }

    /// The agent saw a context of `gpu` take `bytes` with this driver.
    pub(super) fn measured(&self, gpu: &GpuUuid, driver: &str, bytes: Bytes) {
        let measured = Measured {
            driver: driver.to_owned(),
            bytes,
        };
        if !measured.is_plausible() {
            tracing::warn!(%gpu, bytes = bytes.0, "no size of a context");
            return;
        }
        tracing::info!(%gpu, bytes = bytes.0, "context measured");
        let mut known = lock(&self.known);
        known.insert(gpu.clone(), measured);
        if let Err(error) = self.file.save(&*known) {
            tracing::warn!(%error, "context sizes are not kept: the next agent measures again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVER: &str = "580.159.04";

    fn gpu() -> GpuUuid {
        "GPU-5e000000-0000-0000-0000-000000000001".parse().unwrap()
    }

    fn at(folder: &tempfile::TempDir) -> ContextSizes {
        ContextSizes::of(Checkpoint::new(folder.path().join("contexts.json")))
    }

    #[test]
    fn context_size_is_the_last_measurement_and_outlives_agents() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = at(&folder);
        assert_eq!(sizes.of_gpu(&gpu()), UNMEASURED);
        for mebibytes in [518, 300] {
            sizes.measured(&gpu(), DRIVER, Bytes::mib(mebibytes));
        }
        let next = at(&folder);
        for sizes in [&sizes, &next] {
            assert_eq!(sizes.of_gpu(&gpu()), Bytes::mib(300), "it may shrink");
            assert!(sizes.is_measured(&gpu(), DRIVER));
        }
        assert!(!next.is_measured(&gpu(), "590.1"));
        next.keep_only("590.1");
        assert_eq!(next.of_gpu(&gpu()), UNMEASURED);
    }

    #[test]
    fn context_size_is_none_that_no_context_takes() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = at(&folder);
        for bytes in [Bytes::ZERO, Bytes(LARGEST.0 + 1)] {
            sizes.measured(&gpu(), DRIVER, bytes);
        }
        assert_eq!(sizes.of_gpu(&gpu()), UNMEASURED);
        let other = Measured {
            driver: DRIVER.to_owned(),
            bytes: Bytes(u64::MAX),
        };
        let file = BTreeMap::from([(gpu(), other)]);
        sizes.file.save(&file).unwrap();
        assert_eq!(at(&folder).of_gpu(&gpu()), UNMEASURED);
    }

    #[test]
    fn context_sizes_of_an_older_agent_or_half_a_file_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.json");
        // As agents wrote it that believed tenants.
        let former = format!(r#"{{"{}":1067450368}}"#, gpu());
        for text in [former.as_str(), "half"] {
            std::fs::write(&path, text).unwrap();
            let sizes = at(&folder);
            assert_eq!(sizes.of_gpu(&gpu()), UNMEASURED);
            sizes.measured(&gpu(), DRIVER, Bytes::mib(518));
            assert_eq!(at(&folder).of_gpu(&gpu()), Bytes::mib(518));
        }
    }
}
