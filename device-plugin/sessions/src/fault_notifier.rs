//! Notifies the fault task that a session reported a sticky CUDA error, and waits for the kernel
//! log.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tracing::{info, warn};

/// How long a hello waits for the kernel log at most: a flooded log has no end.
const KMSG_TIMEOUT: Duration = Duration::from_secs(1);

/// Released by the log reader once it has drained the kernel log.
pub(crate) type KmsgBarrier = oneshot::Sender<()>;

/// The hellos that can wait at the same time without waiting for each other.
const MAX_BARRIERS: usize = 64;

#[derive(Clone, Default)]
pub(super) struct FaultNotifier {
    reports: Arc<Notify>,
    /// `None` while no task reads the log.
    kmsg_reader: Arc<OnceLock<mpsc::Sender<KmsgBarrier>>>,
    /// Whether the last hello that waited ran into [`KMSG_TIMEOUT`].
    is_kmsg_late: Arc<AtomicBool>,
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
        let drained = async {
            if reader.send(waits).await.is_ok() {
                // An error means that the reader has stopped.
                let _ = read.await;
            }
        };
        let is_late = timeout(KMSG_TIMEOUT, drained).await.is_err();
        match (self.set_kmsg_late(is_late), is_late) {
            (false, _) => {}
            (true, true) => warn!(
                timeout = ?KMSG_TIMEOUT,
                "failed to drain the kernel log in time; faults are attributed without its newest lines"
            ),
            (true, false) => info!("kernel log is drained in time again"),
        }
    }

    /// Records whether the log is late. True on a change, so that a crowd of hellos causes one log
    /// line.
    fn set_kmsg_late(&self, is_late: bool) -> bool {
        self.is_kmsg_late.swap(is_late, Ordering::Relaxed) != is_late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn late_log_is_one_change_for_all_waiting_images() {
        let notifier = FaultNotifier::default();
        let mut barriers = notifier.register_kmsg_reader();
        notifier.wait_kmsg_drained().await;
        assert!(
            !notifier.set_kmsg_late(true),
            "the first wait is the change"
        );
        notifier.wait_kmsg_drained().await;
        assert!(!notifier.set_kmsg_late(true), "the second wait is none");
        while barriers.try_recv().is_ok() {}
        let reads = async { barriers.recv().await.unwrap().send(()).unwrap() };
        tokio::join!(notifier.wait_kmsg_drained(), reads);
        assert!(
            !notifier.set_kmsg_late(false),
            "the read in time is a change"
        );
    }
}
