//! Runs one provisioner per GPU: starts it for a request or for the supervision, kills it after a
//! timeout.
//!
//! A provisioner that SIGKILL does not end hangs in the driver. Its GPU is
//! [`unfit`](Provisioners::unfit) and gets no request until the process has exited. A GPU that CUDA
//! refuses at each start is unfit too. Each GPU has its own thread, so a hung one delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bursar_config::DriverConfig;
use bursar_gpu::health::UnhealthyReason;
use bursar_host::driver_files::{Driver, LIBCUDA};
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

use super::runtimes::{Activity, Failure, FailureClass, RuntimeRecord, refusal};

/// How long a provisioner may take to initialize the driver and its GPU.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the driver may take to create memory: it waits for scrubbing, 141 GiB in half a second
/// (F6 in docs/facts.md).
const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// The lowest rate of the driver's scrubbing, in bytes per second.
const MIN_SCRUB_RATE: u64 = 100 << 30;

/// How long a provisioner may take to exit after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a wait for the provisioner checks whether the provisioner is to end.
const END_POLL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// The first and the longest delay after a failed start, in which requests are refused.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Why a provisioner did not carry out a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProvisionerError {
    /// A driver call failed.
    #[error("{call} failed with code {code}")]
    Driver {
        /// The `CUresult`.
        code: i32,
        /// The driver function.
        call: String,
    },
    /// The provisioner could not be started, or has exited; its unsent memory is freed.
    #[error("the provisioner is not running: {0}")]
    Exited(String),
    /// The provisioner did not answer, and SIGKILL did not end it.
    #[error("the provisioner hangs in the driver")]
    Hung,
}

/// How provisioners are started.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable.
    pub path: PathBuf,
    /// Where the driver is.
    pub driver: DriverConfig,
    /// The folder for a link to `libcuda.so.1`.
    pub libraries: PathBuf,
}

impl Program {
    /// The command that runs the program for one GPU.
    pub fn command(&self, gpu: &GpuUuid) -> Command {
        let mut command = Command::new(&self.path);
        command.env("CUDA_VISIBLE_DEVICES", gpu.as_str());
        // A user of its own can read neither the agent's service account token nor root's files on
        // the host.
        if let Some(user) = self.driver.provisioner_user {
            command.uid(user).gid(user);
        }
        match self.link_driver() {
            Ok(()) => drop(command.env("LD_LIBRARY_PATH", &self.libraries)),
            // The system's loader may find the library without the link.
            Err(error) => {
                warn!(%error, "failed to link the driver for the provisioner; the system's loader may find it")
            }
        }
        command
    }

    /// The version of the installed driver; empty if the driver's files do not tell.
    pub fn driver_version(&self) -> String {
        let driver = Driver::find_configured(&self.driver).ok();
        driver.and_then(|driver| driver.version).unwrap_or_default()
    }

    /// Links the driver's library: the agent sees it below the host's root, outside every loader
    /// path.
    fn link_driver(&self) -> io::Result<()> {
        let driver = Driver::find_configured(&self.driver).map_err(io::Error::other)?;
        // Provisioners of several GPUs start at the same time, so each link has a fresh name before
        // its rename.
        let fresh = self
            .libraries
            .join(format!("new-{:x}", rand::random::<u64>()));
        let library = self.libraries.join(LIBCUDA);
        std::fs::create_dir_all(&self.libraries)?;
        std::os::unix::fs::symlink(&driver.libcuda.path, &fresh)?;
        std::fs::rename(&fresh, &library)
    }
}

enum Job {
    /// Starts the provisioner, if it does not run. Its record has the outcome.
    Start,
    Request {
        request: ProvisionerRequest,
        timeout: Duration,
        reply: oneshot::Sender<JobResult>,
    },
}

type JobResult = Result<(ProvisionerResponse, Option<OwnedFd>), ProvisionerError>;

/// A GPU's thread. The thread kills its provisioner and exits once every sender of jobs is dropped.
struct ProvisionerThread {
    jobs: Sender<Job>,
    /// Whether the provisioner is to end: the thread then waits for no answer.
    ends: Arc<AtomicBool>,
    join: JoinHandle<()>,
}

#[derive(Default)]
struct Threads {
    running: BTreeMap<GpuUuid, ProvisionerThread>,
    /// Threads of drained or removed GPUs that have not exited.
    ending: BTreeMap<GpuUuid, JoinHandle<()>>,
    /// GPUs that must have no provisioner, because they are drained.
    drained: BTreeSet<GpuUuid>,
    /// GPUs that must have no provisioner, because they are lost or wait for a reset.
    barred: BTreeSet<GpuUuid>,
}

