//! Executes the effects of the lease state machine: calls the provisioners and the fd store,
//! charges sessions, and replies to tenants.
//!
//! One task owns the lease table and never waits. Work that takes time runs in tasks that return a
//! [`Completion`]. Calls to the fd store are queued in the order of the effects.

mod drain;
mod keep_alive;
mod node;
mod requests;
mod scrub_checks;
mod store;
mod writers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::drain::DrainState;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::Refusal;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedResponse};
use bursar_sessions::lease_handle::{Command, Commands, LiveLeases, Reply};
use bursar_sessions::{ContainerResolver, Process, Sessions};
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::keep_alive::KeepAlive;
use self::requests::{CreateError, CreatedMemory};
use self::store::encode_record;
use super::fdstore_client::{Connection, FdStoreError, StoreEvent};
use super::lease_ids::LeaseIds;
use super::leases::{Effect, LeaseTable};
use super::status::{self, RetainedStatus};
use crate::tokens::seal::NodeKey;
use bursar_supervision::provisioners::{Program, Provisioners};
use bursar_supervision::runtimes;
use bursar_supervision::scrub_check::{DriverEpoch, ScrubCache, ScrubCheckResult};

/// The granularity of device memory of every NVIDIA GPU; sizes are rounded up to it.
const GRANULARITY: u64 = 2 << 20;

/// After freeing this much, the next create would wait for the driver's scrubbing (F6 in
/// docs/internals/facts.md).
const SCRUB_WAIT_THRESHOLD: Bytes = Bytes::gib(1);

/// The shortest interval between two publications, whose cost grows with the number of leases.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);

/// The lease service and what it works with.
pub struct LeaseService {
    /// The commands of tenants and of the node.
    pub commands: Commands,
    /// The events of the fd store; none if retained memory is disabled.
    pub store_events: Option<mpsc::UnboundedReceiver<StoreEvent>>,
    /// The most memory that each GPU lends; `None` is the whole GPU.
    pub per_gpu: Option<Bytes>,
    /// The sessions, which charge containers.
    pub sessions: Arc<Sessions>,
    /// Identifies processes.
    pub membership: Arc<dyn ContainerResolver>,
    /// Creates memory.
    pub provisioners: Arc<Provisioners>,
    /// The program that runs scrub checks.
    pub program: Program,
    /// The verdicts of scrub checks.
    pub scrub_cache: ScrubCache,
    /// Assigns lease ids.
    pub lease_ids: LeaseIds,
    /// The key that seals memory tokens.
    pub key: NodeKey,
    /// Publishes the live leases of each GPU.
    pub live_leases: watch::Sender<LiveLeases>,
    /// The GPUs to release.
    pub drain: watch::Receiver<DrainState>,
    /// Publishes the drained GPUs that this service has released.
    pub released_gpus: watch::Sender<BTreeSet<GpuUuid>>,
    /// Publishes the GPUs whose driver was proven to clear freed memory.
    pub scrubbed: watch::Sender<BTreeSet<GpuUuid>>,
    /// Publishes the state of retained memory.
    pub status: watch::Sender<RetainedStatus>,
}

/// The result of a task.
enum Completion {
    /// The creation of a lease ended.
    Created {
        lease: LeaseId,
        created: Result<CreatedMemory, CreateError>,
        reply: oneshot::Sender<Reply>,
    },
    /// The fd store refused a lease's descriptor.
    NotStored(LeaseId, Refusal),
    /// The fd store has closed a lease's descriptor.
    Dropped(LeaseId, GpuUuid, Bytes),
    /// A process has exited.
    ProcessEnded(Process),
    /// A scrub check ended.
    ScrubChecked(GpuUuid, DriverEpoch, ScrubCheckResult),
    /// The export keep-alive was created or closed, with the connection of this number.
    KeepAliveChanged(u64, KeepAlive),
    /// The process of a scrub check has exited.
    ScrubProcessEnded(GpuUuid),
    /// The task has no result.
    Nothing,
}

