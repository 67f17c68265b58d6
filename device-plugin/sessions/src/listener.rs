//! Accepts the processes of one allocation, and releases the bytes of exited ones.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bursar_host::clock;
use bursar_protocol::messages::{Message, RejectReason, Response};
use futures::future::join_all;
use tokio::task::JoinSet;

use super::closer::SocketCloser;
use super::connection::{self, Connection};
use super::connection_limit::{ConnectionLimit, ConnectionPermit};
use super::container::denials::SharedLogLimiter;
use super::container::{Container, RestoredProcess};
use super::fault_notifier::FaultNotifier;
use super::rate_limit::{self, RateLimiter};
use super::shared_samples::SharedSampler;
use super::stream::{Listener, PeerStream};
use super::{ContainerResolver, MAX_PROCESSES, lock};
use crate::lease_handle::LeaseHandle;

/// How often the agent samples the GPUs while exited processes are charged. The memory of a killed
/// process is free after about 0.1 s (F8 in docs/internals/facts.md).
const SETTLE_INTERVAL: Duration = Duration::from_millis(100);

/// Connections beyond those of a container's processes: processes that connect again, and peers
/// before their hello.
const SPARE_CONNECTIONS: usize = 64;

/// How long the agent waits after a failed accept, for example without free descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The connections that the agent accepts at once: all processes of a container may start together.
const CONNECTION_BURST: u32 = (MAX_PROCESSES + SPARE_CONNECTIONS) as u32;

/// The messages of all processes of a container that the agent answers at once: two each.
const MESSAGE_BURST: u32 = 2 * MAX_PROCESSES as u32;

/// The listener of one allocation's socket, with what the tasks of its connections share.
pub(super) struct ListenerTask {
    pub(super) container: Arc<Mutex<Container>>,
    pub(super) shared_sampler: Arc<SharedSampler>,
    pub(super) resolver: Arc<dyn ContainerResolver>,
    pub(super) connection_limit: ConnectionLimit,
    pub(super) fault_notifier: FaultNotifier,
    pub(super) lease_service: Option<LeaseHandle>,
    pub(super) closer: Arc<SocketCloser>,
    pub(super) log_limiter: SharedLogLimiter,
}

impl ListenerTask {
    /// Runs until the caller aborts the task.
    pub(super) async fn run(self, listener: Listener, restored: Vec<RestoredProcess>) {
        // The peers' tasks end with this future, which owns them.
        let mut peers = JoinSet::new();
        for RestoredProcess {
            process,
            image,
            superseded,
        } in restored
        {
            // The agent watches the process even without a permit, because its exit releases bytes.
            let permit = self.connection_limit.try_acquire(peers.len());
            let container = Arc::clone(&self.container);
            let watch = connection::watch_exit(container, process, image, superseded);
            peers.spawn(async move {
                watch.await;
                drop(permit);
            });
        }
        // A GPU that hangs blocks this task only.
        let mut settler = JoinSet::new();
        settler.spawn(settle_exited(
            Arc::clone(&self.container),
            Arc::clone(&self.shared_sampler),
            Arc::clone(&self.resolver),
        ));
        let messages = Arc::new(Mutex::new(RateLimiter::for_messages(MESSAGE_BURST)));
        // A connection costs as much as the least message.
        let mut connections = RateLimiter::for_messages(CONNECTION_BURST);
        loop {
            tokio::select! {
                accepted = self.accept(&listener) => match accepted {
                    Ok(stream) => {
                        let taken = peers.len() + self.closer.unclosed();
                        let full = taken >= MAX_PROCESSES + SPARE_CONNECTIONS;
                        match self.connection_limit.try_acquire(taken).filter(|_| !full) {
                            Some(permit) => {
                                peers.spawn(self.serve_connection(stream, permit, Arc::clone(&messages)));
                            }
                            None => reject_busy(stream),
                        }
                        rate_limit::wait(connections.charge_message(Instant::now())).await;
                    }
                    Err(error) => {
                        if let Some(suppressed) = self.log_limiter.due("accept", Instant::now()) {
                            tracing::warn!(%error, suppressed, "failed to accept a connection; the agent tries again");
                        }
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
                Some(_) = peers.join_next(), if !peers.is_empty() => {}
            }
        }
    }

    /// Accepts the next connection, once few enough earlier sockets wait to be closed.
    async fn accept(&self, listener: &Listener) -> io::Result<PeerStream> {
        self.closer.wait_for_room().await;
        listener.accept().await
    }

    /// Serves one connection, whose permit is free again when the task ends.
    fn serve_connection(
        &self,
        stream: PeerStream,
        permit: ConnectionPermit,
        messages: Arc<Mutex<RateLimiter>>,
    ) -> impl Future<Output = ()> + use<> {
        let connection = Connection::new(
            Arc::clone(&self.container),
            Arc::clone(&self.resolver),
            messages,
            self.fault_notifier.clone(),
            self.lease_service.clone(),
            self.log_limiter.clone(),
        );
        async move {
            connection.run(stream).await;
            drop(permit);
        }
    }
}

/// Rejects a peer when no permit is free; without an answer the peer would wait.
fn reject_busy(stream: PeerStream) {
    let rejection = Response::Rejected {
        reason: RejectReason::Busy,
    };
    // The buffer of a new socket has room for the answer.
    stream.try_write(&rejection.frame());
}

/// Samples the container's GPUs for exited processes and untracked ones, until the task is aborted.
/// With nothing to sample or write, only a change wakes the task, since a node has hundreds of
/// these tasks.
async fn settle_exited(
    container: Arc<Mutex<Container>>,
    shared_sampler: Arc<SharedSampler>,
    resolver: Arc<dyn ContainerResolver>,
) {
    let mut every = tokio::time::interval(SETTLE_INTERVAL);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (gpus, changed) = {
        let container = lock(&container);
        let gpus: Vec<_> = container.memory().gpus().cloned().collect();
        (gpus, container.recorder().change_notify())
    };
    loop {
        every.tick().await;
        let (query, is_recorded) = {
            let mut container = lock(&container);
            container.flush_changes(Instant::now());
            (
                container.reclaim_query(),
                container.recorder().is_recorded(),
            )
        };
        let Some(query) = query else {
            if is_recorded {
                changed.notified().await;
            }
            continue;
        };
        let samples = join_all(gpus.iter().map(|gpu| shared_sampler.sample_processes(gpu))).await;
        // Without a sample of every GPU all bytes stay charged until the next round.
        if let Some(samples) = samples.into_iter().collect::<Option<Vec<_>>>() {
            lock(&container).apply_samples(&query, &samples, resolver.as_ref(), clock::now());
        }
    }
}
