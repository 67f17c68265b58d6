//! Starts one GPU's provisioner, talks to it and kills it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{info, warn};

use super::{Job, JobResult, Program, ProvisionerError, Records};
use crate::runtimes::{Failure, FailureClass, ManagedAccess, RuntimeRecord, refusal};

/// How long a provisioner may take to initialize the driver and its GPU.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a provisioner may take to exit after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a wait for the provisioner checks whether the provisioner is to end.
const END_POLL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// The first and the longest delay after a failed start, in which requests are refused.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Runs the provisioner of one GPU.
pub(super) struct ProcessSupervisor {
    gpu: GpuUuid,
    program: Program,
    provisioner: Option<Provisioner>,
    /// A process that got SIGKILL and has not exited.
    killed: Option<Child>,
    backoff: Duration,
    /// When the next start may be tried, and why the last one failed.
    retry_after: Option<(Instant, ProvisionerError)>,
    /// Whether the provisioner is to end.
    ends: Arc<AtomicBool>,
    records: Records,
}

struct Provisioner {
    child: Child,
    socket: UnixStream,
}

impl ProcessSupervisor {
    /// Starts no process.
    pub(super) fn new(
        gpu: GpuUuid,
        program: Program,
        ends: Arc<AtomicBool>,
        records: Records,
    ) -> Self {
        Self {
            gpu,
            program,
            provisioner: None,
            killed: None,
            backoff: RESTART_BACKOFF.0,
            retry_after: None,
            ends,
            records,
        }
    }

    /// Carries out jobs until every sender of them is dropped, then kills the provisioner.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            match jobs.recv_timeout(KILL_TIMEOUT) {
                Ok(Job::Start) => self.start_if_stopped(),
                Ok(Job::Request {
                    request,
                    timeout,
                    expires,
                    reply,
                }) => {
                    let result = if Instant::now() < expires {
                        self.run_job(request, timeout)
                    } else {
                        let reason = "earlier requests took too long";
                        Err(ProvisionerError::TimedOut(reason.to_owned()))
                    };
                    let _ = reply.send(result);
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.reap();
                    self.check_exit();
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.kill();
        // The process does not wait for these threads when the agent exits.
        while self.killed.is_some() {
            std::thread::sleep(KILL_TIMEOUT);
            self.reap();
        }
        self.records.update(&self.gpu, RuntimeRecord::end);
    }

    fn run_job(&mut self, request: ProvisionerRequest, timeout: Duration) -> JobResult {
        self.reap();
        if self.killed.is_some() {
            return Err(previous_hangs());
        }
        // A provisioner that exited between two requests is no error of the second one. After a
        // missed deadline the tenant would not wait for a second try.
        let was_there = self.provisioner.is_some();
        match self.try_job(request, timeout) {
            Err(ProvisionerError::Exited(_)) if was_there => self.try_job(request, timeout),
            answer => answer,
        }
    }

