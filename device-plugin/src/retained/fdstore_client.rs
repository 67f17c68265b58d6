//! Talks to the vault: a thread of its own, one message at a time, each answered within a deadline.
//!
//! Each connection has a number, and so has everything that is to be said on it. What was meant for an earlier one
//! is not said on a later one: between the two the vault may have lost all that it had, and what it has then is
//! known first ([`News::Heard`]).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::units::LeaseId;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::fdstore::{
    Blob, FdStoreRequest, FdStoreResponse, Refusal, StoredLease, VERSION,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, info};

/// How long the vault may take for one message; it does nothing that waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection that has ended may go unnoticed: ten looks at a GPU take longer.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// From one try to connect to the next.
const RECONNECT_DELAY: Duration = Duration::from_millis(250);

/// Why the vault did not do what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FdStoreError {
    /// It is away, or was in between: what became of it shows once it is back.
    #[error("the vault is away")]
    Disconnected,
    /// It refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What becomes of the vault.
#[derive(Debug)]
pub enum StoreEvent {
    /// It is there.
    Connected {
        /// The connection.
        connection: Connection,
        /// The leases that it has.
        leases: BTreeMap<LeaseId, Blob>,
        /// How many it can hold in all.
        capacity: usize,
    },
    /// It is away.
    Lost,
}

/// One thing to say.
struct Call {
    connection: u64,
    message: FdStoreRequest,
    fd: Option<OwnedFd>,
    reply: oneshot::Sender<CallResult>,
}

type CallResult = Result<(FdStoreResponse, Option<OwnedFd>), FdStoreError>;

/// One connection to the vault. What is said is said in the order of the calls, whoever waits for the answers.
#[derive(Clone, Debug)]
pub struct Connection {
    number: u64,
    calls: Sender<Call>,
}

impl Connection {
    /// Hands over a descriptor.
    pub fn put(
        &self,
        lease: LeaseId,
        blob: Blob,
        fd: OwnedFd,
    ) -> impl Future<Output = Result<(), FdStoreError>> + use<> {
        let lease = lease.0;
        let answer = self.call(FdStoreRequest::Put { lease, blob }, Some(fd));
        async move { answer.await.map(drop) }
    }

    /// Replaces what is kept beside a descriptor.
    pub fn update(
        &self,
        lease: LeaseId,
        blob: Blob,
    ) -> impl Future<Output = Result<(), FdStoreError>> + use<> {
        let lease = lease.0;
        let answer = self.call(FdStoreRequest::Update { lease, blob }, None);
        async move { answer.await.map(drop) }
    }

    /// A duplicate of a descriptor.
    pub fn get(
        &self,
        lease: LeaseId,
    ) -> impl Future<Output = Result<OwnedFd, FdStoreError>> + use<> {
        let answer = self.call(FdStoreRequest::Get { lease: lease.0 }, None);
        async move { answer.await?.1.ok_or(FdStoreError::Disconnected) }
    }

    /// Has a descriptor closed.
    pub fn close(&self, lease: LeaseId) -> impl Future<Output = Result<(), FdStoreError>> + use<> {
        let answer = self.call(FdStoreRequest::Drop { lease: lease.0 }, None);
        async move { answer.await.map(drop) }
    }

    /// Queued when this returns.
    fn call(
        &self,
        message: FdStoreRequest,
        fd: Option<OwnedFd>,
    ) -> impl Future<Output = CallResult> + use<> {
        let (reply, answer) = oneshot::channel();
        let call = Call {
            connection: self.number,
            message,
            fd,
            reply,
        };
        // Where its thread has ended the answer says so.
        let _ = self.calls.send(call);
        async move { answer.await.unwrap_or(Err(FdStoreError::Disconnected)) }
    }
}

/// Looks for the vault at `socket` for as long as its news are taken.
///
/// # Errors
/// The thread cannot be started.
pub fn start(socket: PathBuf) -> io::Result<mpsc::UnboundedReceiver<StoreEvent>> {
    let (told, news) = mpsc::unbounded_channel();
    let (calls, called) = channel();
    let thread = ClientThread {
        socket,
        events: told,
        calls,
        queue: called,
        connection: 0,
    };
    std::thread::Builder::new()
        .name("vault".to_owned())
        .spawn(move || thread.run())?;
    Ok(news)
}

