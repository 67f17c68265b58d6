//! The task of one allocation: accepts its container's processes, and settles the dead.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinSet;

use super::container::{Container, Known};
use super::conversation::{self, Conversation};
use super::{DriverCharges, MAX_PROCESSES, Membership, lock};
use crate::units::Bytes;

/// How often the driver is asked about the dead, while there are any. A kill's memory is back
/// after about 0.1 s (design F8).
const SETTLE_EVERY: Duration = Duration::from_millis(100);

/// Connections beyond the processes that are known: reconnects, and peers before their hello.
const SPARE_CONNECTIONS: usize = 64;

/// How long to wait after a failed accept (out of descriptors, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What the task works with.
pub(super) struct Task {
    pub(super) container: Arc<Mutex<Container>>,
    pub(super) charges: Arc<dyn DriverCharges>,
    pub(super) membership: Arc<dyn Membership>,
}

impl Task {
    /// Runs until it is aborted.
    pub(super) async fn run(self, listener: UnixListener, known: Vec<Known>) {
        // Dropped with this future: its tasks end with it.
        let mut peers = JoinSet::new();
        for Known {
            process,
            image,
            ended,
        } in known
        {
            peers.spawn(conversation::mourn(
                Arc::clone(&self.container),
                process,
                image,
                ended,
            ));
        }
        let mut settle = tokio::time::interval(SETTLE_EVERY);
        settle.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let room = peers.len() < MAX_PROCESSES + SPARE_CONNECTIONS;
            tokio::select! {
                accepted = listener.accept(), if room => match accepted {
                    Ok((stream, _)) => {
                        let conversation =
                            Conversation::new(Arc::clone(&self.container), Arc::clone(&self.membership));
                        peers.spawn(conversation.run(stream));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "accept failed");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = peers.join_next(), if !peers.is_empty() => {}
                _ = settle.tick() => self.settle().await,
            }
        }
    }

    /// Asks the driver about every image that ended.
    async fn settle(&self) {
        let retired = lock(&self.container).retired();
        for (pid, gpus) in retired {
            let charges = Arc::clone(&self.charges);
            let asked = tokio::task::spawn_blocking(move || {
                gpus.iter()
                    .map(|gpu| charges.charged(gpu, pid))
                    .collect::<Option<Vec<Bytes>>>()
            });
            if let Ok(Some(charged)) = asked.await {
                lock(&self.container).settle(pid, &charged);
            }
        }
    }
}