    fn try_job(&mut self, request: ProvisionerRequest, timeout: Duration) -> JobResult {
        self.ensure_started()?;
        let Some(provisioner) = &self.provisioner else {
            return Err(ProvisionerError::Exited("the start failed".to_owned()));
        };
        let received = send_message(&provisioner.socket, &request, None)
            .and_then(|()| receive(&provisioner.socket, timeout, &self.ends));
        match received {
            Ok((ProvisionerResponse::Failed { code, call }, _)) => {
                Err(ProvisionerError::Driver { code, call })
            }
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.kill_after(&error)),
        }
    }

    /// Starts the provisioner if there is none, unless the last start has just failed.
    fn ensure_started(&mut self) -> Result<(), ProvisionerError> {
        if self.provisioner.is_some() {
            return Ok(());
        }
        match &self.retry_after {
            Some((until, why)) if Instant::now() < *until => Err(why.clone()),
            _ => self.start(),
        }
    }

    fn start_if_stopped(&mut self) {
        self.reap();
        if self.killed.is_none() && self.provisioner.is_none() {
            // The record has the error.
            let _ = self.start();
        }
    }

    fn start(&mut self) -> Result<(), ProvisionerError> {
        if self.is_to_end() {
            return Err(ProvisionerError::Exited(
                "its GPU is drained or lost".to_owned(),
            ));
        }
        self.update(RuntimeRecord::begin_start);
        match self.spawn() {
            Ok(managed_access) => {
                (self.backoff, self.retry_after) = (RESTART_BACKOFF.0, None);
                self.update(|record| record.succeed(managed_access, Instant::now()));
                Ok(())
            }
            Err((class, error)) => {
                let reason = match error {
                    ProvisionerError::Driver { code, .. } => match refusal(code) {
                        Some(meaning) => format!("{error}: {meaning}"),
                        None => error.to_string(),
                    },
                    _ => error.to_string(),
                };
                self.fail(Failure { class, reason }, RuntimeRecord::fail_start);
                self.retry_after = Some((Instant::now() + self.backoff, error.clone()));
                self.backoff = (self.backoff * 2).min(RESTART_BACKOFF.1);
                Err(error)
            }
        }
    }

    /// Starts the process and waits until it has initialized the driver. Returns how the GPU
    /// accesses managed memory.
    fn spawn(&mut self) -> Result<ManagedAccess, (FailureClass, ProvisionerError)> {
        let exit_error = |error: io::Error| {
            let reason = format!("{}: {error}", self.program.path.display());
            (FailureClass::Exit, ProvisionerError::Exited(reason))
        };
        let (socket, child_socket) = UnixStream::pair().map_err(exit_error)?;
        // An answer has arrived as a whole when its first byte has.
        socket
            .set_read_timeout(Some(KILL_TIMEOUT))
            .map_err(exit_error)?;
        socket
            .set_write_timeout(Some(KILL_TIMEOUT))
            .map_err(exit_error)?;
        let mut command = self.program.command(&self.gpu);
        command
            .args(["--gpu", self.gpu.as_str()])
            .stdin(Stdio::from(OwnedFd::from(child_socket)))
            .stdout(Stdio::null());
        let child = command.spawn().map_err(exit_error)?;
        // The command holds the provisioner's end of the socket: while it is open, an exit closes
        // nothing.
        drop(command);
        let pid = child.id();
        let ready = receive(&socket, START_TIMEOUT, &self.ends);
        self.provisioner = Some(Provisioner { child, socket });
        let (class, error) = match ready.map(|(response, _)| response) {
            Ok(ProvisionerResponse::Ready {
                concurrent_managed_access,
                ..
            }) => {
                info!(gpu = %self.gpu, pid, "provisioner started");
                return Ok(match concurrent_managed_access {
                    true => ManagedAccess::Concurrent,
                    false => ManagedAccess::Exclusive,
                });
            }
            Ok(ProvisionerResponse::Failed { code, call }) => {
                let class = match refusal(code) {
                    Some(_) => FailureClass::Refused,
                    None => FailureClass::Driver,
                };
                (class, ProvisionerError::Driver { code, call })
            }
            Ok(other) => {
                let reason = format!("unexpected first message: {other:?}");
                (FailureClass::Exit, ProvisionerError::Exited(reason))
            }
            Err(error) => (
                class_of(&error),
                ProvisionerError::Exited(error.to_string()),
            ),
        };
        self.kill();
        match self.killed {
            Some(_) => Err((class, previous_hangs())),
            None => Err((class, error)),
        }
    }

    /// Kills a provisioner that sent an invalid message or missed its deadline.
    fn kill_after(&mut self, error: &io::Error) -> ProvisionerError {
        self.kill();
        let class = class_of(error);
        let ended = match (&self.killed, class) {
            (Some(_), _) => ProvisionerError::Hung,
            (None, FailureClass::Timeout) => ProvisionerError::TimedOut(error.to_string()),
            (None, _) => ProvisionerError::Exited(error.to_string()),
        };
        let reason = ended.to_string();
        self.fail(Failure { class, reason }, RuntimeRecord::fail);
        ended
    }

    /// Kills the provisioner and waits for its exit, at most [`KILL_TIMEOUT`].
    fn kill(&mut self) {
        let Some(Provisioner { mut child, socket }) = self.provisioner.take() else {
            return;
        };
        drop(socket);
        let _ = child.kill();
        let until = Instant::now() + KILL_TIMEOUT;
        while Instant::now() < until {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        warn!(gpu = %self.gpu, pid = child.id(), "failed to kill the provisioner: it hangs in the driver; reset the GPU or restart the node");
        self.killed = Some(child);
        self.update(RuntimeRecord::set_stuck);
    }

    /// Checks whether the killed process has exited.
    fn reap(&mut self) {
        if let Some(child) = &mut self.killed
            && !matches!(child.try_wait(), Ok(None))
        {
            self.killed = None;
            self.update(RuntimeRecord::set_exited);
        }
    }

    /// Checks whether the provisioner has exited without a request.
    fn check_exit(&mut self) {
        let Some(provisioner) = &mut self.provisioner else {
            return;
        };
        let why = match provisioner.child.try_wait() {
            Ok(None) => return,
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
        };
        self.provisioner = None;
        let reason = ProvisionerError::Exited(why).to_string();
        let class = FailureClass::Exit;
        self.fail(Failure { class, reason }, RuntimeRecord::fail);
    }

    /// Records a failure, unless the agent ends the provisioner anyway. Logs it if it is new.
    fn fail(
        &self,
        failure: Failure,
        record_as: fn(&mut RuntimeRecord, Failure, Instant) -> Instant,
    ) {
        if self.is_to_end() {
            return;
        }
        let is_stuck = self.killed.is_some();
        let logged = failure.clone();
        let is_new = self.records.update(&self.gpu, |record| {
            let is_new = !record.has_last_failure(&failure);
            record_as(record, failure, Instant::now());
            if is_stuck {
                record.set_stuck();
            }
            is_new
        });
        if is_new.unwrap_or_default() {
            let Failure { class, reason } = logged;
            warn!(gpu = %self.gpu, class = class.as_str(), reason, "the provisioner failed");
        }
    }

    fn is_to_end(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    fn update(&self, change: impl FnOnce(&mut RuntimeRecord)) {
        self.records.update(&self.gpu, change);
    }
}

/// The error of a request that no provisioner got, because the last one got SIGKILL and has not
/// exited.
fn previous_hangs() -> ProvisionerError {
    let reason = "the last process hangs in the driver; reset the GPU or restart the node";
    ProvisionerError::Exited(reason.to_owned())
}

/// Waits for the next message, at most for `timeout`, and no longer than until `ends`.
fn receive(
    socket: &UnixStream,
    timeout: Duration,
    ends: &AtomicBool,
) -> io::Result<(ProvisionerResponse, Option<OwnedFd>)> {
    let until = Instant::now() + timeout;
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&END_POLL)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return receive_message(socket),
            Err(error) => return Err(error.into()),
        }
        if ends.load(Ordering::Relaxed) {
            return Err(io::Error::other("the agent ends the provisioner"));
        }
        if Instant::now() >= until {
            let reason = format!("no answer within {} s", timeout.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
    }
}

