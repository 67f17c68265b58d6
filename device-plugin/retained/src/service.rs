//! Executes the effects of the lease state machine: calls the provisioners and the fd store,
//! charges sessions, and replies to tenants.
//!
//! One task owns the lease table and never waits. Work that takes time runs in tasks that return a
//! [`Completion`]. Calls to the fd store are queued in the order of the effects.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::drain::DrainState;
use bursar_host::clock;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};
use bursar_protocol::messages::Account;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use bursar_sessions::lease_handle::{
    Caller, Command, Commands, LedgerUpdate, LiveLeases, NodeView, Reply,
};
use bursar_sessions::pidfd::ProcessExit;
use bursar_sessions::{ContainerResolver, Process, Sessions};
use futures::future::BoxFuture;
use rustix::io::Errno;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::fdstore_client::{Connection, FdStoreError, StoreEvent};
use super::lease_ids::LeaseIds;
use super::leases::{
    Content, Effect, LeaseRecord, LeaseTable, OpenRequest, Opened, StoredRecord,
    WRITE_TOKEN_LIFETIME,
};
use super::provisioners::{Program, ProvisionerError, Provisioners};
use super::scrub_check::{self, DriverEpoch, ScrubCache, ScrubCheckResult, ScrubProcess, Verdict};
use super::status::{self, RetainedStatus};
use crate::tokens::TokenAuthority;
use crate::tokens::seal::NodeKey;

/// The granularity of device memory of every NVIDIA GPU; sizes are rounded up to it.
const GRANULARITY: u64 = 2 << 20;

/// The size of the export keep-alive.
const KEEP_ALIVE_BYTES: Bytes = Bytes(GRANULARITY);

/// After freeing this much, the next create would wait for the driver's scrubbing (F6 in
/// docs/facts.md).
const SCRUB_WAIT_THRESHOLD: Bytes = Bytes::gib(1);

/// The delay between two scrub checks of a GPU without a verdict.
const SCRUB_CHECK_RETRY: Duration = Duration::from_secs(60);

/// The delay between two measurements of a context, when NVML does not report memory of processes.
const MEASURE_RETRY: Duration = Duration::from_secs(3600);

/// The delay between two attempts to watch a process.
const WATCH_RETRY: Duration = Duration::from_secs(1);

/// The shortest interval between two publications, whose cost grows with the number of leases.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);

/// The lease service and what it works with.
pub struct LeaseService {
    /// The commands of tenants and of the node.
    pub commands: Commands,
    /// The events of the fd store; none if retained memory is disabled.
    pub store_events: Option<mpsc::UnboundedReceiver<StoreEvent>>,
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
    /// Publishes the state of retained memory.
    pub status: watch::Sender<RetainedStatus>,
}

/// The result of a task.
enum Completion {
    /// The creation of a lease ended.
    Created {
        lease: LeaseId,
        /// The descriptor for the tenant.
        created: Result<OwnedFd, CreateError>,
        reply: oneshot::Sender<Reply>,
    },
    /// The fd store has closed a lease's descriptor.
    Dropped(LeaseId, GpuUuid, Bytes),
    /// A process has exited.
    ProcessEnded(Process),
    /// A scrub check ended.
    ScrubChecked(GpuUuid, DriverEpoch, ScrubCheckResult),
    /// The creation of the export keep-alive ended; true if it succeeded.
    KeepAliveCreated(GpuUuid, bool),
    /// The fd store has closed the export keep-alive.
    KeepAliveClosed,
    /// A GPU may be checked again.
    ScrubCheckAllowed(GpuUuid),
    /// The task has no result.
    Nothing,
}

/// Why a lease was not created.
enum CreateError {
    /// No memory exists.
    NotCreated(RetainedRefusal),
    /// The memory may exist.
    Unknown,
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
    /// GPUs with a running scrub check, or one that failed a short time ago.
    scrub_checks: BTreeSet<GpuUuid>,
    /// When the last measurement of a GPU's context failed.
    unmeasured: BTreeMap<GpuUuid, Instant>,
    /// The driver's version, for which verdicts are valid.
    driver_version: String,
    /// The GPUs to release.
    drained: BTreeSet<GpuUuid>,
    keep_alive: KeepAlive,
}

/// A descriptor that the fd store keeps open, because exports are fast while one exists.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeepAlive {
    None,
    Creating(GpuUuid),
    /// The fd store has it, for a GPU that was not drained at its creation.
    Stored,
    Closing,
}

