//! How conversations reach who looks after poison.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

/// How long an image waits at most for the kernel's log to be read: a log that floods has no end.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// Who waits until the kernel's log was read to its end.
pub type Waits = oneshot::Sender<()>;

/// Images that wait at the same time without waiting for each other.
const MOST_WAIT: usize = 64;

#[derive(Clone, Default)]
pub(super) struct Bell {
    news: Arc<Notify>,
    /// None while nobody reads the log.
    reader: Arc<OnceLock<mpsc::Sender<Waits>>>,
}

impl Bell {
    /// Told each time that a process reported poison.
    pub(super) fn news(&self) -> Arc<Notify> {
        Arc::clone(&self.news)
    }

    /// A process reported poison.
    pub(super) fn ring(&self) {
        self.news.notify_one();
    }

    /// Who waits for the log. Of several readers the first is asked.
    pub(super) fn waits(&self) -> mpsc::Receiver<Waits> {
        let (reader, waits) = mpsc::channel(MOST_WAIT);
        let _ = self.reader.set(reader);
        waits
    }

    /// Waits until what the kernel's log has by now was acted on.
    pub(super) async fn log_read(&self) {
        let Some(reader) = self.reader.get() else {
            return;
        };
        let (waits, read) = oneshot::channel();
        let asked = async {
            if reader.send(waits).await.is_ok() {
                // An error: it reads no more.
                let _ = read.await;
            }
        };
        if timeout(LOG_TIMEOUT, asked).await.is_err() {
            tracing::warn!("the kernel's log is not read in time");
        }
    }
}