impl Threads {
    /// Closes the job queues of the GPUs that `ends` selects, so that their threads kill the
    /// provisioners and exit.
    fn end_where(&mut self, ends: impl Fn(&GpuUuid) -> bool) {
        self.ending.retain(|_, join| !join.is_finished());
        let ended = self.running.extract_if(.., |gpu, _| ends(gpu));
        self.ending.extend(ended.map(|(gpu, thread)| {
            let ProvisionerThread {
                jobs: _,
                ends,
                join,
            } = thread;
            ends.store(true, Ordering::Relaxed);
            (gpu, join)
        }));
    }

    fn may_hold(&self, gpu: &GpuUuid) -> bool {
        let ending = self.ending.get(gpu);
        self.running.contains_key(gpu) || ending.is_some_and(|join| !join.is_finished())
    }
}

/// The provisioners of all GPUs.
pub struct Provisioners {
    program: Program,
    threads: Mutex<Threads>,
    records: Records,
}

/// The records of all runtimes, which their threads share.
#[derive(Clone)]
struct Records {
    runtimes: Arc<watch::Sender<BTreeMap<GpuUuid, RuntimeRecord>>>,
    unfit: Arc<watch::Sender<BTreeMap<GpuUuid, UnhealthyReason>>>,
}

impl Records {
    /// Changes the record of a GPU, unless the GPU has left the node.
    fn update<T>(&self, gpu: &GpuUuid, change: impl FnOnce(&mut RuntimeRecord) -> T) -> Option<T> {
        let (mut result, mut reason) = (None, None);
        self.runtimes.send_if_modified(|all| {
            let Some(record) = all.get_mut(gpu) else {
                return false;
            };
            let before = record.clone();
            result = Some(change(record));
            reason = record.unfit_reason();
            *record != before
        });
        self.unfit.send_if_modified(|unfit| match reason {
            Some(reason) => unfit.insert(gpu.clone(), reason) != Some(reason),
            None => unfit.remove(gpu).is_some(),
        });
        result
    }
}

impl Provisioners {
    /// Starts no process.
    pub fn new(program: Program) -> Provisioners {
        Provisioners {
            program,
            threads: Mutex::default(),
            records: Records {
                runtimes: Arc::default(),
                unfit: Arc::default(),
            },
        }
    }

    /// The GPUs on which CUDA does not work: the provisioner hangs in the driver and cannot be
    /// killed, or CUDA refuses each start.
    pub fn unfit(&self) -> watch::Receiver<BTreeMap<GpuUuid, UnhealthyReason>> {
        self.records.unfit.subscribe()
    }

    /// The provisioner of each GPU that has had one.
    pub fn runtimes(&self) -> watch::Receiver<BTreeMap<GpuUuid, RuntimeRecord>> {
        self.records.runtimes.subscribe()
    }

    /// Starts the provisioner of a GPU, if it does not run. Returns whether the start was begun:
    /// not while the GPU must have none, or its last one has not exited.
    pub(crate) fn start(&self, gpu: &GpuUuid) -> bool {
        let Ok(jobs) = self.thread(gpu) else {
            return false;
        };
        // The supervision counts the start from now on.
        self.records.update(gpu, |record| {
            if record.activity() == Activity::Stopped {
                record.begin_start();
            }
        });
        jobs.send(Job::Start).is_ok()
    }

    /// Creates memory on a GPU. The returned descriptor is the only reference to it.
    ///
    /// # Errors
    /// [`ProvisionerError`]. Except with [`ProvisionerError::Hung`], no memory exists then.
    pub async fn create(&self, gpu: &GpuUuid, bytes: Bytes) -> Result<OwnedFd, ProvisionerError> {
        let call = ProvisionerRequest::Create { bytes: bytes.0 };
        match self.ask(gpu, call, CREATE_TIMEOUT).await? {
            (ProvisionerResponse::Created { bytes: created }, Some(fd)) if created == bytes.0 => {
                Ok(fd)
            }
            (other, _) => Err(ProvisionerError::Exited(format!(
                "unexpected response to create: {other:?}"
            ))),
        }
    }

    /// Waits until the driver has scrubbed freed memory, so that the next create need not.
    pub(crate) async fn await_scrub(&self, gpu: &GpuUuid, bytes: Bytes) {
        let timeout = CREATE_TIMEOUT + Duration::from_secs(bytes.0 / MIN_SCRUB_RATE);
        let swept = self
            .ask(
                gpu,
                ProvisionerRequest::AwaitScrub { bytes: bytes.0 },
                timeout,
            )
            .await;
        if let Err(error) = swept {
            info!(%gpu, %error, "failed to wait for scrubbing");
        }
    }

