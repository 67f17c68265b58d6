//! Reads a file on one blocking thread, however many callers wait while its disk hangs.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

/// The time for which a caller waits, for the reads before its own included.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// The one read that has not ended; clones share it.
#[derive(Debug)]
pub struct SharedRead<T>(Arc<Mutex<Option<JoinHandle<T>>>>);

impl<T> Clone for SharedRead<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for SharedRead<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + 'static> SharedRead<T> {
    /// The result of `read`, which begins after this call. None where there is none within
    /// [`READ_TIMEOUT`].
    pub(crate) async fn run(&self, read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        timeout(READ_TIMEOUT, self.run_alone(read)).await.ok()
    }

    async fn run_alone(&self, read: impl FnOnce() -> T + Send + 'static) -> T {
        let mut running = self.0.lock().await;
        // A read whose caller has gone began before this call, so its result may be too old.
        if let Some(before) = running.as_mut() {
            let _ = before.await;
        }
        let ended = running.insert(spawn_blocking(read)).await;
        *running = None;
        match ended {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn callers_share_one_thread_while_a_read_hangs() {
        let reads = SharedRead::default();
        let (release, held) = channel::<()>();
        let hung = reads.run(move || held.recv().is_ok());
        let (hung, second, third) = tokio::join!(hung, reads.run(|| true), reads.run(|| true));
        assert_eq!((hung, second, third), (None, None, None));
        drop(release);
        assert_eq!(reads.run(|| true).await, Some(true));
    }
}
