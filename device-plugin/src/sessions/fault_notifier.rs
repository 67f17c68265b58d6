//! How conversations reach who looks after poison.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

/// How long an image waits at most for the kernel's log to be read: a log that floods has no end.
const KMSG_TIMEOUT: Duration = Duration::from_secs(1);

/// Who waits until the kernel's log was read to its end.
pub type KmsgBarrier = oneshot::Sender<()>;

/// Images that wait at the same time without waiting for each other.
const MAX_BARRIERS: usize = 64;

#[derive(Clone, Default)]
pub(super) struct FaultNotifier {
    reports: Arc<Notify>,
    /// None while nobody reads the log.
    kmsg_reader: Arc<OnceLock<mpsc::Sender<KmsgBarrier>>>,
}

impl FaultNotifier {
    /// Told each time that a process reported poison.
    pub(super) fn reports(&self) -> Arc<Notify> {
        Arc::clone(&self.reports)
    }

    /// A process reported poison.
    pub(super) fn notify(&self) {
        self.reports.notify_one();
    }

    /// Who waits for the log. Of several readers the first is asked.
    pub(super) fn register_kmsg_reader(&self) -> mpsc::Receiver<KmsgBarrier> {
        let (reader, waits) = mpsc::channel(MAX_BARRIERS);
        let _ = self.kmsg_reader.set(reader);
        waits
    }

    /// Waits until what the kernel's log has by now was acted on.
    pub(super) async fn wait_kmsg_drained(&self) {
        let Some(reader) = self.kmsg_reader.get() else {
            return;
        };
        let (waits, read) = oneshot::channel();
        let asked = async {
            if reader.send(waits).await.is_ok() {
                // An error: it reads no more.
                let _ = read.await;
            }
        };
        if timeout(KMSG_TIMEOUT, asked).await.is_err() {
            tracing::warn!("the kernel's log is not read in time");
        }
    }
}