    /// Kills the provisioners of these GPUs, and starts none while the GPUs are drained.
    pub fn drain(&self, gpus: BTreeSet<GpuUuid>) {
        let mut threads = self.threads();
        threads.end_where(|gpu| gpus.contains(gpu));
        threads.drained = gpus;
    }

    /// Kills the provisioners of these GPUs, and starts none while the GPUs are lost or wait for a
    /// reset.
    pub(crate) fn bar(&self, gpus: BTreeSet<GpuUuid>) {
        let mut threads = self.threads();
        threads.end_where(|gpu| gpus.contains(gpu));
        threads.barred = gpus;
    }

    /// Kills the provisioners of these GPUs. The next request starts them again.
    pub(crate) fn end(&self, gpus: &BTreeSet<GpuUuid>) {
        self.threads().end_where(|gpu| gpus.contains(gpu));
    }

    /// Kills the provisioners of all other GPUs: a new MIG instance has a new UUID.
    pub fn retain_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        self.threads().end_where(|gpu| !gpus.contains(gpu));
        let records = &self.records;
        records.runtimes.send_if_modified(|all| {
            let before = all.len();
            all.retain(|gpu, _| gpus.contains(gpu));
            all.len() != before
        });
        records.unfit.send_if_modified(|unfit| {
            let before = unfit.len();
            unfit.retain(|gpu, _| gpus.contains(gpu));
            unfit.len() != before
        });
    }

    /// Whether a GPU must have no provisioner.
    pub fn is_drained(&self, gpu: &GpuUuid) -> bool {
        self.threads().drained.contains(gpu)
    }

    /// Whether a GPU may have a provisioner.
    pub(crate) fn may_hold(&self, gpu: &GpuUuid) -> bool {
        self.threads().may_hold(gpu)
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(&self, gpu: &GpuUuid, call: ProvisionerRequest, timeout: Duration) -> JobResult {
        let (reply, answer) = oneshot::channel();
        let job = Job::Request {
            request: call,
            timeout,
            reply,
        };
        let thread = self
            .thread(gpu)
            .map_err(|error| ProvisionerError::Exited(error.to_string()))?;
        let gone = || ProvisionerError::Exited("its thread has exited".to_owned());
        thread.send(job).map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    fn thread(&self, gpu: &GpuUuid) -> io::Result<Sender<Job>> {
        let mut threads = self.threads();
        if let Some(thread) = threads.running.get(gpu) {
            return Ok(thread.jobs.clone());
        }
        let is_barred = threads.drained.contains(gpu) || threads.barred.contains(gpu);
        if is_barred || threads.may_hold(gpu) {
            return Err(io::Error::other(format!(
                "{gpu} is drained or lost, or its last provisioner has not exited"
            )));
        }
        let (jobs, received) = channel();
        let ends = Arc::<AtomicBool>::default();
        let supervisor = ProcessSupervisor {
            gpu: gpu.clone(),
            program: self.program.clone(),
            provisioner: None,
            killed: None,
            backoff: RESTART_BACKOFF.0,
            retry_after: None,
            ends: Arc::clone(&ends),
            records: self.records.clone(),
        };
        self.records.runtimes.send_if_modified(|all| {
            all.entry(gpu.clone()).or_default();
            false
        });
        let join = std::thread::Builder::new()
            .name("provisioner".to_owned())
            .spawn(move || supervisor.run(&received))?;
        let thread = ProvisionerThread {
            jobs: jobs.clone(),
            ends,
            join,
        };
        threads.running.insert(gpu.clone(), thread);
        Ok(jobs)
    }
}

/// Runs the provisioner of one GPU.
struct ProcessSupervisor {
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
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            match jobs.recv_timeout(KILL_TIMEOUT) {
                Ok(Job::Start) => self.start_if_stopped(),
                Ok(Job::Request {
                    request: call,
                    timeout,
                    reply,
                }) => {
                    let _ = reply.send(self.run_job(call, timeout));
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

    fn run_job(&mut self, call: ProvisionerRequest, timeout: Duration) -> JobResult {
        self.reap();
        if self.killed.is_some() {
            return Err(ProvisionerError::Hung);
        }
        // A provisioner that exited between two requests is no error of the second one.
        let was_there = self.provisioner.is_some();
        match self.try_job(call, timeout) {
            Err(ProvisionerError::Exited(_)) if was_there => self.try_job(call, timeout),
            answer => answer,
        }
    }

    fn try_job(&mut self, call: ProvisionerRequest, timeout: Duration) -> JobResult {
        self.ensure_started()?;
        let Some(provisioner) = &self.provisioner else {
            return Err(ProvisionerError::Exited("the start failed".to_owned()));
        };
        let asked = send_message(&provisioner.socket, &call, None)
            .and_then(|()| receive(&provisioner.socket, timeout, &self.ends));
        match asked {
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
            Ok(()) => {
                (self.backoff, self.retry_after) = (RESTART_BACKOFF.0, None);
                self.update(|record| record.succeed(Instant::now()));
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
                self.fail(Failure { class, reason });
                self.retry_after = Some((Instant::now() + self.backoff, error.clone()));
                self.backoff = (self.backoff * 2).min(RESTART_BACKOFF.1);
                Err(error)
            }
        }
    }

    /// Starts the process and waits until it has initialized the driver.
    fn spawn(&mut self) -> Result<(), (FailureClass, ProvisionerError)> {
        let dead = |error: io::Error| {
            let reason = format!("{}: {error}", self.program.path.display());
            (FailureClass::Exit, ProvisionerError::Exited(reason))
        };
        let (socket, child_socket) = UnixStream::pair().map_err(dead)?;
        // An answer has arrived as a whole when its first byte has.
        socket.set_read_timeout(Some(KILL_TIMEOUT)).map_err(dead)?;
        socket.set_write_timeout(Some(KILL_TIMEOUT)).map_err(dead)?;
        let mut command = self.program.command(&self.gpu);
        command
            .args(["--gpu", self.gpu.as_str()])
            .stdin(Stdio::from(OwnedFd::from(child_socket)))
            .stdout(Stdio::null());
        let child = command.spawn().map_err(dead)?;
        // The command holds the provisioner's end of the socket: while it is open, an exit closes
        // nothing.
        drop(command);
        let pid = child.id();
        let ready = receive(&socket, START_TIMEOUT, &self.ends);
        self.provisioner = Some(Provisioner { child, socket });
        let (class, error) = match ready {
            Ok((ProvisionerResponse::Ready { .. }, _)) => {
                info!(gpu = %self.gpu, pid, "provisioner started");
                return Ok(());
            }
            Ok((ProvisionerResponse::Failed { code, call }, _)) => {
                let class = match refusal(code) {
                    Some(_) => FailureClass::Refused,
                    None => FailureClass::Driver,
                };
                (class, ProvisionerError::Driver { code, call })
            }
            Ok((other, _)) => {
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
            Some(_) => Err((class, ProvisionerError::Hung)),
            None => Err((class, error)),
        }
    }

    /// Kills a provisioner that sent an invalid message or missed its deadline.
    fn kill_after(&mut self, error: &io::Error) -> ProvisionerError {
        self.kill();
        let ended = match self.killed {
            Some(_) => ProvisionerError::Hung,
            None => ProvisionerError::Exited(error.to_string()),
        };
        self.fail(Failure {
            class: class_of(error),
            reason: ended.to_string(),
        });
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
        self.fail(Failure {
            class: FailureClass::Exit,
            reason: ProvisionerError::Exited(why).to_string(),
        });
    }

    /// Records a failure, unless the agent ends the provisioner anyway. Logs it if it is new.
    fn fail(&self, failure: Failure) {
        if self.is_to_end() {
            return;
        }
        let is_stuck = self.killed.is_some();
        let logged = failure.clone();
        let is_new = self.records.update(&self.gpu, |record| {
            let is_new = !record.has_last_failure(&failure);
            record.fail(failure, Instant::now());
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
impl Program {
    /// A program of a folder, on a machine without a driver.
    pub(crate) fn without_driver(folder: &std::path::Path, name: &str) -> Program {
        Program {
            path: folder.join(name),
            driver: DriverConfig {
                root: folder.to_owned(),
                host_root: folder.to_owned(),
                dev_root: folder.to_owned(),
                extra_mounts: Vec::new(),
                provisioner_user: None,
            },
            libraries: folder.join("lib"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn provisioner_threads_end_with_their_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let provisioners =
            Provisioners::new(Program::without_driver(folder.path(), "no-provisioner"));
        for number in 0..20 {
            let gpu: GpuUuid = format!("MIG-{number}").parse().unwrap();
            let created = provisioners.create(&gpu, Bytes::gib(1)).await;
            assert!(matches!(created, Err(ProvisionerError::Exited(_))));
            provisioners.retain_gpus(&BTreeSet::from([gpu.clone()]));
            let threads = provisioners.threads();
            assert_eq!(threads.running.keys().collect::<Vec<_>>(), [&gpu]);
            assert_eq!(provisioners.runtimes().borrow().len(), 1);
        }
        let until = Instant::now() + Duration::from_secs(10);
        while provisioners
            .threads()
            .ending
            .values()
            .any(|join| !join.is_finished())
        {
            assert!(Instant::now() < until, "threads stay");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
