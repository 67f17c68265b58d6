//! Runs one provisioner per GPU: starts it for a request, restarts it after an exit, kills it after
//! a timeout.
//!
//! A provisioner that SIGKILL does not end hangs in the driver. Its GPU counts as
//! [`hung`](Provisioners::hung) and gets no request until the process has exited. Each GPU has its
//! own thread, so a hung one delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bursar_config::DriverConfig;
use bursar_host::driver_files::{Driver, LIBCUDA};
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

/// How long a provisioner may take to initialize the driver and its GPU.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the driver may take to create memory: it waits for scrubbing, 141 GiB in half a second
/// (F6 in docs/facts.md).
const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// The lowest rate of the driver's scrubbing, in bytes per second.
const MIN_SCRUB_RATE: u64 = 100 << 30;

/// How long a provisioner may take to exit after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The first and the longest delay after a failed start.
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

struct Job {
    request: ProvisionerRequest,
    timeout: Duration,
    reply: oneshot::Sender<JobResult>,
}

type JobResult = Result<(ProvisionerResponse, Option<OwnedFd>), ProvisionerError>;

/// A GPU's thread. The thread kills its provisioner and exits once every sender of jobs is dropped.
struct ProvisionerThread {
    jobs: Sender<Job>,
    join: JoinHandle<()>,
}

#[derive(Default)]
struct Threads {
    running: BTreeMap<GpuUuid, ProvisionerThread>,
    /// Threads of drained or removed GPUs that have not exited.
    ending: BTreeMap<GpuUuid, JoinHandle<()>>,
    /// GPUs that must have no provisioner.
    drained: BTreeSet<GpuUuid>,
}

impl Threads {
    /// Closes the job queues of the GPUs that `ends` selects, so that their threads kill the
    /// provisioners and exit.
    fn end_where(&mut self, ends: impl Fn(&GpuUuid) -> bool) {
        self.ending.retain(|_, join| !join.is_finished());
        let ended = self.running.extract_if(.., |gpu, _| ends(gpu));
        self.ending
            .extend(ended.map(|(gpu, ProvisionerThread { jobs: _, join })| (gpu, join)));
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
    hung: Arc<watch::Sender<BTreeSet<GpuUuid>>>,
}

impl Provisioners {
    /// Starts no process.
    pub fn new(program: Program) -> Provisioners {
        Provisioners {
            program,
            threads: Mutex::default(),
            hung: Arc::new(watch::channel(BTreeSet::new()).0),
        }
    }

    /// The GPUs whose provisioner hangs in the driver.
    pub fn hung(&self) -> watch::Receiver<BTreeSet<GpuUuid>> {
        self.hung.subscribe()
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

    /// Kills the provisioners of all other GPUs: a new MIG instance has a new UUID.
    pub fn retain_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        self.threads().end_where(|gpu| !gpus.contains(gpu));
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
        let job = Job {
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
        if threads.drained.contains(gpu) || threads.may_hold(gpu) {
            return Err(io::Error::other(format!(
                "{gpu} is drained, or its last provisioner has not exited"
            )));
        }
        let (jobs, received) = channel();
        let supervisor = Supervisor {
            gpu: gpu.clone(),
            program: self.program.clone(),
            provisioner: None,
            killed: None,
            backoff: RESTART_BACKOFF.0,
            retry_after: None,
            hung: Arc::clone(&self.hung),
        };
        let join = std::thread::Builder::new()
            .name("provisioner".to_owned())
            .spawn(move || supervisor.run(&received))?;
        let thread = ProvisionerThread {
            jobs: jobs.clone(),
            join,
        };
        threads.running.insert(gpu.clone(), thread);
        Ok(jobs)
    }
}

/// Runs the provisioner of one GPU.
struct Supervisor {
    gpu: GpuUuid,
    program: Program,
    provisioner: Option<Provisioner>,
    /// A process that got SIGKILL and has not exited.
    killed: Option<Child>,
    backoff: Duration,
    /// When the next start may be tried, and why the last one failed.
    retry_after: Option<(Instant, ProvisionerError)>,
    hung: Arc<watch::Sender<BTreeSet<GpuUuid>>>,
}

struct Provisioner {
    child: Child,
    socket: UnixStream,
}

impl Supervisor {
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            match jobs.recv_timeout(KILL_TIMEOUT) {
                Ok(Job {
                    request: call,
                    timeout,
                    reply,
                }) => {
                    let _ = reply.send(self.run_job(call, timeout));
                }
                Err(RecvTimeoutError::Timeout) => self.reap(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.kill();
        // The process does not wait for these threads when the agent exits.
        while self.killed.is_some() {
            std::thread::sleep(KILL_TIMEOUT);
            self.reap();
        }
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
        let provisioner = self.ensure_started()?;
        let asked = provisioner
            .socket
            .set_read_timeout(Some(timeout))
            .and_then(|()| send_message(&provisioner.socket, &call, None))
            .and_then(|()| receive_message::<ProvisionerResponse>(&provisioner.socket));
        match asked {
            Ok((ProvisionerResponse::Failed { code, call }, _)) => {
                Err(ProvisionerError::Driver { code, call })
            }
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.kill_after(&error)),
        }
    }

