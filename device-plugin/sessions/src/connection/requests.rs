//! Answers the requests of a session.

use std::time::{Duration, Instant};

use bursar_host::clock;
use bursar_protocol::messages::{Message, Request, Response};
use bursar_protocol::units::Units;

use super::super::container::recorder::ChangeNumber;
use super::super::rate_limit::{self, RateLimiter};
use super::super::recovery::is_fault;
use super::super::stream::PeerStream;
use super::super::{Process, lock};
use super::{Connection, ConnectionError, read_request};

/// The messages of one process that the agent answers at once: more than the start of a program
/// sends.
const MESSAGE_BURST: u32 = 64;

/// How often a request checks whether the driver has freed the bytes of exited images.
const RECLAIM_POLL: Duration = Duration::from_millis(10);

/// The time after which an answer is logged as late. At worst a request waits for the bytes of
/// exited images, and for the driver.
const LATE_ANSWER: Duration = Duration::from_secs(3);

impl Connection {
    /// Answers requests until the peer breaks the protocol.
    pub(super) async fn serve_requests(
        &self,
        stream: &mut PeerStream,
        pid: u32,
    ) -> Result<std::convert::Infallible, ConnectionError> {
        let mut own = RateLimiter::for_messages(MESSAGE_BURST);
        loop {
            let message = read_request(stream).await?;
            // The limit of the process comes first, so that a flood uses up its own budget and not
            // that of its siblings.
            rate_limit::wait(own.charge_message(Instant::now())).await;
            self.wait_turn().await;
            let received_at = Instant::now();
            if let Request::Credit { account, units } = message {
                self.wait_reclaimed(pid, account, units, received_at).await;
            }
            if let Some(answer) = self.answer(pid, message).await? {
                self.send_answer(stream, pid, &answer, received_at).await?;
            }
        }
    }

    /// Waits while the driver may still free the bytes of exited images that a request needs.
    async fn wait_reclaimed(&self, pid: u32, account: u8, units: Units, received_at: Instant) {
        let is_pending = || {
            let mut container = lock(&self.container);
            container.is_reclaim_pending(pid, account, units, received_at, clock::now())
        };
        while self.run_charged(is_pending) {
            tokio::time::sleep(RECLAIM_POLL).await;
        }
    }

    /// Handles a request. Returns no answer where the process expects none.
    async fn answer(
        &self,
        pid: u32,
        message: Request,
    ) -> Result<Option<Response>, ConnectionError> {
        Ok(match message {
            Request::Credit { account, units } => self.grant_credit(pid, account, units).await,
            Request::Refresh => {
                let change = self.run_charged(|| {
                    let mut container = lock(&self.container);
                    container.handle_refresh(pid)
                });
                self.wait_recorded(change).await;
                Some(Response::Refreshed)
            }
            Request::Denied {
                account,
                bytes,
                function,
            } => {
                lock(&self.container).record_denial(pid, account, bytes, &function);
                None
            }
            Request::ContextMade { account } => {
                let (answer, change) = self.run_charged(|| {
                    let mut container = lock(&self.container);
                    container.handle_context_made(pid, account)
                });
                self.wait_recorded(change).await;
                Some(answer)
            }
            Request::Poisoned {
                account,
                code,
                can_reexec,
            } => Some(self.answer_poisoned(pid, account, code, can_reexec).await),
            Request::Hello { .. }
            | Request::Query { .. }
            | Request::Retained(_)
            | Request::Token(_) => return Err(ConnectionError::OutOfOrder),
        })
    }

    /// Answers a request for credit once the checkpoint holds the grant.
    async fn grant_credit(&self, pid: u32, account: u8, units: Units) -> Option<Response> {
        let (change, answered) =
            self.run_charged(|| lock(&self.container).request_credit(pid, account, units));
        self.wait_recorded(Some(change)).await;
        answered.await.ok()
    }

    /// Records that a process image is poisoned, and decides what it does.
    async fn answer_poisoned(
        &self,
        pid: u32,
        account: u8,
        code: i32,
        can_reexec: bool,
    ) -> Response {
        let (answer, change, has_news) = self.run_charged(|| {
            // Only for a fault does the agent read `/proc`.
            let is_fault = is_fault(code);
            let root = is_fault.then(|| self.root_process(pid)).flatten();
            let can_reexec = is_fault && can_reexec && self.is_main_process(pid);
            let now = clock::read_clocks();
            let mut container = lock(&self.container);
            let (answer, change) =
                container.handle_poisoned(pid, account, code, can_reexec, root, now);
            (answer, change, container.faults().has_unreported())
        });
        if has_news {
            self.fault_notifier.notify();
        }
        self.wait_recorded(change).await;
        answer
    }

    /// Sends an answer, and logs one that is late.
    async fn send_answer(
        &self,
        stream: &mut PeerStream,
        pid: u32,
        answer: &Response,
        received_at: Instant,
    ) -> Result<(), ConnectionError> {
        // A peer that reads late does not make the answer late.
        let took = received_at.elapsed();
        let sent = stream.write_all(&answer.frame()).await;
        sent.map_err(ConnectionError::NotTaken)?;
        // A shim that waited too long refuses the allocation, and the program is out of memory.
        if took > LATE_ANSWER
            && let Some(suppressed) = self.log_limiter.due("late", Instant::now())
        {
            tracing::warn!(
                pid,
                ?took,
                ?answer,
                suppressed,
                "answered a tenant process late"
            );
        }
        Ok(())
    }

    /// Waits until the checkpoint holds a change, if there is one.
    pub(super) async fn wait_recorded(&self, change: Option<ChangeNumber>) {
        let Some(change) = change else { return };
        let record = || lock(&self.container).poll_recorded(change, Instant::now());
        while let Some(wait) = self.run_charged(record) {
            tokio::time::sleep(wait).await;
        }
    }

    /// The root process from which a process descends. Reading `/proc` takes time, so the agent
    /// does it without the lock.
    fn root_process(&self, pid: u32) -> Option<Process> {
        let container = lock(&self.container);
        let process = container.memory().image_of(pid)?.process;
        let pod = container.pod().clone();
        drop(container);
        self.resolver.root_process(process, &pod)
    }

    /// Whether a process is the container's main process. Reading `/proc` takes time, so the agent
    /// does it without the lock.
    fn is_main_process(&self, pid: u32) -> bool {
        let container = lock(&self.container);
        let first = container.memory().pid_namespace_init(pid);
        let pod = container.pod().clone();
        drop(container);
        first.is_some_and(|process| self.resolver.is_container_root(process, &pod))
    }
}
