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

use super::fdstore_client::{Line, News, VaultError};
use super::handle::{Living, Made, Note, Notes, Reply};
use super::lease_ids::{Block, Numbers};
use super::leases::{
    Asker, Content, Effect, Heard, Leases, Meta, Node, Open, Opened, Turn, WRITE_TIME,
};
use super::provisioners::{Program, WorkerError, Workers};
use super::scrub_check::{self, Canary, Looked, Verdict, Verdicts, With};
use super::status::{self, KeptStatus};
use crate::clock;
use crate::gpu::drain::Drain;
use crate::retained::tokens::Judge;
use crate::retained::tokens::seal::NodeKey;
use crate::sessions::pidfd::Life;
use crate::sessions::{Membership, Process, Sessions};
use crate::units::{Bytes, GpuUuid, LeaseId};

/// What sizes are rounded up to: the granularity of every NVIDIA GPU's memory.
const GRANULARITY: u64 = 2 << 20;

/// How large the sentinel is.
const SENTINEL_BYTES: Bytes = Bytes(GRANULARITY);

/// After so much was given back the next create would wait for the driver (F6 in docs/facts.md).
const SWEPT_FROM: Bytes = Bytes::gib(1);

/// From one try to see whether a GPU's memory is cleared to the next.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// From one try to measure a context to the next, where NVML does not tell what a process has.
const MEASURE_AGAIN: Duration = Duration::from_secs(3600);

/// From one try to watch a process to the next.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// How often what is known of all leases is told at the most: it takes longer, the more there are.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// What the part works with.
pub struct Keeper {
    /// What is handed in at the desk.
    pub notes: Notes,
    /// What becomes of the vault; none where nothing is kept.
    pub news: Option<mpsc::UnboundedReceiver<News>>,
    /// Who is charged.
    pub sessions: Arc<Sessions>,
    /// Who processes are.
    pub membership: Arc<dyn Membership>,
    /// Who makes memory.
    pub workers: Arc<Workers>,
    /// How the canary is run.
    pub program: Program,
    /// What it saw.
    pub verdicts: Verdicts,
    /// The leases' numbers.
    pub numbers: Numbers,
    /// What tokens are sealed with.
    pub key: NodeKey,
    /// What the vault keeps of each GPU.
    pub living: watch::Sender<Living>,
    /// The GPUs that nothing is to hold.
    pub drain: watch::Receiver<Drain>,
    /// Those that nothing of this part holds any more.
    pub let_go: watch::Sender<BTreeSet<GpuUuid>>,
    /// How it stands.
    pub status: watch::Sender<KeptStatus>,
}

/// What came back.
enum Done {
    /// A lease was made, or not.
    Made {
        lease: LeaseId,
        /// Its descriptor for who asked, if that was not handed out yet.
        made: Result<Option<OwnedFd>, NotMade>,
        reply: oneshot::Sender<Reply>,
    },
    /// The vault has closed a lease's descriptor.
    Dropped(LeaseId, GpuUuid, Bytes),
    /// A process has ended.
    Ended(Process),
    /// A GPU was looked at.
    Seen(GpuUuid, With, Looked),
    /// A sentinel was made on a GPU, or not.
    Sentinel(GpuUuid, bool),
    /// The vault has closed the sentinel.
    NoSentinel,
    /// A GPU may be looked at again.
    NotSeen(GpuUuid),
    /// The disk was asked for numbers.
    Numbers(Option<Block>),
    /// Nothing that anybody waits for.
    Nothing,
}

/// Why there is no lease.
enum NotMade {
    /// There is no memory either.
    Nothing(RetainedRefusal),
    /// There may be memory.
    Unsure,
}

