//! Talks to the fd store from a thread of its own: one message at a time, each with a deadline.
//!
//! Each connection has a number, and each call carries the number of the connection that it is for.
//! The thread fails a call for an earlier connection: the fd store may have lost everything in
//! between. The agent learns what the fd store has before it calls again
//! ([`StoreEvent::Connected`]).
//!
//! Without calls the thread asks each [`LOOK_INTERVAL`] whether the fd store answers, and continues
//! one that a signal has stopped. It ends none: all retained memory would be lost.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use bursar_host::procfs;
use bursar_ledger::units::LeaseId;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::fdstore::{
    Blob, FdStoreRequest, FdStoreResponse, Refusal, StoredLease, VERSION,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, info, warn};

/// The deadline of one message. The fd store waits for nothing while it answers.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the thread checks that the connection is open. The proof that memory is free samples
/// the driver for longer than this.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

const RECONNECT_DELAY: Duration = Duration::from_millis(250);

/// The pause between two questions to an fd store without calls.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// The process name of the fd store.
const PROGRAM: &str = "bursar-fdstore";

/// Why a call to the fd store failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FdStoreError {
    /// The connection was lost. The next connection tells whether the fd store carried the call
    /// out.
    #[error("the fd store is not connected")]
    Disconnected,
    /// The fd store refused the call.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A change of the connection to the fd store.
#[derive(Debug)]
pub enum StoreEvent {
    /// The agent is connected.
    Connected {
        /// The connection for further calls.
        connection: Connection,
        /// The leases that the fd store has.
        leases: BTreeMap<LeaseId, Blob>,
        /// How many leases the fd store can have in all.
        capacity: usize,
    },
    /// The connection is lost.
    Lost,
}

struct Call {
    connection: u64,
    message: FdStoreRequest,
    fd: Option<OwnedFd>,
    /// Notified once the message is in the fd store's socket.
    sent: Option<oneshot::Sender<()>>,
    reply: oneshot::Sender<CallResult>,
}

/// A descriptor that was sent to the fd store.
///
/// The message waits in the fd store's socket, so the fd store gets the descriptor even if the
/// agent exits.
pub struct SentDescriptor {
    answer: oneshot::Receiver<CallResult>,
}

impl SentDescriptor {
    /// Waits until the fd store has acknowledged the descriptor.
    ///
    /// # Errors
    /// The fd store refused the descriptor, or the connection was lost.
    pub async fn stored(self) -> Result<(), FdStoreError> {
        receive_answer(self.answer).await.map(drop)
    }
}

type CallResult = Result<(FdStoreResponse, Option<OwnedFd>), FdStoreError>;

/// One connection to the fd store. The fd store gets calls in their order, whichever answer is
/// awaited first.
#[derive(Clone, Debug)]
pub struct Connection {
    number: u64,
    /// The version of the protocol that the fd store and this agent speak.
    version: u16,
    calls: Sender<Call>,
}

impl Connection {
    /// Tells this connection from earlier and later ones.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Sends a descriptor with its blob, and does not wait for the fd store.
    ///
    /// # Errors
    /// The connection is lost, and the fd store may have the descriptor; or the fd store's version
    /// has no such message.
    pub async fn put(
        &self,
        lease: LeaseId,
        blob: Blob,
        fd: OwnedFd,
    ) -> Result<SentDescriptor, FdStoreError> {
        let put = FdStoreRequest::Put {
            lease: lease.0,
            blob,
        };
        let (sent, is_sent) = oneshot::channel();
        let answer = self.queue(put, Some(fd), Some(sent))?;
        is_sent.await.map_err(|_| FdStoreError::Disconnected)?;
        Ok(SentDescriptor { answer })
    }

    /// Replaces the blob of a lease.
    pub fn update(
        &self,
        lease: LeaseId,
        blob: Blob,
    ) -> impl Future<Output = Result<(), FdStoreError>> + use<> {
        let lease = lease.0;
        let answer = self.call(FdStoreRequest::Update { lease, blob });
        async move { answer.await.map(drop) }
    }

    /// Returns a duplicate of a lease's descriptor.
    pub fn get(
        &self,
        lease: LeaseId,
    ) -> impl Future<Output = Result<OwnedFd, FdStoreError>> + use<> {
        let answer = self.call(FdStoreRequest::Get { lease: lease.0 });
        async move { answer.await?.1.ok_or(FdStoreError::Disconnected) }
    }

    /// Lets the fd store close a lease's descriptor.
    pub fn close(&self, lease: LeaseId) -> impl Future<Output = Result<(), FdStoreError>> + use<> {
        let answer = self.call(FdStoreRequest::Drop { lease: lease.0 });
        async move { answer.await.map(drop) }
    }

    /// Queues a call. The returned future waits for its answer.
    fn call(&self, message: FdStoreRequest) -> impl Future<Output = CallResult> + use<> {
        let queued = self.queue(message, None, None);
        async move { receive_answer(queued?).await }
    }

