//! The task of one allocation: accepts its container's processes, and settles the dead.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bursar_protocol::messages::{Message, RejectReason, Response};
use futures::future::join_all;
use tokio::task::JoinSet;

use super::closer::Closer;
use super::connection::{self, Conversation};
use super::connection_limit::{Seat, Seats};
use super::container::denials::ToldOfAll;
use super::container::{Container, Known};
use super::fault_notifier::Bell;
use super::rate_limit::{self, Pace};
use super::shared_samples::Looks;
use super::stream::{Listener, Stream};
use super::{MAX_PROCESSES, Membership, lock};
use crate::retained::handle::Desk;

/// How often the driver is asked about the dead, while there are any. A kill's memory is back
/// after about 0.1 s (F8 in docs/facts.md).
const SETTLE_EVERY: Duration = Duration::from_millis(100);

/// Connections beyond the processes that are known: reconnects, and peers before their hello.
const SPARE_CONNECTIONS: usize = 64;

/// How long to wait after a failed accept (out of descriptors, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that are accepted at once: all of a container's processes may start together.
const CONNECTION_BURST: u32 = (MAX_PROCESSES + SPARE_CONNECTIONS) as u32;

/// Messages of all processes of a container that are answered at once: two of each.
const MESSAGE_BURST: u32 = 2 * MAX_PROCESSES as u32;

/// What the task works with.
pub(super) struct Task {
    pub(super) container: Arc<Mutex<Container>>,
    pub(super) looks: Arc<Looks>,
    pub(super) membership: Arc<dyn Membership>,
    pub(super) seats: Seats,
    pub(super) bell: Bell,
    pub(super) desk: Option<Desk>,
    pub(super) closer: Arc<Closer>,
    pub(super) told: ToldOfAll,
}

impl Task {
    /// Runs until it is aborted.
    pub(super) async fn run(self, listener: Listener, known: Vec<Known>) {
        // Dropped with this future: its tasks end with it.
        let mut peers = JoinSet::new();
        for Known {
            process,
            image,
            ended,
        } in known
        {
            // Its death counts, seat or not.
            let seat = self.seats.take(peers.len());
            let mourn = connection::mourn(Arc::clone(&self.container), process, image, ended);
            peers.spawn(async move {
                mourn.await;
                drop(seat);
            });
        }
        // A GPU that hangs holds up this task only.
        let mut settler = JoinSet::new();
        settler.spawn(settle(
            Arc::clone(&self.container),
            Arc::clone(&self.looks),
            Arc::clone(&self.membership),
        ));
        let messages = Arc::new(Mutex::new(Pace::of_messages(MESSAGE_BURST)));
        let mut connections = Pace::of_messages(CONNECTION_BURST);
        loop {
            tokio::select! {
                accepted = self.accept(&listener) => match accepted {
                    Ok(stream) => {
                        let taken = peers.len() + self.closer.waiting();
                        let full = taken >= MAX_PROCESSES + SPARE_CONNECTIONS;
                        match self.seats.take(taken).filter(|_| !full) {
                            Some(seat) => {
                                peers.spawn(self.converse(stream, seat, Arc::clone(&messages)));
                            }
                            None => refuse(stream),
                        }
                        rate_limit::wait(connections.take(Instant::now())).await;
                    }
                    Err(error) => {
                        if let Some(untold) = self.told.due("accept", Instant::now()) {
                            tracing::warn!(%error, untold, "failed to accept a connection; it is tried again");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = peers.join_next(), if !peers.is_empty() => {}
            }
        }
    }

    /// The next connection, once few enough of those before it wait to be closed.
    async fn accept(&self, listener: &Listener) -> io::Result<Stream> {
        self.closer.room().await;
        listener.accept().await
    }

    /// One connection's task; its seat is free again when it ends.
    fn converse(
        &self,
        stream: Stream,
        seat: Seat,
        messages: Arc<Mutex<Pace>>,
    ) -> impl Future<Output = ()> + use<> {
        let conversation = Conversation::new(
            Arc::clone(&self.container),
            Arc::clone(&self.membership),
            messages,
            self.bell.clone(),
            self.desk.clone(),
            self.told.clone(),
        );
        async move {
            conversation.run(stream).await;
            drop(seat);
        }
    }
}

/// Says that there is no seat: a peer that gets no answer would wait for one.
fn refuse(stream: Stream) {
    let goodbye = Response::Rejected {
        reason: RejectReason::Busy,
    };
    // A new socket has room for it.
    stream.try_write(&goodbye.frame());
}

/// Asks the driver about every image that ended, and about strangers, for ever. While there is
/// nothing to ask or to write, a change alone wakes this task: a node has hundreds of them.
async fn settle(
    container: Arc<Mutex<Container>>,
    looks: Arc<Looks>,
    membership: Arc<dyn Membership>,
) {
    let mut every = tokio::time::interval(SETTLE_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (gpus, stirred) = {
        let container = lock(&container);
        (container.gpus(), container.stirred())
    };
    loop {
        every.tick().await;
        let (asked, is_recorded) = {
            let mut container = lock(&container);
            container.record_all(Instant::now());
            (container.questions(), container.is_recorded())
        };
        let Some(asked) = asked else {
            if is_recorded {
                stirred.notified().await;
            }
            continue;
        };
        let found = join_all(gpus.iter().map(|gpu| looks.charges(gpu))).await;
        if let Some(found) = found.into_iter().collect::<Option<Vec<_>>>() {
            lock(&container).settle(&asked, &found, membership.as_ref());
        }
    }
}