fn class_of(error: &io::Error) -> FailureClass {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => FailureClass::Timeout,
        _ => FailureClass::Exit,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::process::Command;
    use std::sync::mpsc::channel;

    use tokio::sync::oneshot;

    use super::*;

    const CREATE: ProvisionerRequest = ProvisionerRequest::Create {
        bytes: 1 << 30,
        lendable: 1 << 30,
    };

    /// A process that ends when it is killed or dropped.
    fn idle_process() -> Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).spawn().unwrap()
    }

    /// The supervisor of a GPU whose provisioner cannot be started.
    struct Fixture {
        supervisor: ProcessSupervisor,
        _folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Fixture {
            let folder = tempfile::tempdir().unwrap();
            let gpu: GpuUuid = "GPU-a".parse().unwrap();
            let program = Program::without_driver(folder.path(), "no-provisioner");
            let records = Records {
                runtimes: Arc::default(),
            };
            records.runtimes.send_modify(|all| {
                all.insert(gpu.clone(), RuntimeRecord::default());
            });
            Fixture {
                supervisor: ProcessSupervisor::new(gpu, program, Arc::default(), records),
                _folder: folder,
            }
        }

        /// A supervisor with a provisioner that does not answer. Returns the provisioner's end of
        /// the socket.
        fn with_silent_provisioner() -> (Fixture, UnixStream) {
            let mut fixture = Fixture::new();
            let (socket, peer) = UnixStream::pair().unwrap();
            fixture.supervisor.provisioner = Some(Provisioner {
                child: idle_process(),
                socket,
            });
            (fixture, peer)
        }
    }

    #[test]
    fn request_is_tried_again_after_an_exit_only() {
        let (mut fixture, _peer) = Fixture::with_silent_provisioner();
        let late = fixture.supervisor.run_job(CREATE, Duration::ZERO);
        let late = late.unwrap_err();
        assert!(matches!(late, ProvisionerError::TimedOut(_)), "{late}");
        let (mut fixture, peer) = Fixture::with_silent_provisioner();
        drop(peer);
        let ended = fixture.supervisor.run_job(CREATE, Duration::ZERO);
        let second_start = ended.unwrap_err().to_string();
        assert!(second_start.contains("no-provisioner"), "{second_start}");
    }

    #[test]
    fn request_is_not_sent_after_its_tenant_has_left() {
        let Fixture {
            supervisor,
            _folder,
        } = Fixture::new();
        let runtimes = supervisor.records.runtimes.subscribe();
        let (jobs, received) = channel();
        let (reply, mut answer) = oneshot::channel();
        let late = Job::Request {
            request: CREATE,
            timeout: Duration::ZERO,
            expires: Instant::now(),
            reply,
        };
        jobs.send(late).unwrap();
        drop(jobs);
        supervisor.run(&received);
        let refused = answer.try_recv().unwrap().unwrap_err();
        assert!(
            matches!(refused, ProvisionerError::TimedOut(_)),
            "{refused}"
        );
        let unchanged = BTreeMap::from([("GPU-a".parse().unwrap(), RuntimeRecord::default())]);
        assert_eq!(*runtimes.borrow(), unchanged, "it starts nothing");
    }

    #[test]
    fn request_is_not_sent_while_the_last_process_hangs() {
        let Fixture {
            mut supervisor,
            _folder,
        } = Fixture::new();
        supervisor.killed = Some(idle_process());
        let refused = supervisor.run_job(CREATE, Duration::ZERO).unwrap_err();
        assert!(matches!(refused, ProvisionerError::Exited(_)), "{refused}");
        let mut hung = supervisor.killed.take().unwrap();
        hung.kill().unwrap();
        hung.wait().unwrap();
    }
}
