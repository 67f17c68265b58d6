//! Has done what the book says: asks the workers and the vault, charges, and answers. Decides
//! nothing itself.
//!
//! One task holds the book and never waits; what takes time runs beside it and comes back as
//! [`Done`]. What is to be said to the vault is queued in the order in which the book said it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};
use bursar_protocol::messages::Account;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use futures::future::BoxFuture;
use rustix::io::Errno;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::fdstore_client::{Connection, FdStoreError, StoreEvent};
use super::handle::{Command, Commands, CreatedMemory, LiveLeases, Reply};
use super::lease_ids::{IdBlock, LeaseIds};
use super::leases::{
    Caller, Content, Effect, LeaseRecord, LeaseTable, LedgerUpdate, NodeView, OpenRequest, Opened,
    StoredRecord, WRITE_TOKEN_LIFETIME,
};
use super::provisioners::{Program, ProvisionerError, Provisioners};
use super::scrub_check::{self, DriverEpoch, ScrubCache, ScrubCheckResult, ScrubProcess, Verdict};
use super::status::{self, RetainedStatus};
use crate::clock;
use crate::gpu::drain::DrainState;
use crate::retained::tokens::TokenAuthority;
use crate::retained::tokens::seal::NodeKey;
use crate::sessions::pidfd::ProcessExit;
use crate::sessions::{ContainerResolver, Process, Sessions};
use crate::units::{Bytes, GpuUuid, LeaseId};

/// What sizes are rounded up to: the granularity of every NVIDIA GPU's memory.
const GRANULARITY: u64 = 2 << 20;

/// How large the sentinel is.
const KEEP_ALIVE_BYTES: Bytes = Bytes(GRANULARITY);

/// After so much was given back the next create would wait for the driver (F6 in docs/facts.md).
const SCRUB_WAIT_THRESHOLD: Bytes = Bytes::gib(1);

/// From one try to see whether a GPU's memory is cleared to the next.
const SCRUB_CHECK_RETRY: Duration = Duration::from_secs(60);

/// From one try to measure a context to the next, where NVML does not tell what a process has.
const MEASURE_RETRY: Duration = Duration::from_secs(3600);

/// From one try to watch a process to the next.
const WATCH_RETRY: Duration = Duration::from_secs(1);

/// How often what is known of all leases is told at the most: it takes longer, the more there are.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);

/// What the part works with.
pub struct LeaseService {
    /// What is handed in at the desk.
    pub commands: Commands,
    /// What becomes of the vault; none where nothing is kept.
    pub store_events: Option<mpsc::UnboundedReceiver<StoreEvent>>,
    /// Who is charged.
    pub sessions: Arc<Sessions>,
    /// Who processes are.
    pub membership: Arc<dyn ContainerResolver>,
    /// Who makes memory.
    pub provisioners: Arc<Provisioners>,
    /// How the canary is run.
    pub program: Program,
    /// What it saw.
    pub scrub_cache: ScrubCache,
    /// The leases' numbers.
    pub lease_ids: LeaseIds,
    /// What tokens are sealed with.
    pub key: NodeKey,
    /// What the vault keeps of each GPU.
    pub live_leases: watch::Sender<LiveLeases>,
    /// The GPUs that nothing is to hold.
    pub drain: watch::Receiver<DrainState>,
    /// Those that nothing of this part holds any more.
    pub released_gpus: watch::Sender<BTreeSet<GpuUuid>>,
    /// How it stands.
    pub status: watch::Sender<RetainedStatus>,
}

/// What came back.
enum Completion {
    /// A lease was made, or not.
    Created {
        lease: LeaseId,
        /// Its descriptor for who asked, if that was not handed out yet.
        made: Result<Option<OwnedFd>, CreateError>,
        reply: oneshot::Sender<Reply>,
    },
    /// The vault has closed a lease's descriptor.
    Dropped(LeaseId, GpuUuid, Bytes),
    /// A process has ended.
    ProcessEnded(Process),
    /// A GPU was looked at.
    ScrubChecked(GpuUuid, DriverEpoch, ScrubCheckResult),
    /// A sentinel was made on a GPU, or not.
    KeepAliveCreated(GpuUuid, bool),
    /// The vault has closed the sentinel.
    KeepAliveClosed,
    /// A GPU may be looked at again.
    ScrubCheckAllowed(GpuUuid),
    /// The disk was asked for numbers.
    IdsReserved(Option<IdBlock>),
    /// Nothing that anybody waits for.
    Nothing,
}