impl LeaseService {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let driver = self.program.driver_version();
        self.sessions.set_driver_version(&driver);
        let mut state = State {
            service: self,
            leases: LeaseTable::default(),
            connection: None,
            jobs: JoinSet::new(),
            watched_writers: BTreeMap::new(),
            discarding: BTreeMap::new(),
            gpus: BTreeSet::new(),
            scrub_checks: BTreeSet::new(),
            unmeasured: BTreeMap::new(),
            driver_version: driver,
            drained: BTreeSet::new(),
            keep_alive: KeepAlive::None,
        };
        state.apply_drain();
        let mut publish_ticks = tokio::time::interval(PUBLISH_INTERVAL);
        publish_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
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

    fn handle_request(
        &mut self,
        caller: Caller,
        request: RetainedRequest,
        reply: oneshot::Sender<Reply>,
    ) {
        match request {
            RetainedRequest::Open {
                version: _,
                image,
                account,
                name,
                key,
                bytes,
            } => {
                let Some(gpu) = account_gpu(&account) else {
                    return reply_refused(reply, RetainedRefusal::Missing);
                };
                let Some(bytes) = bytes.checked_next_multiple_of(GRANULARITY) else {
                    return reply_refused(reply, RetainedRefusal::Quota { free: 0 });
                };
                let open = OpenRequest {
                    gpu,
                    name: name.as_str().to_owned(),
                    key,
                    bytes: Bytes(bytes),
                    image,
                    token: rand::random(),
                };
                self.open(caller, open, reply);
            }
            RetainedRequest::Commit {
                version: _,
                lease,
                token,
                checksum,
            } => {
                let lease = LeaseId(lease);
                let now = clock::now();
                let committed = self.leases.commit(caller, lease, token, checksum, now);
                match committed {
                    Ok(effects) => {
                        info!(%lease, allocation = %caller.allocation, "lease committed");
                        let acks = self.apply_effects(effects);
                        self.reply_after_acks(acks, RetainedResponse::Committed, reply);
                    }
                    Err(why) => reply_refused(reply, why),
                }
            }
            RetainedRequest::Discard { version: _, lease } => {
                let lease = LeaseId(lease);
                match self.leases.discard(caller, lease) {
                    Ok(effects) => {
                        info!(%lease, allocation = %caller.allocation, "lease discarded");
                        let ends = self.leases.get(lease).is_none();
                        if ends {
                            self.discarding.entry(lease).or_default().push(reply);
                            self.apply_effects(effects);
                        } else {
                            let acks = self.apply_effects(effects);
                            self.reply_after_acks(acks, RetainedResponse::Discarded, reply);
                        }
                    }
                    Err(why) => reply_refused(reply, why),
                }
            }
        }
    }

    fn handle_token_request(&self, caller: Caller, request: TokenRequest) -> TokenResponse {
        let authority = TokenAuthority {
            key: &self.service.key,
            leases: &self.leases,
            images: |allocation: &_| self.service.sessions.process_images(allocation),
        };
        let answer = match request {
            TokenRequest::Seal {
                version: _,
                account,
                lease,
                block,
            } => account_gpu(&account)
                .ok_or(TokenRefusal::Unknown)
                .and_then(|gpu| authority.seal(caller, &gpu, LeaseId(lease), block))
                .map(TokenResponse::Sealed),
            TokenRequest::Redeem { version: _, token } => authority
                .redeem(caller, &token)
                .map(TokenResponse::Redeemed),
        };
        answer.unwrap_or_else(TokenResponse::Refused)
    }

    fn open(&mut self, caller: Caller, open: OpenRequest, reply: oneshot::Sender<Reply>) {
        if self.service.store_events.is_none() {
            return reply_refused(reply, RetainedRefusal::Off);
        }
        let gpu = open.gpu.clone();
        let (opened, effects) = self.leases.open(caller, open, clock::now());
        let acks = self.apply_effects(effects);
        match opened {
            Err(why) => reply_refused(reply, why),
            Ok(Opened::Read(lease) | Opened::Write(lease)) => {
                self.fetch_and_reply(lease, acks, reply)
            }
            Ok(Opened::Create(record)) => match self.connection_for_create(&gpu) {
                Ok(connection) => self.create(*record, connection, reply),
                Err(why) => reply_refused(reply, why),
            },
        }
    }