    fn queue(
        &self,
        message: FdStoreRequest,
        fd: Option<OwnedFd>,
        sent: Option<oneshot::Sender<()>>,
    ) -> Result<oneshot::Receiver<CallResult>, Refusal> {
        message.ensure_known_by(self.version)?;
        let (reply, answer) = oneshot::channel();
        let call = Call {
            connection: self.number,
            message,
            fd,
            sent,
            reply,
        };
        // A call to a thread that has exited is answered by the dropped reply channel.
        let _ = self.calls.send(call);
        Ok(answer)
    }
}

async fn receive_answer(answer: oneshot::Receiver<CallResult>) -> CallResult {
    answer.await.unwrap_or(Err(FdStoreError::Disconnected))
}

/// Connects to the fd store at `socket` until the receiver of the events is dropped.
///
/// # Errors
/// The thread cannot be started.
pub fn start(socket: PathBuf) -> io::Result<mpsc::UnboundedReceiver<StoreEvent>> {
    let (events, receiver) = mpsc::unbounded_channel();
    let (calls, queue) = channel();
    let thread = ClientThread {
        socket,
        events,
        calls,
        queue,
        connection: 0,
    };
    std::thread::Builder::new()
        .name("fd-store-client".to_owned())
        .spawn(move || thread.run())?;
    Ok(receiver)
}

struct ClientThread {
    socket: PathBuf,
    events: mpsc::UnboundedSender<StoreEvent>,
    calls: Sender<Call>,
    queue: Receiver<Call>,
    /// The number of the current connection.
    connection: u64,
}

impl ClientThread {
    fn run(mut self) {
        let mut is_away = false;
        while !self.events.is_closed() {
            self.connection += 1;
            let connected = self.connect();
            match connected {
                Ok((stream, version, stored, capacity)) => {
                    info!(
                        version,
                        leases = stored.len(),
                        capacity,
                        "fd store connected"
                    );
                    is_away = false;
                    let connection = Connection {
                        number: self.connection,
                        version,
                        calls: self.calls.clone(),
                    };
                    if self
                        .events
                        .send(StoreEvent::Connected {
                            connection,
                            leases: stored,
                            capacity,
                        })
                        .is_err()
                    {
                        return;
                    }
                    let ended = self.serve(&stream);
                    info!(error = %ended, "fd store disconnected");
                    continue_silent(&stream, &ended);
                    let _ = self.events.send(StoreEvent::Lost);
                }
                // One line for each outage.
                Err(error) if is_away => debug!(%error, "failed to connect to the fd store"),
                Err(error) => {
                    warn!(%error, "failed to connect to the fd store; trying again: if its version is not the agent's, delete its pod, which ends all retained memory");
                    is_away = true;
                }
            }
            self.fail_calls_for(RECONNECT_DELAY);
        }
    }