struct ClientThread {
    socket: PathBuf,
    events: mpsc::UnboundedSender<StoreEvent>,
    calls: Sender<Call>,
    queue: Receiver<Call>,
    /// The number of the connection.
    connection: u64,
}

impl ClientThread {
    fn run(mut self) {
        while !self.events.is_closed() {
            self.connection += 1;
            let begun = self.connect();
            match begun {
                Ok((stream, held, most)) => {
                    info!(leases = held.len(), most, "vault heard");
                    let line = Connection {
                        number: self.connection,
                        calls: self.calls.clone(),
                    };
                    if self
                        .events
                        .send(StoreEvent::Connected {
                            connection: line,
                            leases: held,
                            capacity: most,
                        })
                        .is_err()
                    {
                        return;
                    }
                    let ended = self.serve(&stream);
                    info!(error = %ended, "vault lost");
                    let _ = self.events.send(StoreEvent::Lost);
                }
                Err(error) => debug!(%error, "no vault"),
            }
            self.fail_calls_for(RECONNECT_DELAY);
        }
    }

    /// A connection, all that the vault has, and how much it can hold.
    fn connect(&self) -> io::Result<(UnixStream, BTreeMap<LeaseId, Blob>, usize)> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        let most = match send_request(&stream, &FdStoreRequest::Hello { version: VERSION }, None)?.0
        {
            FdStoreResponse::Ready { leases, room, .. } => leases.saturating_add(room) as usize,
            other => return Err(io::Error::other(format!("no welcome: {other:?}"))),
        };
        let (mut held, mut from) = (BTreeMap::new(), 0);
        loop {
            let FdStoreResponse::Listed { leases } =
                send_request(&stream, &FdStoreRequest::List { from }, None)?.0
            else {
                return Err(io::Error::other("no list"));
            };
            let Some(last) = leases.last().map(|entry| entry.lease) else {
                return Ok((stream, held, most));
            };
            let leases = leases.into_iter();
            held.extend(leases.map(|StoredLease { lease, blob }| (LeaseId(lease), blob)));
            let Some(next) = last.checked_add(1).filter(|next| *next > from) else {
                return Ok((stream, held, most));
            };
            from = next;
        }
    }

    /// Until the connection fails: why.
    fn serve(&self, stream: &UnixStream) -> io::Error {
        loop {
            match self.queue.recv_timeout(POLL_INTERVAL) {
                Ok(call) if call.connection != self.connection => fail_call(call),
                Ok(Call {
                    message, fd, reply, ..
                }) => match send_request(stream, &message, fd) {
                    Ok((FdStoreResponse::Refused(refusal), _)) => {
                        let _ = reply.send(Err(refusal.into()));
                    }
                    Ok(answer) => {
                        let _ = reply.send(Ok(answer));
                    }
                    Err(error) => {
                        let _ = reply.send(Err(FdStoreError::Disconnected));
                        return error;
                    }
                },
                Err(RecvTimeoutError::Timeout) => {
                    if self.events.is_closed() {
                        return io::Error::other("nobody listens");
                    }
                    if let Err(error) = ensure_idle(stream) {
                        return error;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return io::Error::other("nobody asks"),
            }
        }
    }

    /// Nothing is said for so long.
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

fn send_request(
    stream: &UnixStream,
    message: &FdStoreRequest,
    fd: Option<OwnedFd>,
) -> io::Result<(FdStoreResponse, Option<OwnedFd>)> {
    send_message(stream, message, fd.as_ref().map(AsFd::as_fd))?;
    receive_message(stream)
}

/// A vault that says something unasked, or hangs up, is none.
fn ensure_idle(stream: &UnixStream) -> io::Result<()> {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut fds, Some(&Timespec::default()))? {
        0 => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