/// The part while it runs.
struct Serving {
    keeper: Keeper,
    leases: Leases,
    line: Option<Line>,
    jobs: JoinSet<Done>,
    /// Writers whose end is waited for.
    watched: BTreeMap<Process, AbortHandle>,
    /// Who waits for a lease's end.
    discarding: BTreeMap<LeaseId, Vec<oneshot::Sender<Reply>>>,
    /// The node's GPUs when this was last told.
    gpus: BTreeSet<GpuUuid>,
    /// GPUs that are being looked at, or were not long ago.
    looking: BTreeSet<GpuUuid>,
    /// GPUs whose contexts could not be measured, and when that was.
    not_measured: BTreeMap<GpuUuid, Instant>,
    /// The driver's version: it is of each verdict.
    driver: String,
    /// The GPUs that nothing is to hold.
    drained: BTreeSet<GpuUuid>,
    sentinel: Sentinel,
}

/// The descriptor that the vault holds so that others are quick.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sentinel {
    None,
    Making(GpuUuid),
    /// On some GPU that was not drained when it was made.
    Held,
    Closing,
}

impl Keeper {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let driver = self.program.driver_version();
        self.sessions.set_driver(&driver);
        let mut serving = Serving {
            keeper: self,
            leases: Leases::default(),
            line: None,
            jobs: JoinSet::new(),
            watched: BTreeMap::new(),
            discarding: BTreeMap::new(),
            gpus: BTreeSet::new(),
            looking: BTreeSet::new(),
            not_measured: BTreeMap::new(),
            driver,
            drained: BTreeSet::new(),
            sentinel: Sentinel::None,
        };
        serving.drain();
        // After the token pods' ends are still to be accounted for: the node's last calls come
        // before its end.
        serving.order_numbers();
        let mut telling = tokio::time::interval(TELL_EVERY);
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
                note = serving.keeper.notes.recv() => match note {
                    Some(note) => if !serving.take(note) { continue },
                    None => break,
                },
                news = told(&mut serving.keeper.news) => serving.hear(news),
                Ok(()) = serving.keeper.drain.changed() => serving.drain(),
                Some(done) = serving.jobs.join_next() => match done {
                    Ok(done) => serving.done(done),
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
async fn told(news: &mut Option<mpsc::UnboundedReceiver<News>>) -> Option<News> {
    match news {
        Some(news) => news.recv().await,
        None => std::future::pending().await,
    }
}

impl Serving {
    /// Whether anything may be otherwise now: what is said of a token changes nothing.
    fn take(&mut self, note: Note) -> bool {
        match note {
            Note::Asked {
                asker,
                question,
                made,
                reply,
            } => self.answer(asker, question, made, reply),
            Note::Token {
                asker,
                question,
                reply,
            } => {
                // Who asked may have gone.
                let _ = reply.send(self.token(asker, question));
                return false;
            }
            Note::Ended(process) => self.ended(process),
            Note::Stands { node, reply } => {
                let turn = self.stand(node);
                // Who asked may be ending.
                let _ = reply.send(turn);
            }
            Note::Recorded(leases) => {
                for lease in leases {
                    let effect = self.leases.charged(lease);
                    self.carry_out(effect.into_iter().collect());
                }
            }
        }
        true
    }

    fn answer(
        &mut self,
        asker: Asker,
        question: RetainedRequest,
        early: Option<oneshot::Sender<Made>>,
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
                let Some(gpu) = gpu_of(&account) else {
                    return refuse(reply, RetainedRefusal::Missing);
                };
                let Some(bytes) = bytes.checked_next_multiple_of(GRANULARITY) else {
                    return refuse(reply, RetainedRefusal::Quota { free: 0 });
                };
                let open = Open {
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
                        let told = self.carry_out(effects);
                        self.reply_after(told, RetainedResponse::Committed, reply);
                    }
                    Err(why) => refuse(reply, why),
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
                            self.carry_out(effects);
                        } else {
                            let told = self.carry_out(effects);
                            self.reply_after(told, RetainedResponse::Discarded, reply);
                        }
                    }
                    Err(why) => refuse(reply, why),
                }
            }
        }
    }

    fn token(&self, asker: Asker, question: TokenRequest) -> TokenResponse {
        let judge = Judge {
            key: &self.keeper.key,
            leases: &self.leases,
            images: |allocation: &_| self.keeper.sessions.images(allocation),
        };
        let answer = match question {
            TokenRequest::Seal {
                version: _,
                account,
                lease,
                block,
            } => gpu_of(&account)
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
        asker: Asker,
        open: Open,
        early: Option<oneshot::Sender<Made>>,
        reply: oneshot::Sender<Reply>,
    ) {
        if self.keeper.news.is_none() {
            return refuse(reply, RetainedRefusal::Off);
        }
        let gpu = open.gpu.clone();
        let (opened, effects) = self.leases.open(asker, open, clock::now());
        let told = self.carry_out(effects);
        match opened {
            Err(why) => refuse(reply, why),
            Ok(Opened::Read(lease) | Opened::Write(lease)) => self.fetch(lease, told, reply),
            Ok(Opened::Make(meta)) => match self.may_make(&gpu) {
                Ok(line) => self.make(*meta, line, early, reply),
                Err(why) => refuse(reply, why),
            },
        }
    }

    /// Whether kept memory may be made on a GPU.
    fn may_make(&self, gpu: &GpuUuid) -> Result<Line, RetainedRefusal> {
        match self.keeper.verdicts.of_gpu(gpu, &self.with(gpu)) {
            Some(Verdict::Scrubbed) => self.line.clone().ok_or(RetainedRefusal::Unavailable),
            Some(Verdict::NotScrubbed | Verdict::Unseen(_)) => Err(RetainedRefusal::NotScrubbed),
            None => Err(RetainedRefusal::Unavailable),
        }
    }

    /// Charges for a lease, then has it made.
    fn make(
        &mut self,
        meta: Meta,
        line: Line,
        early: Option<oneshot::Sender<Made>>,
        reply: oneshot::Sender<Reply>,
    ) {
        self.order_numbers();
        let Some(lease) = self.keeper.numbers.peek() else {
            return refuse(reply, RetainedRefusal::Unavailable);
        };
        let (gpu, bytes) = (meta.title.gpu.clone(), meta.bytes);
        let Some(blob) = blob(&meta) else {
            return refuse(reply, RetainedRefusal::TooMany);
        };
        let sessions = &self.keeper.sessions;
        if let Err(Bytes(free)) = sessions.lease(&meta.owner, &gpu, lease, bytes) {
            return refuse(reply, RetainedRefusal::Quota { free });
        }
        self.keeper.numbers.seen(lease);
        self.leases.begin(lease, meta);
        let workers = Arc::clone(&self.keeper.workers);
        self.jobs.spawn(async move {
            let made = match created(&workers, &gpu, bytes).await {
                Ok(fd) => held(&line, lease, bytes, blob, fd, early).await,
                Err(why) => Err(why),
            };
            Done::Made { lease, made, reply }
        });
    }

    /// Has the disk take in the next numbers of leases, before they are needed.
    fn order_numbers(&mut self) {
        if let Some(order) = self.keeper.numbers.order() {
            self.jobs
                .spawn_blocking(move || Done::Numbers(order.carry_out()));
        }
    }

    /// Fetches a lease's descriptor, and answers with what the lease is now.
    fn fetch(&mut self, lease: LeaseId, told: Told, reply: oneshot::Sender<Reply>) {
        let (Some(line), Some(meta)) = (&self.line, self.leases.get(lease)) else {
            return refuse(reply, RetainedRefusal::Unavailable);
        };
        let Some(answer) = answer(lease, meta) else {
            return refuse(reply, RetainedRefusal::Missing);
        };
        let fetched = line.get(lease);
        self.jobs.spawn(async move {
            let told = told.all().await;
            let _ = match told.and(fetched.await) {
                Ok(fd) => reply.send(Reply {
                    answer,
                    fd: Some(fd),
                }),
                Err(_) => reply.send(Reply::refused(RetainedRefusal::Unavailable)),
            };
            Done::Nothing
        });
    }

    /// Answers once the vault has taken in what it was told.
    fn reply_after(&mut self, told: Told, answer: RetainedResponse, reply: oneshot::Sender<Reply>) {
        self.jobs.spawn(async move {
            let _ = reply.send(match told.all().await {
                Ok(()) => Reply { answer, fd: None },
                Err(_) => Reply::refused(RetainedRefusal::Unavailable),
            });
            Done::Nothing
        });
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Made { lease, made, reply } => self.made(lease, made, reply),
            Done::Dropped(lease, gpu, bytes) => {
                info!(%lease, "kept lease closed");
                self.leases.dropped(lease);
                for reply in self.discarding.remove(&lease).unwrap_or_default() {
                    let answer = RetainedResponse::Discarded;
                    // Who asked may have gone.
                    let _ = reply.send(Reply { answer, fd: None });
                }
                if bytes >= SWEPT_FROM {
                    let workers = Arc::clone(&self.keeper.workers);
                    self.jobs.spawn(async move {
                        workers.sweep(&gpu, bytes).await;
                        Done::Nothing
                    });
                }
            }
            Done::Ended(process) => {
                self.watched.remove(&process);
                self.ended(process);
            }
            // Of a driver that may be gone once it lets go.
            Done::Seen(gpu, ..) if self.drained.contains(&gpu) => drop(self.looking.remove(&gpu)),
            Done::Seen(gpu, with, looked) => self.seen(gpu, with, looked),
            Done::Sentinel(gpu, made) => {
                // Where there is none, the next look at the GPU tries again.
                self.sentinel = if made { Sentinel::Held } else { Sentinel::None };
                if self.drained.contains(&gpu) {
                    self.close_sentinel();
                }
            }
            Done::NoSentinel => self.sentinel = Sentinel::None,
            Done::NotSeen(gpu) => drop(self.looking.remove(&gpu)),
            Done::Numbers(block) => self.keeper.numbers.arrived(block),
            Done::Nothing => {}
        }
    }

    fn made(
        &mut self,
        lease: LeaseId,
        made: Result<Option<OwnedFd>, NotMade>,
        reply: oneshot::Sender<Reply>,
    ) {
        match made {
            Ok(fd) => {
                let (meta, effects) = self.leases.made(lease);
                let answer = meta.and_then(|meta| answer(lease, meta));
                let told = reply.send(match answer {
                    Some(answer) => Reply { answer, fd },
                    None => Reply::refused(RetainedRefusal::Fenced),
                });
                info!(%lease, "kept lease made");
                self.carry_out(effects);
                if told.is_err() {
                    // Nobody waited so long: nobody would write it, nor give it up.
                    let effects = self.leases.lost(lease);
                    self.carry_out(effects);
                }
            }
            Err(NotMade::Nothing(why)) => {
                if let Some(owner) = self.leases.never_made(lease) {
                    self.keeper.sessions.forget_lease(&owner, lease);
                }
                refuse(reply, why);
            }
            Err(NotMade::Unsure) => {
                let effects = self.leases.lost(lease);
                self.carry_out(effects);
                refuse(reply, RetainedRefusal::Unavailable);
            }
        }
    }

    fn ended(&mut self, process: Process) {
        let effects = self.leases.ended(process);
        self.carry_out(effects);
    }

    fn stand(&mut self, node: Node) -> Turn {
        let gpus: Vec<GpuUuid> = node.generations.keys().cloned().collect();
        self.keep_gpus(node.free.keys().cloned().collect());
        let late = self.leases.late(clock::now());
        self.carry_out(late);
        if self.leases.is_heard() {
            self.reconcile();
        }
        let charged = self.keeper.sessions.all_leases();
        let (turn, effects) = self.leases.stand(node, &charged);
        if self.leases.is_heard() {
            // Who came into a lease now is charged now.
            self.reconcile();
        }
        self.carry_out(effects);
        let spared = gpus.into_iter().filter(|gpu| !self.drained.contains(gpu));
        let spared: Vec<GpuUuid> = spared.collect();
        spared.into_iter().for_each(|gpu| self.look_at(gpu));
        turn
    }

    /// Forgets GPUs that have left the node: a new MIG instance has a new UUID. The node has none
    /// before NVML has answered.
    fn keep_gpus(&mut self, gpus: BTreeSet<GpuUuid>) {
        if gpus.is_empty() || gpus == self.gpus {
            return;
        }
        self.keeper.workers.keep_gpus(&gpus);
        self.keeper.verdicts.keep_gpus(&gpus);
        self.keeper.sessions.keep_gpus(&gpus);
        self.not_measured.retain(|gpu, _| gpus.contains(gpu));
        self.gpus = gpus;
    }

    fn seen(&mut self, gpu: GpuUuid, with: With, looked: Looked) {
        let Looked {
            verdict,
            context,
            canary,
        } = looked;
        match context {
            Some(bytes) => {
                let sessions = &self.keeper.sessions;
                sessions.context_measured(&gpu, &with.driver, bytes);
            }
            None => drop(self.not_measured.insert(gpu.clone(), Instant::now())),
        }
        if matches!(verdict, Verdict::Unseen(_)) {
            self.look_later(gpu.clone(), canary);
        } else {
            self.looking.remove(&gpu);
        }
        self.keeper.verdicts.note(gpu, with, verdict);
    }

    /// Has each container charged for the leases that it owns, and for no other.
    fn reconcile(&mut self) {
        let sessions = &self.keeper.sessions;
        let charged = sessions.all_leases();
        let owned = self.leases.owned();
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
                    _ if self.leases.is_unread(lease) => {}
                    // Its heir is charged.
                    Some(_) => sessions.forget_lease(&allocation, lease),
                    // It ended with an agent, a vault, or before it was made.
                    None => drop(sessions.release_lease(&allocation, &gpu, lease, bytes)),
                }
            }
        }
    }

    /// What a verdict on a GPU is of now.
    fn with(&self, gpu: &GpuUuid) -> With {
        With {
            driver: self.driver.clone(),
            generation: self.leases.generation(gpu),
        }
    }

    /// Sees once whether a GPU's memory is cleared and what a context takes, and makes the sentinel
    /// on the first where it is cleared.
    fn look_at(&mut self, gpu: GpuUuid) {
        let seen = self.keeper.verdicts.of_gpu(&gpu, &self.with(&gpu));
        let is_seen = matches!(seen, Some(Verdict::Scrubbed | Verdict::NotScrubbed));
        if seen == Some(&Verdict::Scrubbed) && self.sentinel == Sentinel::None {
            self.make_sentinel(gpu.clone());
        }
        let has_room = self.leases.free(&gpu) >= scrub_check::TAKEN;
        // What pods were promised is never taken from them.
        if (!is_seen || self.is_to_measure(&gpu)) && has_room && self.looking.insert(gpu.clone()) {
            self.look(gpu);
        }
    }

    fn is_to_measure(&self, gpu: &GpuUuid) -> bool {
        let tried = self.not_measured.get(gpu);
        tried.is_none_or(|tried| tried.elapsed() >= MEASURE_AGAIN)
            && self.keeper.sessions.lacks_context(gpu, &self.driver)
    }

    /// Looks at a GPU.
    fn look(&mut self, gpu: GpuUuid) {
        let (program, with) = (self.keeper.program.clone(), self.with(&gpu));
        let charges = self.keeper.sessions.charges();
        let workers = Arc::clone(&self.keeper.workers);
        self.jobs.spawn(async move {
            if workers.is_drained(&gpu) {
                return Done::NotSeen(gpu);
            }
            let looked = scrub_check::look(program, gpu.clone(), charges).await;
            Done::Seen(gpu, with, looked)
        });
    }

    /// Looks at a GPU again after a while, once a canary that saw nothing has ended.
    fn look_later(&mut self, gpu: GpuUuid, mut before: Canary) {
        self.jobs.spawn(async move {
            tokio::time::sleep(LOOK_AGAIN).await;
            while !before.has_ended() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            Done::NotSeen(gpu)
        });
    }

    /// While one exported descriptor is open on a system, further ones are quick (F3 in
    /// docs/facts.md).
    fn make_sentinel(&mut self, gpu: GpuUuid) {
        let Some(line) = self.line.clone() else {
            return;
        };
        self.sentinel = Sentinel::Making(gpu.clone());
        let workers = Arc::clone(&self.keeper.workers);
        self.jobs.spawn(async move {
            let lease = LeaseId(KEEP_ALIVE);
            // Without one everything is slower, and nothing else.
            let made = match workers.create(&gpu, SENTINEL_BYTES).await {
                Ok(fd) => line.put(lease, Blob::default(), fd).await.is_ok(),
                Err(_) => false,
            };
            Done::Sentinel(gpu, made)
        });
    }

    /// Has the sentinel closed: nobody knows which GPU it is on. The next is made on one that is
    /// not drained.
    fn close_sentinel(&mut self) {
        if let (Sentinel::Held, Some(line)) = (&self.sentinel, &self.line) {
            self.sentinel = Sentinel::Closing;
            let closed = line.close(LeaseId(KEEP_ALIVE));
            self.jobs.spawn(async move {
                // Where the vault is away, it says what it has when it is back.
                let _ = closed.await;
                Done::NoSentinel
            });
        }
    }

    /// Other GPUs are drained, or none any more.
    fn drain(&mut self) {
        let drained = self.keeper.drain.borrow_and_update().ordered.clone();
        if drained == self.drained {
            return;
        }
        let is_more = !drained.is_subset(&self.drained);
        self.keeper.workers.drain(drained.clone());
        self.leases.drain(drained.clone());
        // Before its G has grown the driver may be another, or loaded with other options.
        let verdicts = &mut self.keeper.verdicts;
        drained.iter().for_each(|gpu| verdicts.forget(gpu));
        self.drained = drained;
        if is_more {
            self.close_sentinel();
        }
        // It may be another one afterwards.
        self.driver = self.keeper.program.driver_version();
        self.keeper.sessions.set_driver(&self.driver);
        self.not_measured.clear();
    }

    /// The drained GPUs that nothing here holds.
    fn let_go(&self) -> BTreeSet<GpuUuid> {
        let may_be_held = self.keeper.news.is_some() && !self.leases.is_heard();
        let is_held = |gpu: &GpuUuid| {
            let sentinel = match &self.sentinel {
                Sentinel::None | Sentinel::Held => false,
                Sentinel::Making(at) => at == gpu,
                Sentinel::Closing => true,
            };
            may_be_held
                || sentinel
                || self.leases.are_on(gpu)
                || self.looking.contains(gpu)
                || self.keeper.workers.holds(gpu)
        };
        let drained = self.drained.iter();
        drained.filter(|gpu| !is_held(gpu)).cloned().collect()
    }

    fn hear(&mut self, news: Option<News>) {
        match news {
            Some(News::Heard { line, held, most }) => {
                self.line = Some(line);
                // The sentinel is no tenant's.
                self.leases.set_room(most.saturating_sub(1));
                self.sentinel = match held.contains_key(&LeaseId(KEEP_ALIVE)) {
                    true => Sentinel::Held,
                    false => Sentinel::None,
                };
                if !self.drained.is_empty() {
                    self.close_sentinel();
                }
                let held = held.into_iter();
                let held = held.filter(|(lease, _)| lease.0 != KEEP_ALIVE);
                let parsed = |(lease, blob): (LeaseId, Blob)| (lease, read(&blob));
                let held: BTreeMap<LeaseId, Heard> = held.map(parsed).collect();
                log_unread(&held);
                held.keys()
                    .for_each(|lease| self.keeper.numbers.seen(*lease));
                let membership = Arc::clone(&self.keeper.membership);
                let lives = |process: Process| membership.process(process.pid) == Some(process);
                let effects = self.leases.heard(held, lives);
                self.reconcile();
                self.carry_out(effects);
            }
            Some(News::Lost) => {
                self.line = None;
                self.leases.vault_lost();
                let waiting = std::mem::take(&mut self.discarding).into_values().flatten();
                waiting.for_each(|reply| refuse(reply, RetainedRefusal::Unavailable));
            }
            // Its thread has ended.
            None => {
                self.keeper.news = None;
                self.line = None;
                self.leases.vault_lost();
            }
        }
    }

    /// Has the effects done in their order; what the vault answers to what it is told.
    fn carry_out(&mut self, effects: Vec<Effect>) -> Told {
        if !effects.is_empty() {
            // Before a descriptor is closed nothing may take it for known.
            self.publish_living();
        }
        let mut told = Told::default();
        for effect in effects {
            match effect {
                Effect::Charge(lease, owner) => {
                    let sessions = &self.keeper.sessions;
                    if let Some((gpu, bytes)) = self.leases.extent(lease)
                        && sessions.release_lease(&owner, &gpu, lease, bytes)
                        && let Some(Effect::Drop(lease)) = self.leases.charged(lease)
                    {
                        self.close(lease);
                    }
                }
                Effect::Drop(lease) => self.close(lease),
                Effect::Update(lease, meta) => match (&self.line, blob(&meta)) {
                    (Some(line), Some(blob)) => told.0.push(Box::pin(line.update(lease, blob))),
                    // What the vault has counts when it is back.
                    _ => told.0.push(Box::pin(async { Err(VaultError::Away) })),
                },
            }
        }
        told
    }

    fn close(&mut self, lease: LeaseId) {
        let Some(line) = &self.line else {
            return;
        };
        let (gpu, bytes) = self.leases.extent(lease).unzip();
        let closed = line.close(lease);
        self.jobs.spawn(async move {
            match (closed.await, gpu, bytes) {
                (Ok(()), Some(gpu), Some(bytes)) => Done::Dropped(lease, gpu, bytes),
                // Tried again when the vault is heard.
                _ => Done::Nothing,
            }
        });
    }

    /// Waits for the ends of those that write, and of nobody else: each costs a descriptor.
    fn watch_writers(&mut self) {
        let writers = self.leases.writers();
        self.watched.retain(|process, watch| {
            let writes = writers.contains(process);
            if !writes {
                watch.abort();
            }
            writes
        });
        for process in writers {
            self.watched.entry(process).or_insert_with(|| {
                let membership = Arc::clone(&self.keeper.membership);
                self.jobs.spawn(async move {
                    until_ended(process, membership.as_ref()).await;
                    Done::Ended(process)
                })
            });
        }
    }

    /// Tells the residual what the vault keeps.
    fn publish_living(&mut self) {
        let living = self.leases.living();
        self.keeper.living.send_if_modified(|before| {
            let changed = *before != living;
            *before = living;
            changed
        });
    }

    /// The same, and tells people how it stands.
    fn publish(&mut self) {
        self.publish_living();
        let let_go = self.let_go();
        self.keeper.let_go.send_if_modified(|before| {
            let changed = *before != let_go;
            *before = let_go;
            changed
        });
        let status = status::of(
            self.keeper.news.is_some(),
            &self.leases,
            &self.keeper.verdicts,
            |gpu| self.with(gpu),
            &self.keeper.workers.stuck().borrow(),
        );
        self.keeper.status.send_if_modified(|before| {
            let changed = *before != status;
            *before = status;
            changed
        });
    }
}

