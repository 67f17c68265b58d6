//! Lets grants of a GPU's memory wait for a moment.
//!
//! Every grant of device memory holds a permit of its GPU until the accounts have it. A pause waits
//! for these permits, and later grants wait for its end. The agent pauses grants to find out how
//! much memory no process may take.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bursar_ledger::units::GpuUuid;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use super::lock;

/// How long a pause waits for grants that have begun, while further ones wait.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A grant of a GPU's memory that is under way; ends when dropped.
#[derive(Debug)]
pub struct GrantPermit(
    #[expect(dead_code, reason = "held until it is dropped")] OwnedRwLockReadGuard<()>,
);

/// The time during which no memory of a GPU is granted; ends when dropped.
#[derive(Debug)]
pub(super) struct GrantPause(
    #[expect(dead_code, reason = "held until it is dropped")] OwnedRwLockWriteGuard<()>,
);

/// The grants of each GPU, and their pauses.
#[derive(Debug, Default)]
pub(super) struct Grants(Mutex<BTreeMap<GpuUuid, Arc<RwLock<()>>>>);

impl Grants {
    fn of(&self, gpu: &GpuUuid) -> Arc<RwLock<()>> {
        let mut gpus = lock(&self.0);
        if let Some(grants) = gpus.get(gpu) {
            return Arc::clone(grants);
        }
        // A new MIG instance has a new UUID. Permits and pauses hold a reference.
        gpus.retain(|_, grants| Arc::strong_count(grants) > 1);
        Arc::clone(gpus.entry(gpu.clone()).or_default())
    }

    /// Begins a grant of a GPU's memory, once no pause lasts.
    pub(super) async fn begin(&self, gpu: &GpuUuid) -> GrantPermit {
        GrantPermit(self.of(gpu).read_owned().await)
    }

    /// Begins grants of several GPUs, once no pause of any lasts. Meanwhile it has no permit, so
    /// that it delays no pause.
    pub(super) async fn begin_all(&self, gpus: &[GpuUuid]) -> Vec<GrantPermit> {
        let gpus: Vec<_> = gpus.iter().map(|gpu| self.of(gpu)).collect();
        'all: loop {
            let mut permits = Vec::new();
            for grants in &gpus {
                let Ok(permit) = Arc::clone(grants).try_read_owned() else {
                    permits.clear();
                    drop(grants.read().await);
                    continue 'all;
                };
                permits.push(GrantPermit(permit));
            }
            return permits;
        }
    }

    /// Pauses the grants of a GPU; `None` where those that have begun take too long.
    pub(super) async fn pause(&self, gpu: &GpuUuid) -> Option<GrantPause> {
        let paused = tokio::time::timeout(PAUSE_TIMEOUT, self.of(gpu).write_owned()).await;
        Some(GrantPause(paused.ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus() -> [GpuUuid; 2] {
        ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn pause_holds_only_later_grants_of_its_gpu() {
        let (grants, [gpu, other]) = (Arc::new(Grants::default()), gpus());
        let grant = grants.begin(&gpu).await;
        let waiting = tokio::spawn({
            let (grants, gpu) = (Arc::clone(&grants), gpu.clone());
            async move { grants.pause(&gpu).await }
        });
        tokio::task::yield_now().await;
        let later = grants.begin(&gpu);
        tokio::pin!(later);
        let brief = Duration::from_millis(500);
        assert!(tokio::time::timeout(brief, &mut later).await.is_err());
        drop(grants.begin(&other).await);
        drop(grant);
        let pause = waiting.await.unwrap();
        assert!(tokio::time::timeout(brief, &mut later).await.is_err());
        drop(pause);
        drop(later.await);
        assert_eq!(lock(&grants.0).len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn pause_begins_while_a_process_waits_for_another_gpu() {
        let (grants, [gpu, other]) = (Grants::default(), gpus());
        let paused = grants.pause(&other).await.unwrap();
        let both = [gpu.clone(), other];
        let waiting = grants.begin_all(&both);
        tokio::pin!(waiting);
        let brief = Duration::from_millis(500);
        assert!(tokio::time::timeout(brief, &mut waiting).await.is_err());
        let pause = grants.pause(&gpu).await.unwrap();
        drop(paused);
        assert!(tokio::time::timeout(brief, &mut waiting).await.is_err());
        drop(pause);
        assert_eq!(waiting.await.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn pause_gives_up_when_a_grant_does_not_end() {
        let (grants, [gpu, _]) = (Grants::default(), gpus());
        let _hung = grants.begin(&gpu).await;
        assert!(grants.pause(&gpu).await.is_none());
        drop(grants.begin(&gpu).await);
    }
}