/// The state of the running service.
struct State {
    service: LeaseService,
    leases: LeaseTable,
    connection: Option<Connection>,
    jobs: JoinSet<Completion>,
    /// The tasks that wait for the exit of each writer.
    watched_writers: BTreeMap<Process, AbortHandle>,
    /// The tenants that wait until the fd store has closed a discarded lease.
    discarding: BTreeMap<LeaseId, Vec<oneshot::Sender<Reply>>>,
    /// The GPUs of the last reported node state.
    gpus: BTreeSet<GpuUuid>,
    /// GPUs with a scrub check whose process may exist.
    scrub_checks: BTreeSet<GpuUuid>,
    /// When the last scrub check of a GPU failed.
    failed_checks: BTreeMap<GpuUuid, Instant>,
    /// When the last measurement of a GPU's context failed or was implausible.
    unmeasured: BTreeMap<GpuUuid, Instant>,
    /// The driver's version, for which verdicts are valid.
    driver_version: String,
    /// The GPUs to release.
    drained: BTreeSet<GpuUuid>,
    keep_alive: KeepAlive,
    /// How often the connection to the fd store was lost.
    store_losses: u64,
}

impl LeaseService {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut state = State::new(self);
        let mut publish_ticks = tokio::time::interval(PUBLISH_INTERVAL);
        publish_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut runtimes = state.service.provisioners.runtimes();
        let mut is_news = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = publish_ticks.tick(), if is_news => {
                    state.publish();
                    is_news = false;
                    continue;
                }
                command = state.service.commands.recv() => match command {
                    Some(command) => if !state.handle_command(command) { continue },
                    None => break,
                },
                event = next_store_event(&mut state.service.store_events) => state.handle_store_event(event),
                Ok(()) = state.service.drain.changed() => state.apply_drain(),
                Ok(()) = runtimes.changed() => drop(runtimes.borrow_and_update()),
                Some(done) = state.jobs.join_next() => match done {
                    Ok(done) => state.handle_completion(done),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => warn!(%error, "a task of the lease service panicked"),
                },
            }
            // A writer may exit at any time, and the next open of its lease must not wait for a
            // publication.
            state.watch_writers();
            is_news = true;
        }
        stop.cancelled().await;
    }
}

/// Waits for the next event of the fd store; waits forever if retained memory is disabled.
async fn next_store_event(
    events: &mut Option<mpsc::UnboundedReceiver<StoreEvent>>,
) -> Option<StoreEvent> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

impl State {
    fn new(service: LeaseService) -> State {
        let driver = service.program.driver_version();
        service.sessions.set_driver_version(&driver);
        let mut state = State {
            service,
            leases: LeaseTable::default(),
            connection: None,
            jobs: JoinSet::new(),
            watched_writers: BTreeMap::new(),
            discarding: BTreeMap::new(),
            gpus: BTreeSet::new(),
            scrub_checks: BTreeSet::new(),
            failed_checks: BTreeMap::new(),
            unmeasured: BTreeMap::new(),
            driver_version: driver,
            drained: BTreeSet::new(),
            keep_alive: KeepAlive::None,
            store_losses: 0,
        };
        state.apply_drain();
        state
    }

    /// Returns whether the published state may have changed; token requests change nothing.
    fn handle_command(&mut self, command: Command) -> bool {
        match command {
            Command::Request {
                caller,
                request,
                reply,
            } => self.handle_request(caller, request, reply),
            Command::Token {
                caller,
                request,
                reply,
            } => {
                // The session may have ended.
                let _ = reply.send(self.handle_token_request(caller, request));
                return false;
            }
            Command::ProcessEnded(process) => self.process_ended(process),
            Command::Reconcile { node, reply } => {
                let update = self.reconcile(node);
                // The node's task may have exited.
                let _ = reply.send(update);
            }
            Command::Recorded(leases) => {
                for lease in leases {
                    let effect = self.leases.confirm_charged(lease);
                    self.apply_effects(effect.into_iter().collect());
                }
            }
        }
        true
    }