/// What the vault was told and has still to answer.
#[derive(Default)]
struct Told(Vec<BoxFuture<'static, Result<(), VaultError>>>);

impl Told {
    async fn all(self) -> Result<(), VaultError> {
        for told in self.0 {
            told.await?;
        }
        Ok(())
    }
}

/// Returns once a process has ended.
async fn until_ended(process: Process, membership: &dyn Membership) {
    loop {
        // In this order: the pidfd first, then what `/proc` says, so that both are of one process.
        match Life::of(process.pid) {
            Ok(life) if membership.process(process.pid) == Some(process) => {
                return life.ended().await;
            }
            Ok(_) => return,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return,
            // No descriptor is left, say: it may live.
            Err(error) => warn!(pid = process.pid, %error, "writer not watched yet"),
        }
        tokio::time::sleep(WATCH_AGAIN).await;
    }
}

/// Has a lease's memory made.
async fn created(workers: &Workers, gpu: &GpuUuid, bytes: Bytes) -> Result<OwnedFd, NotMade> {
    match workers.create(gpu, bytes).await {
        Ok(fd) => Ok(fd),
        Err(WorkerError::Driver { code, .. }) => {
            Err(NotMade::Nothing(RetainedRefusal::Driver { code }))
        }
        Err(error @ WorkerError::Dead(_)) => {
            warn!(%gpu, %error, "kept lease not made");
            Err(NotMade::Nothing(RetainedRefusal::Unavailable))
        }
        Err(WorkerError::Stuck) => Err(NotMade::Unsure),
    }
}

/// Has a lease's memory held. Whoever takes it `early` maps it meanwhile; it is charged for, and
/// stays so until it is proven free, whatever becomes of the vault or of this agent. The descriptor
/// for who asked, if it was not taken.
async fn held(
    line: &Line,
    lease: LeaseId,
    bytes: Bytes,
    blob: Blob,
    fd: OwnedFd,
    early: Option<oneshot::Sender<Made>>,
) -> Result<Option<OwnedFd>, NotMade> {
    let Ok(tenants) = fd.try_clone() else {
        return Err(NotMade::Unsure);
    };
    let tenants = match early {
        // Who asked may have gone.
        Some(early) => early
            .send(Made { bytes, fd: tenants })
            .err()
            .map(|made| made.fd),
        None => Some(tenants),
    };
    match line.put(lease, blob, fd).await {
        Ok(()) => Ok(tenants),
        Err(error) => {
            warn!(%lease, %error, "kept lease not held");
            Err(NotMade::Unsure)
        }
    }
}

/// What who opens a lease is answered.
fn answer(lease: LeaseId, meta: &Meta) -> Option<RetainedResponse> {
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
            expires_ms: u64::try_from(WRITE_TIME.as_millis()).unwrap_or(u64::MAX),
        }),
        Content::Abandoned => None,
    }
}