/// Why there is no lease.
enum CreateError {
    /// There is no memory either.
    NotCreated(RetainedRefusal),
    /// There may be memory.
    Unknown,
}

/// The part while it runs.
struct State {
    service: LeaseService,
    leases: LeaseTable,
    connection: Option<Connection>,
    jobs: JoinSet<Completion>,
    /// Writers whose end is waited for.
    watched_writers: BTreeMap<Process, AbortHandle>,
    /// Who waits for a lease's end.
    discarding: BTreeMap<LeaseId, Vec<oneshot::Sender<Reply>>>,
    /// The node's GPUs when this was last told.
    gpus: BTreeSet<GpuUuid>,
    /// GPUs that are being looked at, or were not long ago.
    scrub_checks: BTreeSet<GpuUuid>,
    /// GPUs whose contexts could not be measured, and when that was.
    unmeasured: BTreeMap<GpuUuid, Instant>,
    /// The driver's version: it is of each verdict.
    driver_version: String,
    /// The GPUs that nothing is to hold.
    drained: BTreeSet<GpuUuid>,
    keep_alive: KeepAlive,
}

/// The descriptor that the vault holds so that others are quick.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeepAlive {
    None,
    Creating(GpuUuid),
    /// On some GPU that was not drained when it was made.
    Stored,
    Closing,
}

impl LeaseService {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let driver = self.program.driver_version();
        self.sessions.set_driver_version(&driver);
        let mut serving = State {
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
        serving.apply_drain();
        // After the token pods' ends are still to be accounted for: the node's last calls come
        // before its end.
        serving.reserve_ids();
        let mut telling = tokio::time::interval(PUBLISH_INTERVAL);
        telling.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_news = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = telling.tick(), if is_news => {
                    serving.publish();
                    is_news = false;
                    continue;
                }
                note = serving.service.commands.recv() => match note {
                    Some(note) => if !serving.handle_command(note) { continue },
                    None => break,
                },
                news = next_store_event(&mut serving.service.store_events) => serving.handle_store_event(news),
                Ok(()) = serving.service.drain.changed() => serving.apply_drain(),
                Some(done) = serving.jobs.join_next() => match done {
                    Ok(done) => serving.handle_completion(done),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => warn!(%error, "kept memory"),
                },
            }
            // At once: who writes may end at any time, and the next to open its lease does not wait
            // for that.
            serving.watch_writers();
            is_news = true;
        }
        stop.cancelled().await;
    }
}

/// The next news; never any where nothing is kept.
async fn next_store_event(
    news: &mut Option<mpsc::UnboundedReceiver<StoreEvent>>,
) -> Option<StoreEvent> {
    match news {
        Some(news) => news.recv().await,
        None => std::future::pending().await,
    }
}

