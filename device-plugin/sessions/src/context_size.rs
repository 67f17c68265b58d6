//! Remembers the size of a CUDA context on each GPU, which the agent measures with a process of its
//! own.
//!
//! The driver does not report the size. The scrub check measures it: the bytes that NVML charges a
//! process with one context and no allocation. Tenants cannot influence the size, which every
//! tenant of the GPU is charged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::units::{Bytes, GpuUuid};
use serde::{Deserialize, Serialize};

use super::lock;

/// The assumed size before a measurement: a little less than on an H200 (F5 in
/// docs/internals/facts.md), so that a quota of 1 GiB is usable.
const DEFAULT_CONTEXT_SIZE: Bytes = Bytes::mib(512);

/// The largest plausible size of a context.
pub(crate) const MAX_CONTEXT_SIZE: Bytes = Bytes::gib(1);

/// The measured size of a context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Measurement {
    /// The driver's version, since another version has contexts of another size.
    driver: String,
    bytes: Bytes,
}

impl Measurement {
    fn is_plausible(&self) -> bool {
        self.bytes > Bytes::ZERO && self.bytes <= MAX_CONTEXT_SIZE
    }
}

/// The sizes on this node, in a file that does not survive a reboot.
#[derive(Debug)]
pub(super) struct ContextSizes {
    file: Checkpoint,
    measurements: Mutex<BTreeMap<GpuUuid, Measurement>>,
}

impl ContextSizes {
    /// Loads the sizes from the file. An unreadable file gives none, since the agent can measure
    /// again.
    pub(super) fn load(file: Checkpoint) -> ContextSizes {
        let mut known: BTreeMap<GpuUuid, Measurement> = match file.load_or_set_aside() {
            Ok(known) => known.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "failed to load context sizes; the agent measures them again");
                BTreeMap::new()
            }
        };
        known.retain(|_, measured| measured.is_plausible());
        let known = Mutex::new(known);
        ContextSizes {
            file,
            measurements: known,
        }
    }

    /// The size of a context of `gpu`, or the assumed one.
    pub(super) fn size_on(&self, gpu: &GpuUuid) -> Bytes {
        let known = lock(&self.measurements);
        known
            .get(gpu)
            .map_or(DEFAULT_CONTEXT_SIZE, |measured| measured.bytes)
    }

    /// Whether the agent has measured a context of `gpu` with this driver.
    pub(super) fn is_measured(&self, gpu: &GpuUuid, driver: &str) -> bool {
        let known = lock(&self.measurements);
        known
            .get(gpu)
            .is_some_and(|measured| measured.driver == driver)
    }

    /// Removes the sizes of all other GPUs.
    pub(super) fn retain_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        lock(&self.measurements).retain(|gpu, _| gpus.contains(gpu));
    }

    /// Removes the sizes that were measured with another version of the driver.
    pub(super) fn retain_driver(&self, driver: &str) {
        lock(&self.measurements).retain(|_, measured| measured.driver == driver);
    }

    /// Records that a context of `gpu` takes `bytes` with this driver. Returns whether the size is
    /// plausible.
    pub(super) fn record(&self, gpu: &GpuUuid, driver: &str, bytes: Bytes) -> bool {
        let measured = Measurement {
            driver: driver.to_owned(),
            bytes,
        };
        if !measured.is_plausible() {
            tracing::warn!(%gpu, bytes = bytes.0, "ignored an implausible context size");
            return false;
        }
        tracing::info!(%gpu, bytes = bytes.0, "context measured");
        let mut known = lock(&self.measurements);
        known.insert(gpu.clone(), measured);
        if let Err(error) = self.file.save(&*known) {
            tracing::warn!(%error, "failed to save context sizes; the next agent measures them again");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVER: &str = "580.159.04";

    fn gpu() -> GpuUuid {
        "GPU-5e000000-0000-0000-0000-000000000001".parse().unwrap()
    }

    fn load_from(folder: &tempfile::TempDir) -> ContextSizes {
        ContextSizes::load(Checkpoint::new(folder.path().join("contexts.json")))
    }

    #[test]
    fn context_size_is_the_last_measurement_and_outlives_agents() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = load_from(&folder);
        assert_eq!(sizes.size_on(&gpu()), DEFAULT_CONTEXT_SIZE);
        for mebibytes in [518, 300] {
            assert!(sizes.record(&gpu(), DRIVER, Bytes::mib(mebibytes)));
        }
        let next = load_from(&folder);
        for sizes in [&sizes, &next] {
            assert_eq!(sizes.size_on(&gpu()), Bytes::mib(300), "it may shrink");
            assert!(sizes.is_measured(&gpu(), DRIVER));
        }
        assert!(!next.is_measured(&gpu(), "590.1"));
        next.retain_driver("590.1");
        assert_eq!(next.size_on(&gpu()), DEFAULT_CONTEXT_SIZE);
    }

    #[test]
    fn context_sizes_are_those_of_the_nodes_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = load_from(&folder);
        for number in 0..1_000 {
            let instance: GpuUuid = format!("MIG-{number}").parse().unwrap();
            sizes.record(&instance, DRIVER, Bytes::mib(300));
            sizes.retain_gpus(&[instance].into());
        }
        assert_eq!(lock(&sizes.measurements).len(), 1);
        assert!(lock(&load_from(&folder).measurements).len() <= 2);
    }

    #[test]
    fn implausible_context_size_is_not_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = load_from(&folder);
        for bytes in [Bytes::ZERO, Bytes(MAX_CONTEXT_SIZE.0 + 1)] {
            assert!(!sizes.record(&gpu(), DRIVER, bytes));
        }
        assert_eq!(sizes.size_on(&gpu()), DEFAULT_CONTEXT_SIZE);
        let other = Measurement {
            driver: DRIVER.to_owned(),
            bytes: Bytes(u64::MAX),
        };
        let file = BTreeMap::from([(gpu(), other)]);
        sizes.file.save(&file).unwrap();
        assert_eq!(load_from(&folder).size_on(&gpu()), DEFAULT_CONTEXT_SIZE);
    }

    #[test]
    fn golden_context_sizes_are_read() {
        let measurement = Measurement {
            driver: DRIVER.to_owned(),
            bytes: Bytes::mib(518),
        };
        let sizes = BTreeMap::from([(gpu(), measurement)]);
        bursar_host::testing::assert_golden_checkpoint("contexts.json", &sizes);
    }

    #[test]
    fn context_sizes_are_unmeasured_when_the_file_is_malformed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.json");
        // The format of older agents, which trusted sizes from tenants.
        let former = format!(r#"{{"{}":1067450368}}"#, gpu());
        for (text, name) in [(former.as_str(), "unread"), ("half", "unread-2")] {
            std::fs::write(&path, text).unwrap();
            let sizes = load_from(&folder);
            assert_eq!(sizes.size_on(&gpu()), DEFAULT_CONTEXT_SIZE);
            sizes.record(&gpu(), DRIVER, Bytes::mib(518));
            let kept = std::fs::read_to_string(path.with_extension(name));
            assert_eq!(kept.unwrap(), text);
            assert_eq!(load_from(&folder).size_on(&gpu()), Bytes::mib(518));
        }
    }
}