/// Parses the blob that the vault keeps beside a lease. GPU and size are enough to charge a lease
/// whose other fields this agent does not know.
fn read(blob: &Blob) -> Heard {
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
        Ok(meta) => Heard::Read(meta),
        Err(error) => {
            let extent: Option<Extent> = serde_json::from_slice(blob.as_bytes()).ok();
            Heard::Unread {
                extent: extent.map(|extent| (extent.title.gpu, extent.bytes)),
                why: error.to_string(),
            }
        }
    }
}

/// Logs all unread leases in one line.
fn log_unread(held: &BTreeMap<LeaseId, Heard>) {
    let mut unread = held.iter().filter_map(|(lease, heard)| match heard {
        Heard::Unread { why, .. } => Some((lease, why)),
        Heard::Read(_) => None,
    });
    if let Some((lease, why)) = unread.next() {
        let others = unread.count();
        warn!(%lease, %why, others, "failed to read a kept lease; it stays charged until its GPU is drained");
    }
}

fn blob(meta: &Meta) -> Option<Blob> {
    let text = serde_json::to_vec(meta).ok()?;
    Blob::new(text).ok()
}

fn gpu_of(account: &Account) -> Option<GpuUuid> {
    match account {
        Account::Device(uuid) => uuid.parse().ok(),
        Account::Managed => None,
    }
}

fn refuse(reply: oneshot::Sender<Reply>, why: RetainedRefusal) {
    // Who asked may have gone.
    let _ = reply.send(Reply::refused(why));
}
