//! Samples each GPU once for all containers that wait for a sample.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bursar_gpu::memory_sample::{MemorySampler, ProcessMemory};
use bursar_ledger::units::GpuUuid;
use tokio::time::Instant;

use super::lock;

/// The time from the start of one sample of a GPU to the start of the next.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Samples a node's GPUs, one sample of each at a time.
pub(super) struct SharedSampler {
    driver: Arc<dyn MemorySampler>,
    gpus: Mutex<BTreeMap<GpuUuid, Arc<tokio::sync::Mutex<LastSample>>>>,
}

/// The last sample of a GPU. Its lock is held while the driver answers.
#[derive(Default)]
struct LastSample {
    started_at: Option<Instant>,
    /// `None` where the driver could not answer, or the waiting task was cancelled.
    charges: Option<ProcessMemory>,
}

impl SharedSampler {
    pub(super) fn new(driver: Arc<dyn MemorySampler>) -> SharedSampler {
        SharedSampler {
            driver,
            gpus: Mutex::default(),
        }
    }

    /// The last sample of a GPU. A new GPU removes the samples that no task waits for; only the
    /// interval between two samples is lost.
    fn last_sample(&self, gpu: &GpuUuid) -> Arc<tokio::sync::Mutex<LastSample>> {
        let mut gpus = lock(&self.gpus);
        if let Some(last) = gpus.get(gpu) {
            return Arc::clone(last);
        }
        gpus.retain(|_, last| Arc::strong_count(last) > 1);
        Arc::clone(gpus.entry(gpu.clone()).or_default())
    }

    /// The memory of a GPU's processes, from a sample that starts after this call; `None` where the
    /// driver cannot answer.
    pub(super) async fn sample_processes(&self, gpu: &GpuUuid) -> Option<ProcessMemory> {
        let called_at = Instant::now();
        let of_gpu = self.last_sample(gpu);
        let mut last = of_gpu.lock().await;
        if last.started_at < Some(called_at) {
            if let Some(started_at) = last.started_at {
                tokio::time::sleep_until(started_at + SAMPLE_INTERVAL).await;
            }
            *last = LastSample {
                started_at: Some(Instant::now()),
                charges: None,
            };
            let (driver, gpu) = (Arc::clone(&self.driver), gpu.clone());
            let sample = tokio::task::spawn_blocking(move || driver.sample(&gpu));
            let sample = sample.await.ok().flatten();
            last.charges = sample.map(|sample| sample.charges);
        }
        last.charges.clone()
    }
}