    /// The connection with which a lease may be created on a GPU.
    fn connection_for_create(&self, gpu: &GpuUuid) -> Result<Connection, RetainedRefusal> {
        match self.service.scrub_cache.get(gpu, &self.driver_epoch(gpu)) {
            Some(Verdict::Scrubbed) => self.connection.clone().ok_or(RetainedRefusal::Unavailable),
            Some(Verdict::NotScrubbed | Verdict::Unknown(_)) => Err(RetainedRefusal::NotScrubbed),
            None => Err(RetainedRefusal::Unavailable),
        }
    }

    /// Charges the owner, then starts the creation.
    fn create(
        &mut self,
        record: LeaseRecord,
        connection: Connection,
        reply: oneshot::Sender<Reply>,
    ) {
        let (gpu, bytes) = (record.title.gpu.clone(), record.bytes);
        let Some(blob) = encode_record(&record) else {
            return reply_refused(reply, RetainedRefusal::TooMany);
        };
        let lease = self.service.lease_ids.assign();
        let sessions = &self.service.sessions;
        if let Err(Bytes(free)) = sessions.charge_lease(&record.owner, &gpu, lease, bytes) {
            return reply_refused(reply, RetainedRefusal::Quota { free });
        }
        self.leases.begin_create(lease, record);
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let created = match create_memory(&provisioners, &gpu, bytes).await {
                Ok(fd) => store_memory(&connection, lease, blob, fd).await,
                Err(why) => Err(why),
            };
            Completion::Created {
                lease,
                created,
                reply,
            }
        });
    }

    /// Replies with a lease's descriptor and current state.
    fn fetch_and_reply(&mut self, lease: LeaseId, acks: Acks, reply: oneshot::Sender<Reply>) {
        let (Some(connection), Some(record)) = (&self.connection, self.leases.get(lease)) else {
            return reply_refused(reply, RetainedRefusal::Unavailable);
        };
        let Some(answer) = answer(lease, record) else {
            return reply_refused(reply, RetainedRefusal::Missing);
        };
        let fetched = connection.get(lease);
        self.jobs.spawn(async move {
            let acks = acks.wait().await;
            let _ = match acks.and(fetched.await) {
                Ok(fd) => reply.send(Reply {
                    response: answer,
                    fd: Some(fd),
                }),
                Err(_) => reply.send(Reply::refused(RetainedRefusal::Unavailable)),
            };
            Completion::Nothing
        });
    }

    /// Replies once the fd store has acknowledged the calls.
    fn reply_after_acks(
        &mut self,
        acks: Acks,
        answer: RetainedResponse,
        reply: oneshot::Sender<Reply>,
    ) {
        self.jobs.spawn(async move {
            let _ = reply.send(match acks.wait().await {
                Ok(()) => Reply {
                    response: answer,
                    fd: None,
                },
                Err(_) => Reply::refused(RetainedRefusal::Unavailable),
            });
            Completion::Nothing
        });
    }

    fn handle_completion(&mut self, done: Completion) {
        match done {
            Completion::Created {
                lease,
                created,
                reply,
            } => self.finish_create(lease, created, reply),
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
            // The verdict may be of a driver that is replaced once the GPU is released.
            Completion::ScrubChecked(gpu, ..) if self.drained.contains(&gpu) => {
                self.scrub_checks.remove(&gpu);
            }
            Completion::ScrubChecked(gpu, with, result) => {
                self.record_scrub_check(gpu, with, result)
            }
            Completion::KeepAliveCreated(gpu, created) => {
                // After a failure the next tick of the node tries again.
                self.keep_alive = if created {
                    KeepAlive::Stored
                } else {
                    KeepAlive::None
                };
                if self.drained.contains(&gpu) {
                    self.close_keep_alive();
                }
            }
            Completion::KeepAliveClosed => self.keep_alive = KeepAlive::None,
            Completion::ScrubCheckAllowed(gpu) => drop(self.scrub_checks.remove(&gpu)),
            Completion::Nothing => {}
        }
    }

    fn finish_create(
        &mut self,
        lease: LeaseId,
        created: Result<OwnedFd, CreateError>,
        reply: oneshot::Sender<Reply>,
    ) {
        match created {
            Ok(fd) => {
                let (record, effects) = self.leases.finish_create(lease);
                let answer = record.and_then(|record| answer(lease, record));
                let acks = reply.send(match answer {
                    Some(answer) => Reply {
                        response: answer,
                        fd: Some(fd),
                    },
                    None => Reply::refused(RetainedRefusal::Fenced),
                });
                info!(%lease, "lease created");
                self.apply_effects(effects);
                if acks.is_err() {
                    // The requester timed out, so no process would ever write or discard this
                    // lease.
                    let effects = self.leases.release_uncertain(lease);
                    self.apply_effects(effects);
                }
            }
            Err(CreateError::NotCreated(why)) => {
                if let Some(owner) = self.leases.abort_create(lease) {
                    self.service.sessions.refund_lease(&owner, lease);
                }
                reply_refused(reply, why);
            }
            Err(CreateError::Unknown) => {
                let effects = self.leases.release_uncertain(lease);
                self.apply_effects(effects);
                reply_refused(reply, RetainedRefusal::Unavailable);
            }
        }
    }

    fn process_ended(&mut self, process: Process) {
        let effects = self.leases.process_ended(process);
        self.apply_effects(effects);
    }

    fn reconcile(&mut self, node: NodeView) -> LedgerUpdate {
        let gpus: Vec<GpuUuid> = node.generations.keys().cloned().collect();
        self.retain_gpus(node.free.keys().cloned().collect());
        let late = self.leases.expire_writers(clock::now());
        self.apply_effects(late);
        if self.leases.is_store_connected() {
            self.reconcile_charges();
        }
        let charged = self.service.sessions.all_charged_leases();
        let (update, effects) = self.leases.reconcile(node, &charged);
        if self.leases.is_store_connected() {
            // Containers that took leases over are charged for them now.
            self.reconcile_charges();
        }
        self.apply_effects(effects);
        let spared = gpus.into_iter().filter(|gpu| !self.drained.contains(gpu));
        let spared: Vec<GpuUuid> = spared.collect();
        spared
            .into_iter()
            .for_each(|gpu| self.ensure_scrub_checked(gpu));
        update
    }

    /// Forgets GPUs that have left the node: a new MIG instance has a new UUID. An empty list means
    /// that NVML has not answered.
    fn retain_gpus(&mut self, gpus: BTreeSet<GpuUuid>) {
        if gpus.is_empty() || gpus == self.gpus {
            return;
        }
        self.service.provisioners.retain_gpus(&gpus);
        self.service.scrub_cache.retain_gpus(&gpus);
        self.service.sessions.retain_gpus(&gpus);
        self.unmeasured.retain(|gpu, _| gpus.contains(gpu));
        self.gpus = gpus;
    }

    fn record_scrub_check(&mut self, gpu: GpuUuid, with: DriverEpoch, result: ScrubCheckResult) {
        let ScrubCheckResult {
            verdict,
            context,
            process,
        } = result;
        match context {
            Some(bytes) => {
                let sessions = &self.service.sessions;
                sessions.record_context_size(&gpu, &with.driver, bytes);
            }
            None => drop(self.unmeasured.insert(gpu.clone(), Instant::now())),
        }
        if matches!(verdict, Verdict::Unknown(_)) {
            self.allow_scrub_check_later(gpu.clone(), process);
        } else {
            self.scrub_checks.remove(&gpu);
        }
        self.service.scrub_cache.record(gpu, with, verdict);
    }

    /// Charges each container for the leases that it owns, and for no other.
    fn reconcile_charges(&mut self) {
        let sessions = &self.service.sessions;
        let charged = sessions.all_charged_leases();
        let owned = self.leases.lease_owners();
        for (lease, (owner, gpu, bytes)) in &owned {
            if charged
                .get(owner)
                .is_some_and(|leases| !leases.contains_key(lease))
            {
                sessions.adopt_lease(owner, gpu, *lease, *bytes);
            }
        }
        for (allocation, leases) in charged {
            for (lease, (gpu, bytes)) in leases {
                match self.leases.owner(lease) {
                    Some(owner) if owner == allocation => {}
                    // The unreadable blob names the owner, so the charged container stays charged.
                    _ if self.leases.is_unreadable(lease) => {}
                    // The new owner is charged.
                    Some(_) => sessions.refund_lease(&allocation, lease),
                    // The lease ended with an earlier agent, with the fd store, or before its
                    // creation.
                    None => drop(sessions.release_lease(&allocation, &gpu, lease, bytes)),
                }
            }
        }
    }

    /// The state that a verdict on a GPU must be valid for.
    fn driver_epoch(&self, gpu: &GpuUuid) -> DriverEpoch {
        DriverEpoch {
            driver: self.driver_version.clone(),
            generation: self.leases.generation(gpu),
        }
    }

    /// Starts a scrub check or a measurement if the GPU lacks one, and creates the keep-alive on
    /// the first scrubbed GPU.
    fn ensure_scrub_checked(&mut self, gpu: GpuUuid) {
        let seen = self.service.scrub_cache.get(&gpu, &self.driver_epoch(&gpu));
        let is_seen = matches!(seen, Some(Verdict::Scrubbed | Verdict::NotScrubbed));
        if seen == Some(&Verdict::Scrubbed) && self.keep_alive == KeepAlive::None {
            self.create_keep_alive(gpu.clone());
        }
        let has_room = self.leases.free(&gpu) >= scrub_check::MAX_MEMORY;
        // The check takes only memory that is bound to no pod.
        if (!is_seen || self.needs_measurement(&gpu))
            && has_room
            && self.scrub_checks.insert(gpu.clone())
        {
            self.start_scrub_check(gpu);
        }
    }

    fn needs_measurement(&self, gpu: &GpuUuid) -> bool {
        let tried = self.unmeasured.get(gpu);
        tried.is_none_or(|tried| tried.elapsed() >= MEASURE_RETRY)
            && self
                .service
                .sessions
                .lacks_context_size(gpu, &self.driver_version)
    }

    fn start_scrub_check(&mut self, gpu: GpuUuid) {
        let (program, with) = (self.service.program.clone(), self.driver_epoch(&gpu));
        let charges = self.service.sessions.sampler();
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            if provisioners.is_drained(&gpu) {
                return Completion::ScrubCheckAllowed(gpu);
            }
            let result = scrub_check::run_check(program, gpu.clone(), charges).await;
            Completion::ScrubChecked(gpu, with, result)
        });
    }

    /// Allows the next check of a GPU after a delay, once the process of the failed check has
    /// exited.
    fn allow_scrub_check_later(&mut self, gpu: GpuUuid, mut before: ScrubProcess) {
        self.jobs.spawn(async move {
            tokio::time::sleep(SCRUB_CHECK_RETRY).await;
            while !before.has_ended() {
                tokio::time::sleep(SCRUB_CHECK_RETRY).await;
            }
            Completion::ScrubCheckAllowed(gpu)
        });
    }

    /// Creates the export keep-alive: exports are fast while one exported descriptor is open (F3 in
    /// docs/facts.md).
    fn create_keep_alive(&mut self, gpu: GpuUuid) {
        let Some(connection) = self.connection.clone() else {
            return;
        };
        self.keep_alive = KeepAlive::Creating(gpu.clone());
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let lease = LeaseId(KEEP_ALIVE);
            // Without a keep-alive exports are only slower.
            let created = match provisioners.create(&gpu, KEEP_ALIVE_BYTES).await {
                Ok(fd) => connection.put(lease, Blob::default(), fd).await.is_ok(),
                Err(_) => false,
            };
            Completion::KeepAliveCreated(gpu, created)
        });
    }

    /// Closes the keep-alive. Its GPU is unknown after a restart; the next one is created on a GPU
    /// that is not drained.
    fn close_keep_alive(&mut self) {
        if let (KeepAlive::Stored, Some(connection)) = (&self.keep_alive, &self.connection) {
            self.keep_alive = KeepAlive::Closing;
            let closed = connection.close(LeaseId(KEEP_ALIVE));
            self.jobs.spawn(async move {
                // A disconnected fd store lists what it has on the next connection.
                let _ = closed.await;
                Completion::KeepAliveClosed
            });
        }
    }

    /// Takes the GPUs to drain; releases the new ones.
    fn apply_drain(&mut self) {
        let drained = self.service.drain.borrow_and_update().requested.clone();
        if drained == self.drained {
            return;
        }
        let is_more = !drained.is_subset(&self.drained);
        self.service.provisioners.drain(drained.clone());
        self.leases.drain(drained.clone());
        // Until the GPU's generation has grown, the driver may be replaced or loaded with other
        // options.
        let verdicts = &mut self.service.scrub_cache;
        drained.iter().for_each(|gpu| verdicts.forget(gpu));
        self.drained = drained;
        if is_more {
            self.close_keep_alive();
        }
        // The driver may have been replaced.
        self.driver_version = self.service.program.driver_version();
        self.service
            .sessions
            .set_driver_version(&self.driver_version);
        self.unmeasured.clear();
    }

    /// The drained GPUs of which this service holds nothing.
    fn released_gpus(&self) -> BTreeSet<GpuUuid> {
        let may_be_held = self.service.store_events.is_some() && !self.leases.is_store_connected();
        let is_held = |gpu: &GpuUuid| {
            let may_be_keep_alive = match &self.keep_alive {
                KeepAlive::None | KeepAlive::Stored => false,
                KeepAlive::Creating(at) => at == gpu,
                KeepAlive::Closing => true,
            };
            may_be_held
                || may_be_keep_alive
                || self.leases.has_leases_on(gpu)
                || self.scrub_checks.contains(gpu)
                || self.service.provisioners.may_hold(gpu)
        };
        let drained = self.drained.iter();
        drained.filter(|gpu| !is_held(gpu)).cloned().collect()
    }

    fn handle_store_event(&mut self, event: Option<StoreEvent>) {
        match event {
            Some(StoreEvent::Connected {
                connection,
                leases: stored,
                capacity,
            }) => {
                self.connection = Some(connection);
                // The keep-alive takes one place.
                self.leases.set_capacity(capacity.saturating_sub(1));
                self.keep_alive = match stored.contains_key(&LeaseId(KEEP_ALIVE)) {
                    true => KeepAlive::Stored,
                    false => KeepAlive::None,
                };
                if !self.drained.is_empty() {
                    self.close_keep_alive();
                }
                let stored = stored.into_iter();
                let stored = stored.filter(|(lease, _)| lease.0 != KEEP_ALIVE);
                let parsed = |(lease, blob): (LeaseId, Blob)| (lease, parse_record(&blob));
                let stored: BTreeMap<LeaseId, StoredRecord> = stored.map(parsed).collect();
                log_unread(&stored);
                stored
                    .keys()
                    .for_each(|lease| self.service.lease_ids.observe(*lease));
                let membership = Arc::clone(&self.service.membership);
                let is_alive = |process: Process| membership.process(process.pid) == Some(process);
                let effects = self.leases.resync(stored, is_alive);
                self.reconcile_charges();
                self.apply_effects(effects);
            }
            Some(StoreEvent::Lost) => {
                self.connection = None;
                self.leases.store_disconnected();
                let waiting = std::mem::take(&mut self.discarding).into_values().flatten();
                waiting.for_each(|reply| reply_refused(reply, RetainedRefusal::Unavailable));
            }
            // The client's thread has exited.
            None => {
                self.service.store_events = None;
                self.connection = None;
                self.leases.store_disconnected();
            }
        }
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

    /// Waits for the exit of writers only, because each wait takes a descriptor.
    fn watch_writers(&mut self) {
        let writers = self.leases.writers();
        self.watched_writers.retain(|process, watch| {
            let writes = writers.contains(process);
            if !writes {
                watch.abort();
            }
            writes
        });
        for process in writers {
            self.watched_writers.entry(process).or_insert_with(|| {
                let membership = Arc::clone(&self.service.membership);
                self.jobs.spawn(async move {
                    wait_for_exit(process, membership.as_ref()).await;
                    Completion::ProcessEnded(process)
                })
            });
        }
    }

    /// Publishes the live leases for the proof of freed memory.
    fn publish_live_leases(&mut self) {
        let live_leases = self.leases.live_leases();
        self.service.live_leases.send_if_modified(|before| {
            let changed = *before != live_leases;
            *before = live_leases;
            changed
        });
    }

    /// Publishes the live leases, the released GPUs and the status.
    fn publish(&mut self) {
        self.publish_live_leases();
        let let_go = self.released_gpus();
        self.service.released_gpus.send_if_modified(|before| {
            let changed = *before != let_go;
            *before = let_go;
            changed
        });
        let status = status::build_status(
            self.service.store_events.is_some(),
            &self.leases,
            &self.service.scrub_cache,
            |gpu| self.driver_epoch(gpu),
            &self.service.provisioners.hung().borrow(),
        );
        self.service.status.send_if_modified(|before| {
            let changed = *before != status;
            *before = status;
            changed
        });
    }
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

/// Returns once a process has exited.
async fn wait_for_exit(process: Process, membership: &dyn ContainerResolver) {
    loop {
        // The pidfd comes first: if `/proc` then shows the process, both are the same one.
        match ProcessExit::open(process.pid) {
            Ok(life) if membership.process(process.pid) == Some(process) => {
                return life.wait().await;
            }
            Ok(_) => return,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return,
            // The process may run: the agent may be out of descriptors, for example.
            Err(error) => {
                warn!(pid = process.pid, %error, "failed to watch the writer of a lease; retrying")
            }
        }
        tokio::time::sleep(WATCH_RETRY).await;
    }
}

/// Creates the memory of a lease.
async fn create_memory(
    provisioners: &Provisioners,
    gpu: &GpuUuid,
    bytes: Bytes,
) -> Result<OwnedFd, CreateError> {
    match provisioners.create(gpu, bytes).await {
        Ok(fd) => Ok(fd),
        Err(ProvisionerError::Driver { code, .. }) => {
            Err(CreateError::NotCreated(RetainedRefusal::Driver { code }))
        }
        Err(error @ ProvisionerError::Exited(_)) => {
            warn!(%gpu, %error, "failed to create a lease");
            Err(CreateError::NotCreated(RetainedRefusal::Unavailable))
        }
        Err(ProvisionerError::Hung) => Err(CreateError::Unknown),
    }
}

/// Stores a lease's descriptor in the fd store. Returns the descriptor for the tenant.
async fn store_memory(
    connection: &Connection,
    lease: LeaseId,
    blob: Blob,
    fd: OwnedFd,
) -> Result<OwnedFd, CreateError> {
    let Ok(tenants) = fd.try_clone() else {
        return Err(CreateError::Unknown);
    };
    match connection.put(lease, blob, fd).await {
        Ok(()) => Ok(tenants),
        Err(error) => {
            warn!(%lease, %error, "failed to store a lease in the fd store");
            Err(CreateError::Unknown)
        }
    }
}

/// The response to an open of a lease.
fn answer(lease: LeaseId, record: &LeaseRecord) -> Option<RetainedResponse> {
    let (lease, bytes) = (lease.0, record.bytes.0);
    match &record.content {
        Content::Committed { checksum, .. } => Some(RetainedResponse::Ready {
            lease,
            generation: lease,
            bytes,
            checksum: *checksum,
        }),
        Content::Writing(writer) => Some(RetainedResponse::Write {
            lease,
            generation: lease,
            bytes,
            token: writer.token,
            expires_ms: u64::try_from(WRITE_TOKEN_LIFETIME.as_millis()).unwrap_or(u64::MAX),
        }),
        Content::Discarded => None,
    }
}

/// Parses the blob of a lease. The GPU and the size suffice to charge a lease whose other fields
/// this agent cannot read.
fn parse_record(blob: &Blob) -> StoredRecord {
    #[derive(Deserialize)]
    struct Title {
        gpu: GpuUuid,
    }
    #[derive(Deserialize)]
    struct Extent {
        title: Title,
        bytes: Bytes,
    }
    match serde_json::from_slice(blob.as_bytes()) {
        Ok(record) => StoredRecord::Read(record),
        Err(error) => {
            let extent: Option<Extent> = serde_json::from_slice(blob.as_bytes()).ok();
            StoredRecord::Unreadable {
                extent: extent.map(|extent| (extent.title.gpu, extent.bytes)),
                why: error.to_string(),
            }
        }
    }
}

/// Logs all unreadable leases in one line.
fn log_unread(stored: &BTreeMap<LeaseId, StoredRecord>) {
    let mut unreadable = stored
        .iter()
        .filter_map(|(lease, stored_record)| match stored_record {
            StoredRecord::Unreadable { why, .. } => Some((lease, why)),
            StoredRecord::Read(_) => None,
        });
    if let Some((lease, why)) = unreadable.next() {
        let others = unreadable.count();
        warn!(%lease, %why, others, "failed to read a lease of another version; it stays charged until its GPU is drained");
    }
}

fn encode_record(record: &LeaseRecord) -> Option<Blob> {
    let text = serde_json::to_vec(record).ok()?;
    Blob::new(text).ok()
}

fn account_gpu(account: &Account) -> Option<GpuUuid> {
    match account {
        Account::Device(uuid) => uuid.parse().ok(),
        Account::Managed => None,
    }
}

fn reply_refused(reply: oneshot::Sender<Reply>, why: RetainedRefusal) {
    // The session may have ended.
    let _ = reply.send(Reply::refused(why));
}
