//! Looks at each GPU once for all containers that wait for what the driver says of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::{MemorySampler, ProcessMemory, lock};
use crate::units::GpuUuid;

/// From the beginning of one look at a GPU to that of the next.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// The looks at a node's GPUs.
pub(super) struct SharedSampler {
    driver: Arc<dyn MemorySampler>,
    gpus: Mutex<BTreeMap<GpuUuid, Arc<tokio::sync::Mutex<LastSample>>>>,
}

/// The last look at a GPU. Its lock is held while there is one.
#[derive(Default)]
struct LastSample {
    begun: Option<Instant>,
    /// None where the driver could not tell, or nobody waited for it to.
    charges: Option<ProcessMemory>,
}

impl SharedSampler {
    pub(super) fn new(driver: Arc<dyn MemorySampler>) -> SharedSampler {
        SharedSampler {
            driver,
            gpus: Mutex::default(),
        }
    }

    /// The last look at a GPU. A new GPU removes those at GPUs that no task waits for, which loses the
    /// pause between two looks alone.
    fn last_sample(&self, gpu: &GpuUuid) -> Arc<tokio::sync::Mutex<LastSample>> {
        let mut gpus = lock(&self.gpus);
        if let Some(last) = gpus.get(gpu) {
            return Arc::clone(last);
        }
        gpus.retain(|_, last| Arc::strong_count(last) > 1);
        Arc::clone(gpus.entry(gpu.clone()).or_default())
    }

    /// What the driver charges on a GPU, by a look that begins after this was called; none where it cannot tell.
    pub(super) async fn sample_processes(&self, gpu: &GpuUuid) -> Option<ProcessMemory> {
        let asked = Instant::now();
        let of_gpu = self.last_sample(gpu);
        let mut last = of_gpu.lock().await;
        if last.begun < Some(asked) {
            if let Some(begun) = last.begun {
                tokio::time::sleep_until(begun + SAMPLE_INTERVAL).await;
            }
            *last = LastSample {
                begun: Some(Instant::now()),
                charges: None,
            };
            let (driver, gpu) = (Arc::clone(&self.driver), gpu.clone());
            let look = tokio::task::spawn_blocking(move || driver.sample(&gpu));
            let look = look.await.ok().flatten();
            last.charges = look.map(|look| look.charges);
        }
        last.charges.clone()
    }
}
