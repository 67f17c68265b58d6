//! One process's connection: hello, then requests, until the process is dead or says hello anew; or
//! one query.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bursar_protocol::CREATED_SINCE;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use bursar_protocol::messages::{self, Message, RejectReason, Request, Response};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::container::denials::ToldOfAll;
use super::container::leases::NotAsked;
use super::container::recording::Change;
use super::container::{Admitted, Container};
use super::fault_notifier::Bell;
use super::pidfd::Life;
use super::rate_limit::{self, Pace};
use super::stream::Stream;
use super::{Membership, Process, lock};
use crate::clock;
use crate::retained::handle::{Asker, Desk, Made, Reply};
use crate::units::AllocationId;

/// How long a peer may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a peer may take to make room in its socket for an answer to its hello.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Messages of one process that are answered at once: more than a program's start takes.
const MESSAGE_BURST: u32 = 64;

/// How often a request looks whether what ended images had is free.
const SETTLE_PAUSE: Duration = Duration::from_millis(10);

/// An answer that takes longer is late: at worst a request waits for what ended images had, and for the driver.
const LATE: Duration = Duration::from_secs(3);

/// The oldest version of the protocol that is served.
const OLDEST_VERSION: u16 = 1;

/// Why a conversation ended.
#[derive(Debug, thiserror::Error)]
enum Hangup {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("an answer was not taken: {0}")]
    Unsent(#[source] io::Error),
    #[error("{0}")]
    Wire(#[from] messages::DecodeError),
    #[error("no hello in time")]
    Silent,
    #[error("not welcome: {0:?}")]
    Unwelcome(RejectReason),
    #[error("a second hello, or anything before the first")]
    OutOfOrder,
}

/// A conversation to be had.
pub(super) struct Conversation {
    container: Arc<Mutex<Container>>,
    membership: Arc<dyn Membership>,
    /// The budget that the container's processes share: each message costs time that grows with
    /// their number.
    shared: Arc<Mutex<Pace>>,
    bell: Bell,
    /// None where nothing is kept.
    desk: Option<Desk>,
    told: ToldOfAll,
}

/// A peer that said hello.
struct Session {
    process: Process,
    image: u64,
    life: Life,
    ended: CancellationToken,
}

impl Conversation {
    pub(super) fn new(
        container: Arc<Mutex<Container>>,
        membership: Arc<dyn Membership>,
        shared: Arc<Mutex<Pace>>,
        bell: Bell,
        desk: Option<Desk>,
        told: ToldOfAll,
    ) -> Conversation {
        Conversation {
            container,
            membership,
            shared,
            bell,
            desk,
            told,
        }
    }

    /// Serves one connection.
    pub(super) async fn run(self, mut stream: Stream) {
        let session = match self.greet(&mut stream).await {
            Ok(Some(session)) => session,
            Ok(None) => return,
            Err(error) => return tracing::debug!(%error, "peer turned away"),
        };
        tokio::select! {
            // A death that is seen at the same time as a last request comes first.
            biased;
            () = session.ended.cancelled() => return,
            () = session.life.ended() => {}
            Err(error) = self.serve(&mut stream, session.process.pid) => {
                // The socket ends nothing: the process may live on with what it has, or a child
                // of it may hold the socket long after its death.
                tracing::debug!(pid = session.process.pid, %error, "peer hung up");
                if !matches!(error, Hangup::Unsent(_)) {
                    lock(&self.container).hung_up(session.process, session.image);
                }
                drop(stream);
                tokio::select! {
                    () = session.ended.cancelled() => return,
                    () = session.life.ended() => {}
                }
            }
        }
        lock(&self.container).died(session.process, session.image);
    }

    /// From the connection to the welcome; no session where the peer only asked a question.
    async fn greet(&self, stream: &mut Stream) -> Result<Option<Session>, Hangup> {
        let (process, life) = match self.peer(stream) {
            Some(peer) => peer,
            None => return goodbye(stream, RejectReason::Identity).await,
        };
        let first = tokio::time::timeout(HELLO_TIMEOUT, read(stream))
            .await
            .map_err(|_| Hangup::Silent)??;
        let (version, image, holdings) = match first {
            Request::Hello {
                version,
                image,
                holdings,
            } => (version, image, holdings),
            Request::Query { version, account } => {
                self.report(stream, process.pid, version, &account).await?;
                return Ok(None);
            }
            Request::Retained(question) => {
                self.keep(stream, process, question).await?;
                return Ok(None);
            }
            Request::Token(question) => {
                self.token(stream, process, question).await?;
                return Ok(None);
            }
            _ => return Err(Hangup::OutOfOrder),
        };
        if version < OLDEST_VERSION {
            return goodbye(stream, RejectReason::Version).await;
        }
        // An exec keeps the pid that the log names.
        self.bell.log_read().await;
        self.turn().await;
        let admitted = self.paid(|| {
            let membership = self.membership.as_ref();
            lock(&self.container).hello(process, image, version, &holdings, membership)
        });
        let Admitted {
            welcome,
            page,
            change,
            ended,
            replaced,
        } = match admitted {
            Ok(admitted) => admitted,
            Err(reason) => return goodbye(stream, reason).await,
        };
        if let Some(desk) = self.desk.as_ref().filter(|_| replaced) {
            desk.ended(process).await;
        }
        self.recorded(change).await;
        let session = Session {
            process,
            image,
            life,
            ended,
        };
        // From here on the process is known: whatever becomes of the welcome, its death counts.
        let sent = tokio::time::timeout(ANSWER_TIMEOUT, send_with(stream, &welcome, page)).await;
        if !matches!(sent, Ok(Ok(()))) {
            tracing::debug!(pid = process.pid, "welcome not taken");
        }
        Ok(Some(session))
    }

    /// Answers a query.
    async fn report(
        &self,
        stream: &mut Stream,
        pid: u32,
        version: u16,
        account: &messages::Account,
    ) -> Result<(), Hangup> {
        if version < OLDEST_VERSION {
            return goodbye(stream, RejectReason::Version).await;
        }
        self.turn().await;
        let membership = self.membership.as_ref();
        let asked = self.paid(|| lock(&self.container).query(pid, account, membership));
        match asked {
            Ok(usage) => {
                let frame = usage.frame();
                let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
                Ok(())
            }
            Err(reason) => goodbye(stream, reason).await,
        }
    }

    /// Passes a question about kept memory on, and the answer back.
    async fn keep(
        &self,
        stream: &mut Stream,
        process: Process,
        question: RetainedRequest,
    ) -> Result<(), Hangup> {
        let asked = self.asked(process, question.version(), question.account());
        let (answer, fd) = match (asked.await, &self.desk) {
            (Ok(allocation), Some(desk)) => {
                let asker = Asker {
                    allocation,
                    process,
                };
                let (early, made) = oneshot::channel();
                let early = (question.version() >= CREATED_SINCE).then_some(early);
                let ((), Reply { answer, fd }) =
                    tokio::join!(hand_over(stream, made), desk.ask(asker, question, early));
                (Response::Retained(answer), fd)
            }
            (Ok(_), None) => {
                let why = RetainedRefusal::Unavailable;
                (Response::Retained(RetainedResponse::Refused(why)), None)
            }
            (Err(NotAsked::Fenced), _) => {
                let why = RetainedRefusal::Fenced;
                (Response::Retained(RetainedResponse::Refused(why)), None)
            }
            (Err(NotAsked::Unwelcome(reason)), _) => return goodbye(stream, reason).await,
        };
        let sent = async {
            match fd {
                Some(fd) => send_with(stream, &answer, fd).await,
                None => stream.write_all(&answer.frame()).await,
            }
        };
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, sent).await;
        Ok(())
    }

    /// Passes a question about a token on, and the answer back.
    async fn token(
        &self,
        stream: &mut Stream,
        process: Process,
        question: TokenRequest,
    ) -> Result<(), Hangup> {
        let asked = self.asked(process, question.version(), question.account());
        let answer = match (asked.await, &self.desk) {
            (Ok(allocation), Some(desk)) => {
                let asker = Asker {
                    allocation,
                    process,
                };
                desk.ask_token(asker, question).await
            }
            (Ok(_), None) => TokenResponse::Refused(TokenRefusal::Unavailable),
            (Err(NotAsked::Fenced), _) => TokenResponse::Refused(TokenRefusal::AskerFenced),
            (Err(NotAsked::Unwelcome(reason)), _) => return goodbye(stream, reason).await,
        };
        let frame = Response::Token(answer).frame();
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
        Ok(())
    }

    /// The allocation that a process may ask at the desk for, in the container's pace.
    async fn asked(
        &self,
        process: Process,
        version: u16,
        gpu: Option<&messages::Account>,
    ) -> Result<AllocationId, NotAsked> {
        if version < OLDEST_VERSION {
            return Err(NotAsked::Unwelcome(RejectReason::Version));
        }
        self.turn().await;
        let membership = self.membership.as_ref();
        self.paid(|| lock(&self.container).may_ask(process.pid, gpu, membership))
    }

    /// The process that connected, pinned by a pidfd. Taken in this order: the pidfd first, then
    /// what `/proc` says, so that both are of one process.
    fn peer(&self, stream: &Stream) -> Option<(Process, Life)> {
        let pid = stream.peer_pid()?;
        let life = Life::of(pid).ok()?;
        Some((self.membership.process(pid)?, life))
    }

    /// Answers requests for as long as the peer makes sense.
    async fn serve(
        &self,
        stream: &mut Stream,
        pid: u32,
    ) -> Result<std::convert::Infallible, Hangup> {
        let mut own = Pace::of_messages(MESSAGE_BURST);
        loop {
            let message = read(stream).await?;
            // First its own, so that who floods uses up its own budget and not its siblings'.
            rate_limit::wait(own.take(Instant::now())).await;
            self.turn().await;
            let heard = Instant::now();
            if let Request::Credit { account, units } = message {
                let settles = || lock(&self.container).is_settling(pid, account, units, heard);
                while self.paid(settles) {
                    tokio::time::sleep(SETTLE_PAUSE).await;
                }
            }
            let able = matches!(
                message,
                Request::Poisoned {
                    can_reexec: true,
                    ..
                }
            ) && self.is_main(pid);
            let answer = match message {
                Request::Credit { account, units } => {
                    let (change, answered) =
                        self.paid(|| lock(&self.container).ask(pid, account, units));
                    self.recorded(change).await;
                    answered.await.ok()
                }
                Request::Refresh => {
                    let change = self.paid(|| {
                        let mut container = lock(&self.container);
                        container.asks_refresh(pid)
                    });
                    if let Some(change) = change {
                        self.recorded(change).await;
                    }
                    Some(Response::Refreshed)
                }
                Request::Denied {
                    account,
                    bytes,
                    function,
                } => {
                    lock(&self.container).denied(pid, account, bytes, &function);
                    None
                }
                Request::ContextMade { account } => {
                    Some(lock(&self.container).context_made(pid, account))
                }
                Request::Poisoned { account, code, .. } => {
                    self.bell.ring();
                    let poisoned = || {
                        let now = clock::present();
                        lock(&self.container).poisoned(pid, account, code, able, now)
                    };
                    Some(self.paid(poisoned))
                }
                Request::Hello { .. }
                | Request::Query { .. }
                | Request::Retained(_)
                | Request::Token(_) => return Err(Hangup::OutOfOrder),
            };
            if let Some(answer) = answer {
                // A peer that reads late is not the agent's doing.
                let took = heard.elapsed();
                let sent = stream.write_all(&answer.frame()).await;
                sent.map_err(Hangup::Unsent)?;
                // A shim that waited too long goes without, and the program is out of memory.
                if took > LATE
                    && let Some(untold) = self.told.due("late", Instant::now())
                {
                    tracing::warn!(
                        pid,
                        ?took,
                        ?answer,
                        untold,
                        "answered a tenant process late"
                    );
                }
            }
        }
    }
}