    /// Returns the provisioner; starts one if there is none.
    fn ensure_started(&mut self) -> Result<&Provisioner, ProvisionerError> {
        if self.provisioner.is_none() {
            if let Some((until, why)) = &self.retry_after
                && Instant::now() < *until
            {
                return Err(why.clone());
            }
            match self.start() {
                Ok(provisioner) => {
                    info!(gpu = %self.gpu, pid = provisioner.child.id(), "provisioner started");
                    (self.backoff, self.retry_after) = (RESTART_BACKOFF.0, None);
                    self.provisioner = Some(provisioner);
                }
                Err(error) => {
                    warn!(gpu = %self.gpu, %error, "failed to start the provisioner");
                    self.retry_after = Some((Instant::now() + self.backoff, error.clone()));
                    self.backoff = (self.backoff * 2).min(RESTART_BACKOFF.1);
                    return Err(error);
                }
            }
        }
        self.provisioner
            .as_ref()
            .ok_or_else(|| ProvisionerError::Exited("the start failed".to_owned()))
    }

    fn start(&mut self) -> Result<Provisioner, ProvisionerError> {
        let dead = |error: io::Error| {
            ProvisionerError::Exited(format!("{}: {error}", self.program.path.display()))
        };
        let (socket, child_socket) = UnixStream::pair().map_err(dead)?;
        socket.set_read_timeout(Some(START_TIMEOUT)).map_err(dead)?;
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
        let ready = receive_message::<ProvisionerResponse>(&socket);
        self.provisioner = Some(Provisioner { child, socket });
        match ready {
            Ok((ProvisionerResponse::Ready { .. }, _)) => {}
            Ok((ProvisionerResponse::Failed { code, call }, _)) => {
                self.kill();
                return Err(ProvisionerError::Driver { code, call });
            }
            Ok((other, _)) => {
                self.kill();
                return Err(ProvisionerError::Exited(format!(
                    "unexpected first message: {other:?}"
                )));
            }
            Err(error) => return Err(self.kill_after(&error)),
        }
        self.provisioner
            .take()
            .ok_or_else(|| ProvisionerError::Exited("it was killed".to_owned()))
    }

    /// Kills a provisioner that sent an invalid message or missed its deadline.
    fn kill_after(&mut self, error: &io::Error) -> ProvisionerError {
        warn!(gpu = %self.gpu, %error, "failed to get a response from the provisioner; killing it");
        self.kill();
        match self.killed {
            Some(_) => ProvisionerError::Hung,
            None => ProvisionerError::Exited(error.to_string()),
        }
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
        self.hung.send_modify(|hung| {
            hung.insert(self.gpu.clone());
        });
    }

    /// Checks whether the killed process has exited.
    fn reap(&mut self) {
        if let Some(child) = &mut self.killed
            && !matches!(child.try_wait(), Ok(None))
        {
            self.killed = None;
            self.hung.send_modify(|hung| {
                hung.remove(&self.gpu);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn provisioner_threads_end_with_their_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program {
            path: folder.path().join("no-provisioner"),
            driver: DriverConfig {
                root: folder.path().to_owned(),
                host_root: folder.path().to_owned(),
                dev_root: folder.path().to_owned(),
                extra_mounts: Vec::new(),
                provisioner_user: None,
            },
            libraries: folder.path().join("lib"),
        });
        for number in 0..20 {
            let gpu: GpuUuid = format!("MIG-{number}").parse().unwrap();
            let created = provisioners.create(&gpu, Bytes::gib(1)).await;
            assert!(matches!(created, Err(ProvisionerError::Exited(_))));
            provisioners.retain_gpus(&BTreeSet::from([gpu.clone()]));
            let threads = provisioners.threads();
            assert_eq!(threads.running.keys().collect::<Vec<_>>(), [&gpu]);
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