    /// Connects; returns the version to speak, the leases that the fd store has and its capacity.
    fn connect(&self) -> io::Result<(UnixStream, u16, BTreeMap<LeaseId, Blob>, usize)> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        let silent = |error: &io::Error| continue_silent(&stream, error);
        let (version, stored, capacity) = greet(&stream).inspect_err(silent)?;
        Ok((stream, version, stored, capacity))
    }

    /// Serves calls until the connection fails; returns the error.
    fn serve(&self, stream: &UnixStream) -> io::Error {
        let mut heard = Instant::now();
        loop {
            match self.queue.recv_timeout(POLL_INTERVAL) {
                Ok(call) if call.connection != self.connection => fail_call(call),
                Ok(call) => {
                    if let Err(error) = carry_out(stream, call) {
                        return error;
                    }
                    heard = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {
                    if self.events.is_closed() {
                        return io::Error::other("the receiver of events was dropped");
                    }
                    if let Err(error) = ensure_idle(stream) {
                        return error;
                    }
                    if heard.elapsed() >= LOOK_INTERVAL {
                        if let Err(error) = look(stream) {
                            return error;
                        }
                        heard = Instant::now();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return io::Error::other("the senders of calls were dropped");
                }
            }
        }
    }

    /// Fails every call that arrives within `pause`.
    fn fail_calls_for(&self, pause: Duration) {
        let until = std::time::Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(std::time::Instant::now()) {
            match self.queue.recv_timeout(left) {
                Ok(call) => fail_call(call),
                Err(_) => return,
            }
        }
    }
}

fn fail_call(call: Call) {
    let _ = call.reply.send(Err(FdStoreError::Disconnected));
}

/// Sends a call and forwards its answer. The error is that of the connection.
fn carry_out(stream: &UnixStream, call: Call) -> io::Result<()> {
    let Call {
        connection: _,
        message,
        fd,
        sent,
        reply,
    } = call;
    let exchange = || {
        send_message(stream, &message, fd.as_ref().map(AsFd::as_fd))?;
        if let Some(sent) = sent {
            // The caller may have given up.
            let _ = sent.send(());
        }
        receive_message(stream)
    };
    let (answer, ended) = match exchange() {
        Ok((FdStoreResponse::Refused(refusal), _)) => (Err(refusal.into()), Ok(())),
        Ok(answer) => (Ok(answer), Ok(())),
        Err(error) => (Err(FdStoreError::Disconnected), Err(error)),
    };
    let _ = reply.send(answer);
    ended
}

/// Says hello; returns the version to speak, the leases that the fd store has and its capacity.
fn greet(stream: &UnixStream) -> io::Result<(u16, BTreeMap<LeaseId, Blob>, usize)> {
    let hello = FdStoreRequest::Hello { version: VERSION };
    let (version, capacity) = match send_request(stream, VERSION, &hello)?.0 {
        FdStoreResponse::Ready {
            version,
            leases,
            room,
        } => (version.min(VERSION), leases.saturating_add(room) as usize),
        FdStoreResponse::Refused(refusal) => return Err(io::Error::other(refusal)),
        other => {
            return Err(io::Error::other(format!(
                "unexpected response to hello: {other:?}"
            )));
        }
    };
    let (mut stored, mut from) = (BTreeMap::new(), 0);
    loop {
        let FdStoreResponse::Listed { leases } =
            send_request(stream, version, &FdStoreRequest::List { from })?.0
        else {
            return Err(io::Error::other("unexpected response to list"));
        };
        let Some(last) = leases.last().map(|entry| entry.lease) else {
            return Ok((version, stored, capacity));
        };
        let leases = leases.into_iter();
        stored.extend(leases.map(|StoredLease { lease, blob }| (LeaseId(lease), blob)));
        let Some(next) = last.checked_add(1).filter(|next| *next > from) else {
            return Ok((version, stored, capacity));
        };
        from = next;
    }
}

/// Sends a message of the connection's start, if an fd store of `version` has it.
fn send_request(
    stream: &UnixStream,
    version: u16,
    message: &FdStoreRequest,
) -> io::Result<(FdStoreResponse, Option<OwnedFd>)> {
    message.ensure_known_by(version).map_err(io::Error::other)?;
    send_message(stream, message, None)?;
    receive_message(stream)
}

/// Asks for leases that there are not, which every fd store answers.
fn look(stream: &UnixStream) -> io::Result<()> {
    send_request(stream, VERSION, &FdStoreRequest::List { from: u64::MAX }).map(drop)
}

/// Continues the fd store behind `stream` if it left a message unanswered.
fn continue_silent(stream: &UnixStream, error: &io::Error) {
    use io::ErrorKind::{TimedOut, WouldBlock};
    if !matches!(error.kind(), TimedOut | WouldBlock) {
        return;
    }
    let signal = || {
        let pid = socket_peercred(stream)?.pid;
        let pinned = procfs::pin_named(pid, PROGRAM)?;
        // While the connection is open, its process is the one that was pinned.
        ensure_idle(stream)?;
        pidfd_send_signal(pinned, Signal::CONT)?;
        Ok::<_, io::Error>(pid)
    };
    match signal() {
        Ok(pid) => warn!(%pid, "the fd store does not answer: sent it SIGCONT"),
        Err(error) => {
            warn!(%error, "the fd store does not answer: failed to send it SIGCONT");
        }
    }
}

/// Fails when the fd store has closed the connection or sent a message without a request.
fn ensure_idle(stream: &UnixStream) -> io::Result<()> {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut fds, Some(&Timespec::default()))? {
        0 => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
impl Connection {
    /// A connection that is lost.
    pub(crate) fn lost() -> Connection {
        Connection {
            number: 1,
            version: VERSION,
            calls: channel().0,
        }
    }
}

/// Fd store that has leases without descriptors.
#[cfg(test)]
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeFdStore(pub(crate) std::sync::Arc<std::sync::Mutex<BTreeMap<u64, Blob>>>);

#[cfg(test)]
impl FakeFdStore {
    /// Connects to the fd store. Its thread ends with the connection.
    pub(crate) fn connect(&self, number: u64) -> Connection {
        let (calls, queue) = channel::<Call>();
        let store = self.clone();
        std::thread::spawn(move || {
            for call in queue {
                let _ = call.sent.map(|sent| sent.send(()));
                let _ = call.reply.send(store.answer(call.message));
            }
        });
        Connection {
            number,
            version: VERSION,
            calls,
        }
    }

    fn answer(&self, request: FdStoreRequest) -> CallResult {
        let mut leases = self.0.lock().unwrap();
        let response = match request {
            FdStoreRequest::Put { lease, .. } if leases.contains_key(&lease) => {
                return Err(Refusal::Exists.into());
            }
            FdStoreRequest::Put { lease, blob } => {
                leases.insert(lease, blob);
                FdStoreResponse::Stored
            }
            FdStoreRequest::Drop { lease } => {
                leases.remove(&lease);
                FdStoreResponse::Dropped
            }
            other => panic!("{other:?}"),
        };
        Ok((response, None))
    }
}

#[cfg(test)]
mod tests;