impl State {
    /// Whether anything may be otherwise now: what is said of a token changes nothing.
    fn handle_command(&mut self, note: Command) -> bool {
        match note {
            Command::Request {
                asker,
                question,
                made,
                reply,
            } => self.handle_request(asker, question, made, reply),
            Command::Token {
                asker,
                question,
                reply,
            } => {
                // Who asked may have gone.
                let _ = reply.send(self.handle_token_request(asker, question));
                return false;
            }
            Command::ProcessEnded(process) => self.process_ended(process),
            Command::Reconcile { node, reply } => {
                let turn = self.reconcile(node);
                // Who asked may be ending.
                let _ = reply.send(turn);
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
        asker: Caller,
        question: RetainedRequest,
        early: Option<oneshot::Sender<CreatedMemory>>,
        reply: oneshot::Sender<Reply>,
    ) {
        match question {
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
                self.open(asker, open, early, reply);
            }
            RetainedRequest::Commit {
                version: _,
                lease,
                token,
                checksum,
            } => {
                let lease = LeaseId(lease);
                let now = clock::now();
                let committed = self.leases.commit(asker, lease, token, checksum, now);
                match committed {
                    Ok(effects) => {
                        info!(%lease, allocation = %asker.allocation, "kept lease committed");
                        let told = self.apply_effects(effects);
                        self.reply_after_acks(told, RetainedResponse::Committed, reply);
                    }
                    Err(why) => reply_refused(reply, why),
                }
            }
            RetainedRequest::Discard { version: _, lease } => {
                let lease = LeaseId(lease);
                match self.leases.discard(asker, lease) {
                    Ok(effects) => {
                        info!(%lease, allocation = %asker.allocation, "kept lease discarded");
                        let ends = self.leases.get(lease).is_none();
                        if ends {
                            self.discarding.entry(lease).or_default().push(reply);
                            self.apply_effects(effects);
                        } else {
                            let told = self.apply_effects(effects);
                            self.reply_after_acks(told, RetainedResponse::Discarded, reply);
                        }
                    }
                    Err(why) => reply_refused(reply, why),
                }
            }
        }
    }

    fn handle_token_request(&self, asker: Caller, question: TokenRequest) -> TokenResponse {
        let judge = TokenAuthority {
            key: &self.service.key,
            leases: &self.leases,
            images: |allocation: &_| self.service.sessions.process_images(allocation),
        };
        let answer = match question {
            TokenRequest::Seal {
                version: _,
                account,
                lease,
                block,
            } => account_gpu(&account)
                .ok_or(TokenRefusal::Unknown)
                .and_then(|gpu| judge.seal(asker, &gpu, LeaseId(lease), block))
                .map(TokenResponse::Sealed),
            TokenRequest::Redeem { version: _, token } => {
                judge.redeem(asker, &token).map(TokenResponse::Redeemed)
            }
        };
        answer.unwrap_or_else(TokenResponse::Refused)
    }

    fn open(
        &mut self,
        asker: Caller,
        open: OpenRequest,
        early: Option<oneshot::Sender<CreatedMemory>>,
        reply: oneshot::Sender<Reply>,
    ) {
        if self.service.store_events.is_none() {
            return reply_refused(reply, RetainedRefusal::Off);
        }
        let gpu = open.gpu.clone();
        let (opened, effects) = self.leases.open(asker, open, clock::now());
        let told = self.apply_effects(effects);
        match opened {
            Err(why) => reply_refused(reply, why),
            Ok(Opened::Read(lease) | Opened::Write(lease)) => {
                self.fetch_and_reply(lease, told, reply)
            }
            Ok(Opened::Create(meta)) => match self.connection_for_create(&gpu) {
                Ok(line) => self.create(*meta, line, early, reply),
                Err(why) => reply_refused(reply, why),
            },
        }
    }

    /// Whether kept memory may be made on a GPU.
    fn connection_for_create(&self, gpu: &GpuUuid) -> Result<Connection, RetainedRefusal> {
        match self.service.scrub_cache.get(gpu, &self.driver_epoch(gpu)) {
            Some(Verdict::Scrubbed) => self.connection.clone().ok_or(RetainedRefusal::Unavailable),
            Some(Verdict::NotScrubbed | Verdict::Unknown(_)) => Err(RetainedRefusal::NotScrubbed),
            None => Err(RetainedRefusal::Unavailable),
        }
    }

    /// Charges for a lease, then has it made.
    fn create(
        &mut self,
        meta: LeaseRecord,
        line: Connection,
        early: Option<oneshot::Sender<CreatedMemory>>,
        reply: oneshot::Sender<Reply>,
    ) {
        self.reserve_ids();
        let Some(lease) = self.service.lease_ids.peek() else {
            return reply_refused(reply, RetainedRefusal::Unavailable);
        };
        let (gpu, bytes) = (meta.title.gpu.clone(), meta.bytes);
        let Some(blob) = encode_record(&meta) else {
            return reply_refused(reply, RetainedRefusal::TooMany);
        };
        let sessions = &self.service.sessions;
        if let Err(Bytes(free)) = sessions.charge_lease(&meta.owner, &gpu, lease, bytes) {
            return reply_refused(reply, RetainedRefusal::Quota { free });
        }
        self.service.lease_ids.observe(lease);
        self.leases.begin_create(lease, meta);
        let workers = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let made = match create_memory(&workers, &gpu, bytes).await {
                Ok(fd) => store_memory(&line, lease, bytes, blob, fd, early).await,
                Err(why) => Err(why),
            };
            Completion::Created { lease, made, reply }
        });
    }

    /// Has the disk take in the next numbers of leases, before they are needed.
    fn reserve_ids(&mut self) {
        if let Some(order) = self.service.lease_ids.next_reservation() {
            self.jobs
                .spawn_blocking(move || Completion::IdsReserved(order.reserve()));
        }
    }

    /// Fetches a lease's descriptor, and answers with what the lease is now.
    fn fetch_and_reply(&mut self, lease: LeaseId, told: Acks, reply: oneshot::Sender<Reply>) {
        let (Some(line), Some(meta)) = (&self.connection, self.leases.get(lease)) else {
            return reply_refused(reply, RetainedRefusal::Unavailable);
        };
        let Some(answer) = answer(lease, meta) else {
            return reply_refused(reply, RetainedRefusal::Missing);
        };
        let fetched = line.get(lease);
        self.jobs.spawn(async move {
            let told = told.wait().await;
            let _ = match told.and(fetched.await) {
                Ok(fd) => reply.send(Reply {
                    response: answer,
                    fd: Some(fd),
                }),
                Err(_) => reply.send(Reply::refused(RetainedRefusal::Unavailable)),
            };
            Completion::Nothing
        });
    }

    /// Answers once the vault has taken in what it was told.
    fn reply_after_acks(
        &mut self,
        told: Acks,
        answer: RetainedResponse,
        reply: oneshot::Sender<Reply>,
    ) {
        self.jobs.spawn(async move {
            let _ = reply.send(match told.wait().await {
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
            Completion::Created { lease, made, reply } => self.finish_create(lease, made, reply),
            Completion::Dropped(lease, gpu, bytes) => {
                info!(%lease, "kept lease closed");
                self.leases.confirm_dropped(lease);
                for reply in self.discarding.remove(&lease).unwrap_or_default() {
                    let answer = RetainedResponse::Discarded;
                    // Who asked may have gone.
                    let _ = reply.send(Reply {
                        response: answer,
                        fd: None,
                    });
                }
                if bytes >= SCRUB_WAIT_THRESHOLD {
                    let workers = Arc::clone(&self.service.provisioners);
                    self.jobs.spawn(async move {
                        workers.await_scrub(&gpu, bytes).await;
                        Completion::Nothing
                    });
                }
            }
            Completion::ProcessEnded(process) => {
                self.watched_writers.remove(&process);
                self.process_ended(process);
            }
            // Of a driver that may be gone once it lets go.
            Completion::ScrubChecked(gpu, ..) if self.drained.contains(&gpu) => {
                self.scrub_checks.remove(&gpu);
            }
            Completion::ScrubChecked(gpu, with, looked) => {
                self.record_scrub_check(gpu, with, looked)
            }
            Completion::KeepAliveCreated(gpu, made) => {
                // Where there is none, the next look at the GPU tries again.
                self.keep_alive = if made {
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
            Completion::IdsReserved(block) => self.service.lease_ids.complete_reservation(block),
            Completion::Nothing => {}
        }
    }

    fn finish_create(
        &mut self,
        lease: LeaseId,
        made: Result<Option<OwnedFd>, CreateError>,
        reply: oneshot::Sender<Reply>,
    ) {
        match made {
            Ok(fd) => {
                let (meta, effects) = self.leases.finish_create(lease);
                let answer = meta.and_then(|meta| answer(lease, meta));
                let told = reply.send(match answer {
                    Some(answer) => Reply {
                        response: answer,
                        fd,
                    },
                    None => Reply::refused(RetainedRefusal::Fenced),
                });
                info!(%lease, "kept lease made");
                self.apply_effects(effects);
                if told.is_err() {
                    // Nobody waited so long: nobody would write it, nor give it up.
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
        let (turn, effects) = self.leases.reconcile(node, &charged);
        if self.leases.is_store_connected() {
            // Who came into a lease now is charged now.
            self.reconcile_charges();
        }
        self.apply_effects(effects);
        let spared = gpus.into_iter().filter(|gpu| !self.drained.contains(gpu));
        let spared: Vec<GpuUuid> = spared.collect();
        spared
            .into_iter()
            .for_each(|gpu| self.ensure_scrub_checked(gpu));
        turn
    }

    /// Forgets GPUs that have left the node: a new MIG instance has a new UUID. The node has none
    /// before NVML has answered.
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

    fn record_scrub_check(&mut self, gpu: GpuUuid, with: DriverEpoch, looked: ScrubCheckResult) {
        let ScrubCheckResult {
            verdict,
            context,
            process: canary,
        } = looked;
        match context {
            Some(bytes) => {
                let sessions = &self.service.sessions;
                sessions.record_context_size(&gpu, &with.driver, bytes);
            }
            None => drop(self.unmeasured.insert(gpu.clone(), Instant::now())),
        }
        if matches!(verdict, Verdict::Unknown(_)) {
            self.allow_scrub_check_later(gpu.clone(), canary);
        } else {
            self.scrub_checks.remove(&gpu);
        }
        self.service.scrub_cache.record(gpu, with, verdict);
    }

    /// Has each container charged for the leases that it owns, and for no other.
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
                    // The unread blob names the owner: the container that is charged stays charged.
                    _ if self.leases.is_unreadable(lease) => {}
                    // Its heir is charged.
                    Some(_) => sessions.refund_lease(&allocation, lease),
                    // It ended with an agent, a vault, or before it was made.
                    None => drop(sessions.release_lease(&allocation, &gpu, lease, bytes)),
                }
            }
        }
    }

    /// What a verdict on a GPU is of now.
    fn driver_epoch(&self, gpu: &GpuUuid) -> DriverEpoch {
        DriverEpoch {
            driver: self.driver_version.clone(),
            generation: self.leases.generation(gpu),
        }
    }

    /// Sees once whether a GPU's memory is cleared and what a context takes, and makes the sentinel
    /// on the first where it is cleared.
    fn ensure_scrub_checked(&mut self, gpu: GpuUuid) {
        let seen = self.service.scrub_cache.get(&gpu, &self.driver_epoch(&gpu));
        let is_seen = matches!(seen, Some(Verdict::Scrubbed | Verdict::NotScrubbed));
        if seen == Some(&Verdict::Scrubbed) && self.keep_alive == KeepAlive::None {
            self.create_keep_alive(gpu.clone());
        }
        let has_room = self.leases.free(&gpu) >= scrub_check::MAX_MEMORY;
        // What pods were promised is never taken from them.
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

    /// Looks at a GPU.
    fn start_scrub_check(&mut self, gpu: GpuUuid) {
        let (program, with) = (self.service.program.clone(), self.driver_epoch(&gpu));
        let charges = self.service.sessions.sampler();
        let workers = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            if workers.is_drained(&gpu) {
                return Completion::ScrubCheckAllowed(gpu);
            }
            let looked = scrub_check::run_check(program, gpu.clone(), charges).await;
            Completion::ScrubChecked(gpu, with, looked)
        });
    }

    /// Looks at a GPU again after a while, once a canary that saw nothing has ended.
    fn allow_scrub_check_later(&mut self, gpu: GpuUuid, mut before: ScrubProcess) {
        self.jobs.spawn(async move {
            tokio::time::sleep(SCRUB_CHECK_RETRY).await;
            while !before.has_ended() {
                tokio::time::sleep(SCRUB_CHECK_RETRY).await;
            }
            Completion::ScrubCheckAllowed(gpu)
        });
    }

    /// While one exported descriptor is open on a system, further ones are quick (F3 in
    /// docs/facts.md).
    fn create_keep_alive(&mut self, gpu: GpuUuid) {
        let Some(line) = self.connection.clone() else {
            return;
        };
        self.keep_alive = KeepAlive::Creating(gpu.clone());
        let workers = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let lease = LeaseId(KEEP_ALIVE);
            // Without one everything is slower, and nothing else.
            let made = match workers.create(&gpu, KEEP_ALIVE_BYTES).await {
                Ok(fd) => line.put(lease, Blob::default(), fd).await.is_ok(),
                Err(_) => false,
            };
            Completion::KeepAliveCreated(gpu, made)
        });
    }

    /// Has the sentinel closed: nobody knows which GPU it is on. The next is made on one that is
    /// not drained.
    fn close_keep_alive(&mut self) {
        if let (KeepAlive::Stored, Some(line)) = (&self.keep_alive, &self.connection) {
            self.keep_alive = KeepAlive::Closing;
            let closed = line.close(LeaseId(KEEP_ALIVE));
            self.jobs.spawn(async move {
                // Where the vault is away, it says what it has when it is back.
                let _ = closed.await;
                Completion::KeepAliveClosed
            });
        }
    }

    /// Other GPUs are drained, or none any more.
    fn apply_drain(&mut self) {
        let drained = self.service.drain.borrow_and_update().requested.clone();
        if drained == self.drained {
            return;
        }
        let is_more = !drained.is_subset(&self.drained);
        self.service.provisioners.drain(drained.clone());
        self.leases.drain(drained.clone());
        // Before its G has grown the driver may be another, or loaded with other options.
        let verdicts = &mut self.service.scrub_cache;
        drained.iter().for_each(|gpu| verdicts.forget(gpu));
        self.drained = drained;
        if is_more {
            self.close_keep_alive();
        }
        // It may be another one afterwards.
        self.driver_version = self.service.program.driver_version();
        self.service
            .sessions
            .set_driver_version(&self.driver_version);
        self.unmeasured.clear();
    }

    /// The drained GPUs that nothing here holds.
    fn released_gpus(&self) -> BTreeSet<GpuUuid> {
        let may_be_held = self.service.store_events.is_some() && !self.leases.is_store_connected();
        let is_held = |gpu: &GpuUuid| {
            let sentinel = match &self.keep_alive {
                KeepAlive::None | KeepAlive::Stored => false,
                KeepAlive::Creating(at) => at == gpu,
                KeepAlive::Closing => true,
            };
            may_be_held
                || sentinel
                || self.leases.has_leases_on(gpu)
                || self.scrub_checks.contains(gpu)
                || self.service.provisioners.may_hold(gpu)
        };
        let drained = self.drained.iter();
        drained.filter(|gpu| !is_held(gpu)).cloned().collect()
    }

    fn handle_store_event(&mut self, news: Option<StoreEvent>) {
        match news {
            Some(StoreEvent::Connected {
                connection: line,
                leases: held,
                capacity: most,
            }) => {
                self.connection = Some(line);
                // The sentinel is no tenant's.
                self.leases.set_capacity(most.saturating_sub(1));
                self.keep_alive = match held.contains_key(&LeaseId(KEEP_ALIVE)) {
                    true => KeepAlive::Stored,
                    false => KeepAlive::None,
                };
                if !self.drained.is_empty() {
                    self.close_keep_alive();
                }
                let held = held.into_iter();
                let held = held.filter(|(lease, _)| lease.0 != KEEP_ALIVE);
                let parsed = |(lease, blob): (LeaseId, Blob)| (lease, parse_record(&blob));
                let held: BTreeMap<LeaseId, StoredRecord> = held.map(parsed).collect();
                log_unread(&held);
                held.keys()
                    .for_each(|lease| self.service.lease_ids.observe(*lease));
                let membership = Arc::clone(&self.service.membership);
                let lives = |process: Process| membership.process(process.pid) == Some(process);
                let effects = self.leases.resync(held, lives);
                self.reconcile_charges();
                self.apply_effects(effects);
            }
            Some(StoreEvent::Lost) => {
                self.connection = None;
                self.leases.store_disconnected();
                let waiting = std::mem::take(&mut self.discarding).into_values().flatten();
                waiting.for_each(|reply| reply_refused(reply, RetainedRefusal::Unavailable));
            }
            // Its thread has ended.
            None => {
                self.service.store_events = None;
                self.connection = None;
                self.leases.store_disconnected();
            }
        }
    }

    /// Has the effects done in their order; what the vault answers to what it is told.
    fn apply_effects(&mut self, effects: Vec<Effect>) -> Acks {
        if !effects.is_empty() {
            // Before a descriptor is closed nothing may take it for known.
            self.publish_live_leases();
        }
        let mut told = Acks::default();
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
                Effect::Update(lease, meta) => match (&self.connection, encode_record(&meta)) {
                    (Some(line), Some(blob)) => told.0.push(Box::pin(line.update(lease, blob))),
                    // What the vault has counts when it is back.
                    _ => told
                        .0
                        .push(Box::pin(async { Err(FdStoreError::Disconnected) })),
                },
            }
        }
        told
    }

    fn close_descriptor(&mut self, lease: LeaseId) {
        let Some(line) = &self.connection else {
            return;
        };
        let (gpu, bytes) = self.leases.extent(lease).unzip();
        let closed = line.close(lease);
        self.jobs.spawn(async move {
            match (closed.await, gpu, bytes) {
                (Ok(()), Some(gpu), Some(bytes)) => Completion::Dropped(lease, gpu, bytes),
                // Tried again when the vault is heard.
                _ => Completion::Nothing,
            }
        });
    }

    /// Waits for the ends of those that write, and of nobody else: each costs a descriptor.
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

    /// Tells the residual what the vault keeps.
    fn publish_live_leases(&mut self) {
        let living = self.leases.live_leases();
        self.service.live_leases.send_if_modified(|before| {
            let changed = *before != living;
            *before = living;
            changed
        });
    }

    /// The same, and tells people how it stands.
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

