//! Notifies the fault task that a session reported a sticky CUDA error, and waits for the kernel
//! log.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

/// How long a hello waits for the kernel log at most: a flooded log has no end.
const KMSG_TIMEOUT: Duration = Duration::from_secs(1);

/// Released by the log reader once it has drained the kernel log.
pub type KmsgBarrier = oneshot::Sender<()>;

/// The hellos that can wait at the same time without waiting for each other.
const MAX_BARRIERS: usize = 64;

#[derive(Clone, Default)]
pub(super) struct FaultNotifier {
    reports: Arc<Notify>,
    /// `None` while no task reads the log.
    kmsg_reader: Arc<OnceLock<mpsc::Sender<KmsgBarrier>>>,
}

impl FaultNotifier {
    /// Notified each time that a process reports a sticky error.
    pub(super) fn reports(&self) -> Arc<Notify> {
        Arc::clone(&self.reports)
    }

    /// Notifies that a process has reported a sticky error.
    pub(super) fn notify(&self) {
        self.reports.notify_one();
    }

    /// Registers the reader of the kernel log. Only the first caller receives barriers.
    pub(super) fn register_kmsg_reader(&self) -> mpsc::Receiver<KmsgBarrier> {
        let (reader, waits) = mpsc::channel(MAX_BARRIERS);
        let _ = self.kmsg_reader.set(reader);
        waits
    }

    /// Waits until the reader has acted on everything that the kernel log has now.
    pub(super) async fn wait_kmsg_drained(&self) {
        let Some(reader) = self.kmsg_reader.get() else {
            return;
        };
        let (waits, read) = oneshot::channel();
        let asked = async {
            if reader.send(waits).await.is_ok() {
                // An error means that the reader has stopped.
                let _ = read.await;
            }
        };
        if timeout(KMSG_TIMEOUT, asked).await.is_err() {
            tracing::warn!("failed to drain the kernel log in time");
        }
    }
}
