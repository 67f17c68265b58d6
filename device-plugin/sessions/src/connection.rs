//! Serves one process's connection: the hello, then requests until the process exits or says hello
//! again. A connection may also carry a single query.

mod one_shot;
mod requests;

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bursar_protocol::messages::{self, HeldCredit, Message, RejectReason, Request, Response};
use tokio_util::sync::CancellationToken;

use super::container::denials::SharedLogLimiter;
use super::container::{Admission, Container};
use super::fault_notifier::FaultNotifier;
use super::pidfd::ProcessExit;
use super::rate_limit::{self, RateLimiter};
use super::stream::PeerStream;
use super::{ContainerResolver, Process, lock};
use crate::lease_handle::LeaseHandle;

/// How long a peer may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a peer may take to make room in its socket for the answer to a hello.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The oldest protocol version that the agent serves.
const OLDEST_VERSION: u16 = 1;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("failed to send an answer: {0}")]
    NotTaken(#[source] io::Error),
    #[error("{0}")]
    Decode(#[from] messages::DecodeError),
    #[error("received no hello in time")]
    HelloTimeout,
    #[error("rejected the peer: {0:?}")]
    Rejected(RejectReason),
    #[error("received a message out of order")]
    OutOfOrder,
    #[error("the peer closed its connection before the welcome")]
    HungUp,
}

/// The connection of one peer.
pub(super) struct Connection {
    container: Arc<Mutex<Container>>,
    resolver: Arc<dyn ContainerResolver>,
    /// Limits the messages of all processes of the container together: each costs time that grows
    /// with their number.
    rate_limiter: Arc<Mutex<RateLimiter>>,
    fault_notifier: FaultNotifier,
    /// `None` where the node has no retained memory.
    lease_service: Option<LeaseHandle>,
    log_limiter: SharedLogLimiter,
}

/// A peer that has said hello.
struct Session {
    process: Process,
    image: u64,
    exit: ProcessExit,
    superseded: CancellationToken,
}

impl Connection {
    pub(super) fn new(
        container: Arc<Mutex<Container>>,
        resolver: Arc<dyn ContainerResolver>,
        rate_limiter: Arc<Mutex<RateLimiter>>,
        fault_notifier: FaultNotifier,
        lease_service: Option<LeaseHandle>,
        log_limiter: SharedLogLimiter,
    ) -> Connection {
        Connection {
            container,
            resolver,
            rate_limiter,
            fault_notifier,
            lease_service,
            log_limiter,
        }
    }

    /// Serves the connection until the process exits, or says hello on another connection.
    pub(super) async fn run(self, mut stream: PeerStream) {
        let session = match self.handshake(&mut stream).await {
            Ok(Some(session)) => session,
            Ok(None) => return,
            Err(error) => return tracing::debug!(%error, "rejected a peer"),
        };
        tokio::select! {
            // An exit that arrives together with a last request comes first.
            biased;
            () = session.superseded.cancelled() => return,
            () = session.exit.wait() => {}
            Err(error) = self.serve_requests(&mut stream, session.process.pid) => {
                // A closed socket ends nothing: the process may live on with its grants, or a child
                // may keep the socket long after its exit.
                tracing::debug!(pid = session.process.pid, %error, "peer closed its connection");
                if !matches!(error, ConnectionError::NotTaken(_)) {
                    lock(&self.container).handle_disconnect(session.process, session.image);
                }
                drop(stream);
                tokio::select! {
                    () = session.superseded.cancelled() => return,
                    () = session.exit.wait() => {}
                }
            }
        }
        lock(&self.container).handle_exit(session.process, session.image);
    }

    /// Handles the first message, up to the welcome. Returns no session where the peer sent a
    /// single query.
    async fn handshake(&self, stream: &mut PeerStream) -> Result<Option<Session>, ConnectionError> {
        let (process, exit) = match self.resolve_peer(stream) {
            Some(peer) => peer,
            None => return reject(stream, RejectReason::Identity).await,
        };
        let first = tokio::time::timeout(HELLO_TIMEOUT, read_request(stream))
            .await
            .map_err(|_| ConnectionError::HelloTimeout)??;
        let (version, image, holdings) = match first {
            Request::Hello {
                version,
                image,
                holdings,
            } => (version, image, holdings),
            request => {
                self.answer_once(stream, process, request).await?;
                return Ok(None);
            }
        };
        if version < OLDEST_VERSION {
            return reject(stream, RejectReason::Version).await;
        }
        let Admission {
            welcome,
            change,
            process: admitted,
        } = self
            .admit(stream, process, image, version, &holdings)
            .await?;
        if let (Some(lease_service), Some(_)) = (&self.lease_service, &admitted.replaced) {
            lease_service.process_ended(process).await;
        }
        self.wait_recorded(Some(change)).await;
        let session = Session {
            process,
            image,
            exit,
            superseded: admitted.superseded,
        };
        // From here on the agent knows the process, so that its exit counts even if the welcome is
        // lost.
        let sent = tokio::time::timeout(
            ANSWER_TIMEOUT,
            send_with_descriptor(stream, &welcome, admitted.page),
        )
        .await;
        if !matches!(sent, Ok(Ok(()))) {
            tracing::debug!(pid = process.pid, "failed to send the welcome");
        }
        Ok(Some(session))
    }

    /// Admits a process that has said hello, or rejects it.
    async fn admit(
        &self,
        stream: &mut PeerStream,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
    ) -> Result<Admission, ConnectionError> {
        self.wait_turn().await;
        // An exec keeps the pid that the kernel log names.
        self.fault_notifier.wait_kmsg_drained().await;
        // A process that no longer waits goes on with its former page.
        if stream.has_hung_up() {
            return Err(ConnectionError::HungUp);
        }
        let admitted = self.run_charged(|| {
            let resolver = self.resolver.as_ref();
            lock(&self.container).handle_hello(process, image, version, holdings, resolver)
        });
        match admitted {
            Ok(admitted) => Ok(admitted),
            Err(reason) => reject(stream, reason).await,
        }
    }

    /// Resolves the process that connected, pinned by a pidfd. The agent opens the pidfd before it
    /// reads `/proc`, so that both are of the same process.
    fn resolve_peer(&self, stream: &PeerStream) -> Option<(Process, ProcessExit)> {
        let pid = stream.peer_pid()?;
        let exit = ProcessExit::open(pid).ok()?;
        Some((self.resolver.process(pid)?, exit))
    }
}

impl Connection {
    /// Waits until the container's rate limit allows another message.
    async fn wait_turn(&self) {
        let wait = lock(&self.rate_limiter).charge_message(Instant::now());
        rate_limit::wait(wait).await;
    }

    /// Does work, and charges its processor time to the container.
    fn run_charged<T>(&self, work: impl FnOnce() -> T) -> T {
        let (result, took) = rate_limit::measure_cpu_time(work);
        lock(&self.rate_limiter).charge_cpu_time(took, Instant::now());
        result
    }
}

/// Waits for the exit of a process that the checkpoint lists.
pub(super) async fn watch_exit(
    container: Arc<Mutex<Container>>,
    process: Process,
    image: u64,
    superseded: CancellationToken,
) {
    if let Ok(exit) = ProcessExit::open(process.pid) {
        tokio::select! {
            () = superseded.cancelled() => return,
            () = exit.wait() => {}
        }
    }
    lock(&container).handle_exit(process, image);
}

async fn reject<T>(stream: &mut PeerStream, reason: RejectReason) -> Result<T, ConnectionError> {
    let frame = Response::Rejected { reason }.frame();
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
    Err(ConnectionError::Rejected(reason))
}

async fn read_request(stream: &mut PeerStream) -> Result<Request, ConnectionError> {
    let mut header = [0; messages::HEADER];
    stream.read_exact(&mut header).await?;
    let mut payload = vec![0; messages::payload_length(header)?];
    stream.read_exact(&mut payload).await?;
    Ok(Request::parse(&payload)?)
}

async fn send_with_descriptor(
    stream: &mut PeerStream,
    message: &Response,
    fd: impl AsFd,
) -> io::Result<()> {
    stream.write_with_descriptor(&message.frame(), fd).await
}