/// What the vault was told and has still to answer.
#[derive(Default)]
struct Acks(Vec<BoxFuture<'static, Result<(), FdStoreError>>>);

impl Acks {
    async fn wait(self) -> Result<(), FdStoreError> {
        for told in self.0 {
            told.await?;
        }
        Ok(())
    }
}

/// Returns once a process has ended.
async fn wait_for_exit(process: Process, membership: &dyn ContainerResolver) {
    loop {
        // In this order: the pidfd first, then what `/proc` says, so that both are of one process.
        match ProcessExit::open(process.pid) {
            Ok(life) if membership.process(process.pid) == Some(process) => {
                return life.wait().await;
            }
            Ok(_) => return,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return,
            // No descriptor is left, say: it may live.
            Err(error) => warn!(pid = process.pid, %error, "writer not watched yet"),
        }
        tokio::time::sleep(WATCH_RETRY).await;
    }
}

/// Has a lease's memory made.
async fn create_memory(
    workers: &Provisioners,
    gpu: &GpuUuid,
    bytes: Bytes,
) -> Result<OwnedFd, CreateError> {
    match workers.create(gpu, bytes).await {
        Ok(fd) => Ok(fd),
        Err(ProvisionerError::Driver { code, .. }) => {
            Err(CreateError::NotCreated(RetainedRefusal::Driver { code }))
        }
        Err(error @ ProvisionerError::Exited(_)) => {
            warn!(%gpu, %error, "kept lease not made");
            Err(CreateError::NotCreated(RetainedRefusal::Unavailable))
        }
        Err(ProvisionerError::Hung) => Err(CreateError::Unknown),
    }
}

/// Has a lease's memory held. Whoever takes it `early` maps it meanwhile; it is charged for, and
/// stays so until it is proven free, whatever becomes of the vault or of this agent. The descriptor
/// for who asked, if it was not taken.
async fn store_memory(
    line: &Connection,
    lease: LeaseId,
    bytes: Bytes,
    blob: Blob,
    fd: OwnedFd,
    early: Option<oneshot::Sender<CreatedMemory>>,
) -> Result<Option<OwnedFd>, CreateError> {
    let Ok(tenants) = fd.try_clone() else {
        return Err(CreateError::Unknown);
    };
    let tenants = match early {
        // Who asked may have gone.
        Some(early) => early
            .send(CreatedMemory { bytes, fd: tenants })
            .err()
            .map(|made| made.fd),
        None => Some(tenants),
    };
    match line.put(lease, blob, fd).await {
        Ok(()) => Ok(tenants),
        Err(error) => {
            warn!(%lease, %error, "kept lease not held");
            Err(CreateError::Unknown)
        }
    }
}

/// What who opens a lease is answered.
fn answer(lease: LeaseId, meta: &LeaseRecord) -> Option<RetainedResponse> {
    let (lease, bytes) = (lease.0, meta.bytes.0);
    match &meta.content {
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

/// Parses the blob that the vault keeps beside a lease. GPU and size are enough to charge a lease
/// whose other fields this agent does not know.
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
        Ok(meta) => StoredRecord::Read(meta),
        Err(error) => {
            let extent: Option<Extent> = serde_json::from_slice(blob.as_bytes()).ok();
            StoredRecord::Unreadable {
                extent: extent.map(|extent| (extent.title.gpu, extent.bytes)),
                why: error.to_string(),
            }
        }
    }
}

/// Logs all unread leases in one line.
fn log_unread(held: &BTreeMap<LeaseId, StoredRecord>) {
    let mut unread = held.iter().filter_map(|(lease, heard)| match heard {
        StoredRecord::Unreadable { why, .. } => Some((lease, why)),
        StoredRecord::Read(_) => None,
    });
    if let Some((lease, why)) = unread.next() {
        let others = unread.count();
        warn!(%lease, %why, others, "failed to read a kept lease; it stays charged until its GPU is drained");
    }
}

fn encode_record(meta: &LeaseRecord) -> Option<Blob> {
    let text = serde_json::to_vec(meta).ok()?;
    Blob::new(text).ok()
}

fn account_gpu(account: &Account) -> Option<GpuUuid> {
    match account {
        Account::Device(uuid) => uuid.parse().ok(),
        Account::Managed => None,
    }
}

fn reply_refused(reply: oneshot::Sender<Reply>, why: RetainedRefusal) {
    // Who asked may have gone.
    let _ = reply.send(Reply::refused(why));
}