impl Conversation {
    /// Waits for the container's turn.
    async fn turn(&self) {
        let wait = lock(&self.shared).take(Instant::now());
        rate_limit::wait(wait).await;
    }

    /// Does work that the container pays for.
    fn paid<T>(&self, work: impl FnOnce() -> T) -> T {
        let (came_to, took) = rate_limit::measured(work);
        lock(&self.shared).settle(took, Instant::now());
        came_to
    }

    /// Waits until a change is on record.
    async fn recorded(&self, change: Change) {
        let record = || lock(&self.container).recorded(change, Instant::now());
        while let Some(wait) = self.paid(record) {
            tokio::time::sleep(wait).await;
        }
    }

    /// Whether a process is the container's main one. Without the lock: it reads files.
    fn is_main(&self, pid: u32) -> bool {
        let container = lock(&self.container);
        let (first, pod) = (container.first_of_namespace(pid), container.pod().clone());
        drop(container);
        first.is_some_and(|process| self.membership.is_begun_outside(process, &pod))
    }
}

/// Waits for the death of a process that the record knows.
pub(super) async fn mourn(
    container: Arc<Mutex<Container>>,
    process: Process,
    image: u64,
    ended: CancellationToken,
) {
    if let Ok(life) = Life::of(process.pid) {
        tokio::select! {
            () = ended.cancelled() => return,
            () = life.ended() => {}
        }
    }
    lock(&container).died(process, image);
}

async fn goodbye<T>(stream: &mut Stream, reason: RejectReason) -> Result<T, Hangup> {
    let frame = Response::Rejected { reason }.frame();
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
    Err(Hangup::Unwelcome(reason))
}

async fn read(stream: &mut Stream) -> Result<Request, Hangup> {
    let mut header = [0; messages::HEADER];
    stream.read_exact(&mut header).await?;
    let mut payload = vec![0; messages::payload_length(header)?];
    stream.read_exact(&mut payload).await?;
    Ok(Request::parse(&payload)?)
}

/// Sends the memory of a lease that the vault does not have yet, where one is made.
async fn hand_over(stream: &mut Stream, made: oneshot::Receiver<Made>) {
    if let Ok(Made { bytes, fd }) = made.await {
        let made = Response::Retained(RetainedResponse::Created { bytes: bytes.0 });
        // Who does not take it gets the answer, and no lease.
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, send_with(stream, &made, fd)).await;
    }
}

async fn send_with(stream: &mut Stream, message: &Response, fd: impl AsFd) -> io::Result<()> {
    stream.write_with(&message.frame(), fd).await
}
