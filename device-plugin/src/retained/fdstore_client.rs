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
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a connection that has ended may go unnoticed: ten looks at a GPU take longer.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// From one try to connect to the next.
const RETRY: Duration = Duration::from_millis(250);

/// Why the vault did not do what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    /// It is away, or was in between: what became of it shows once it is back.
    #[error("the vault is away")]
    Away,
    /// It refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What becomes of the vault.
#[derive(Debug)]
pub enum News {
    /// It is there.
    Heard {
        /// The connection.
        line: Line,
        /// The leases that it has.
        held: BTreeMap<LeaseId, Blob>,
        /// How many it can hold in all.
        most: usize,
    },
    /// It is away.
    Lost,
}

/// One thing to say.
struct Call {
    line: u64,
    message: FdStoreRequest,
    fd: Option<OwnedFd>,
    reply: oneshot::Sender<Answer>,
}

type Answer = Result<(FdStoreResponse, Option<OwnedFd>), VaultError>;

/// One connection to the vault. What is said is said in the order of the calls, whoever waits for the answers.
#[derive(Clone, Debug)]
pub struct Line {
    number: u64,
    calls: Sender<Call>,
}

impl Line {
    /// Hands over a descriptor.
    pub fn put(
        &self,
        lease: LeaseId,
        blob: Blob,
        fd: OwnedFd,
    ) -> impl Future<Output = Result<(), VaultError>> + use<> {
        let lease = lease.0;
        let answer = self.say(FdStoreRequest::Put { lease, blob }, Some(fd));
        async move { answer.await.map(drop) }
    }

    /// Replaces what is kept beside a descriptor.
    pub fn update(
        &self,
        lease: LeaseId,
        blob: Blob,
    ) -> impl Future<Output = Result<(), VaultError>> + use<> {
        let lease = lease.0;
        let answer = self.say(FdStoreRequest::Update { lease, blob }, None);
        async move { answer.await.map(drop) }
    }

    /// A duplicate of a descriptor.
    pub fn get(&self, lease: LeaseId) -> impl Future<Output = Result<OwnedFd, VaultError>> + use<> {
        let answer = self.say(FdStoreRequest::Get { lease: lease.0 }, None);
        async move { answer.await?.1.ok_or(VaultError::Away) }
    }

    /// Has a descriptor closed.
    pub fn close(&self, lease: LeaseId) -> impl Future<Output = Result<(), VaultError>> + use<> {
        let answer = self.say(FdStoreRequest::Drop { lease: lease.0 }, None);
        async move { answer.await.map(drop) }
    }

    /// Queued when this returns.
    fn say(
        &self,
        message: FdStoreRequest,
        fd: Option<OwnedFd>,
    ) -> impl Future<Output = Answer> + use<> {
        let (reply, answer) = oneshot::channel();
        let call = Call {
            line: self.number,
            message,
            fd,
            reply,
        };
        // Where its thread has ended the answer says so.
        let _ = self.calls.send(call);
        async move { answer.await.unwrap_or(Err(VaultError::Away)) }
    }
}

/// Looks for the vault at `socket` for as long as its news are taken.
///
/// # Errors
/// The thread cannot be started.
pub fn start(socket: PathBuf) -> io::Result<mpsc::UnboundedReceiver<News>> {
    let (told, news) = mpsc::unbounded_channel();
    let (calls, called) = channel();
    let thread = Thread {
        socket,
        told,
        calls,
        called,
        line: 0,
    };
    std::thread::Builder::new()
        .name("vault".to_owned())
        .spawn(move || thread.run())?;
    Ok(news)
}

struct Thread {
    socket: PathBuf,
    told: mpsc::UnboundedSender<News>,
    calls: Sender<Call>,
    called: Receiver<Call>,
    /// The number of the connection.
    line: u64,
}

impl Thread {
    fn run(mut self) {
        while !self.told.is_closed() {
            self.line += 1;
            let begun = self.connect();
            match begun {
                Ok((stream, held, most)) => {
                    info!(leases = held.len(), most, "vault heard");
                    let line = Line {
                        number: self.line,
                        calls: self.calls.clone(),
                    };
                    if self.told.send(News::Heard { line, held, most }).is_err() {
                        return;
                    }
                    let ended = self.serve(&stream);
                    info!(error = %ended, "vault lost");
                    let _ = self.told.send(News::Lost);
                }
                Err(error) => debug!(%error, "no vault"),
            }
            self.refuse_for(RETRY);
        }
    }

    /// A connection, all that the vault has, and how much it can hold.
    fn connect(&self) -> io::Result<(UnixStream, BTreeMap<LeaseId, Blob>, usize)> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let most = match ask(&stream, &FdStoreRequest::Hello { version: VERSION }, None)?.0 {
            FdStoreResponse::Ready { leases, room, .. } => leases.saturating_add(room) as usize,
            other => return Err(io::Error::other(format!("no welcome: {other:?}"))),
        };
        let (mut held, mut from) = (BTreeMap::new(), 0);
        loop {
            let FdStoreResponse::Listed { leases } =
                ask(&stream, &FdStoreRequest::List { from }, None)?.0
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
            match self.called.recv_timeout(LOOK_EVERY) {
                Ok(call) if call.line != self.line => refuse(call),
                Ok(Call {
                    message, fd, reply, ..
                }) => match ask(stream, &message, fd) {
                    Ok((FdStoreResponse::Refused(refusal), _)) => {
                        let _ = reply.send(Err(refusal.into()));
                    }
                    Ok(answer) => {
                        let _ = reply.send(Ok(answer));
                    }
                    Err(error) => {
                        let _ = reply.send(Err(VaultError::Away));
                        return error;
                    }
                },
                Err(RecvTimeoutError::Timeout) => {
                    if self.told.is_closed() {
                        return io::Error::other("nobody listens");
                    }
                    if let Err(error) = quiet(stream) {
                        return error;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return io::Error::other("nobody asks"),
            }
        }
    }

    /// Nothing is said for so long.
    fn refuse_for(&self, pause: Duration) {
        let until = std::time::Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(std::time::Instant::now()) {
            match self.called.recv_timeout(left) {
                Ok(call) => refuse(call),
                Err(_) => return,
            }
        }
    }
}

fn refuse(call: Call) {
    let _ = call.reply.send(Err(VaultError::Away));
}

fn ask(
    stream: &UnixStream,
    message: &FdStoreRequest,
    fd: Option<OwnedFd>,
) -> io::Result<(FdStoreResponse, Option<OwnedFd>)> {
    send_message(stream, message, fd.as_ref().map(AsFd::as_fd))?;
    receive_message(stream)
}

/// A vault that says something unasked, or hangs up, is none.
fn quiet(stream: &UnixStream) -> io::Result<()> {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut fds, Some(&Timespec::default()))? {
        0 => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