    fn handle_completion(&mut self, done: Completion) {
        match done {
            Completion::Created {
                lease,
                created,
                reply,
            } => self.finish_create(lease, created, reply),
            Completion::NotStored(lease, refusal) => self.end_unstored(lease, refusal),
            Completion::Dropped(lease, gpu, bytes) => {
                info!(%lease, "lease closed");
                self.leases.confirm_dropped(lease);
                for reply in self.discarding.remove(&lease).unwrap_or_default() {
                    let answer = RetainedResponse::Discarded;
                    // The session may have ended.
                    let _ = reply.send(Reply {
                        response: answer,
                        fd: None,
                    });
                }
                if bytes >= SCRUB_WAIT_THRESHOLD {
                    let provisioners = Arc::clone(&self.service.provisioners);
                    self.jobs.spawn(async move {
                        provisioners.await_scrub(&gpu, bytes).await;
                        Completion::Nothing
                    });
                }
            }
            Completion::ProcessEnded(process) => {
                self.watched_writers.remove(&process);
                self.process_ended(process);
            }
            Completion::ScrubChecked(gpu, epoch, result) => {
                self.finish_scrub_check(gpu, epoch, result)
            }
            Completion::KeepAliveChanged(connection, keep_alive) => {
                // The list of a later connection is newer than this result.
                let current = self.connection.as_ref().map(Connection::number);
                if current == Some(connection) {
                    self.keep_alive = keep_alive;
                    self.close_misplaced_keep_alive();
                }
            }
            Completion::ScrubProcessEnded(gpu) => drop(self.scrub_checks.remove(&gpu)),
            Completion::Nothing => {}
        }
    }

    fn process_ended(&mut self, process: Process) {
        let effects = self.leases.process_ended(process);
        self.apply_effects(effects);
    }

    /// Carries the effects out in order; returns the pending acknowledgements of the fd store.
    fn apply_effects(&mut self, effects: Vec<Effect>) -> Acks {
        if !effects.is_empty() {
            // The proof of freed memory must not count a lease as live while its descriptor is
            // being closed.
            self.publish_live_leases();
        }
        let mut acks = Acks::default();
        for effect in effects {
            match effect {
                Effect::Charge(lease, owner) => {
                    let sessions = &self.service.sessions;
                    if let Some((gpu, bytes)) = self.leases.extent(lease)
                        && sessions.release_lease(&owner, &gpu, lease, bytes)
                        && let Some(Effect::Drop(lease)) = self.leases.confirm_charged(lease)
                    {
                        self.close_descriptor(lease);
                    }
                }
                Effect::Drop(lease) => self.close_descriptor(lease),
                Effect::Update(lease, record) => match (&self.connection, encode_record(&record)) {
                    (Some(connection), Some(blob)) => {
                        acks.0.push(Box::pin(connection.update(lease, blob)))
                    }
                    // The fd store's own record counts on the next connection.
                    _ => acks
                        .0
                        .push(Box::pin(async { Err(FdStoreError::Disconnected) })),
                },
            }
        }
        acks
    }

    fn close_descriptor(&mut self, lease: LeaseId) {
        let Some(connection) = &self.connection else {
            return;
        };
        let (gpu, bytes) = self.leases.extent(lease).unzip();
        let closed = connection.close(lease);
        self.jobs.spawn(async move {
            match (closed.await, gpu, bytes) {
                (Ok(()), Some(gpu), Some(bytes)) => Completion::Dropped(lease, gpu, bytes),
                // The next connection repeats the call.
                _ => Completion::Nothing,
            }
        });
    }

    /// Publishes the live leases for the proof of freed memory.
    fn publish_live_leases(&self) {
        publish_changed(&self.service.live_leases, self.leases.live_leases());
    }

    /// Publishes the live leases, the released and the scrubbed GPUs, and the status.
    fn publish(&self) {
        self.publish_live_leases();
        publish_changed(&self.service.released_gpus, self.released_gpus());
        let status = status::build_status(
            self.service.store_events.is_some(),
            &self.leases,
            &self.service.scrub_cache,
            |gpu| self.driver_epoch(gpu),
            runtimes::reports(&self.service.provisioners.runtimes().borrow(), |gpu| {
                self.drained.contains(gpu)
            }),
        );
        let status = RetainedStatus {
            store_losses: self.store_losses,
            ..status
        };
        publish_changed(&self.service.scrubbed, status.scrubbed.clone());
        publish_changed(&self.service.status, status);
    }
}

/// Sends a value to the receivers if it differs from the last one.
fn publish_changed<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|before| {
        let changed = *before != value;
        *before = value;
        changed
    });
}

/// Calls to the fd store that wait for their acknowledgement.
#[derive(Default)]
struct Acks(Vec<BoxFuture<'static, Result<(), FdStoreError>>>);

impl Acks {
    async fn wait(self) -> Result<(), FdStoreError> {
        for acks in self.0 {
            acks.await?;
        }
        Ok(())
    }
}

/// Refuses a request.
fn reply_refused(reply: oneshot::Sender<Reply>, why: RetainedRefusal) {
    // The session may have ended.
    let _ = reply.send(Reply::refused(why));
}

#[cfg(test)]
mod tests;
