//! Runs one provisioner per GPU: starts it for a request or for the supervision, kills it after a
//! timeout.
//!
//! A provisioner that SIGKILL does not end hangs in the driver. Its GPU is
//! unfit ([`CudaVerdict`](bursar_gpu::cuda_fitness::CudaVerdict)) and gets no request until the
//! process has exited. A GPU that CUDA refuses at each start is unfit too.
//!
//! Each GPU has its own thread, so a hung one delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bursar_config::DriverConfig;
use bursar_host::driver_files::Driver;
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use bursar_sessions::lease_handle::REQUEST_TIMEOUT;
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

mod process;

use self::process::ProcessSupervisor;
use crate::runtimes::{Activity, RuntimeRecord};

/// How long the driver may take to create memory: it waits for scrubbing, 141 GiB in half a second
/// (F6 in docs/internals/facts.md).
const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// The lowest rate of the driver's scrubbing, in bytes per second.
const MIN_SCRUB_RATE: u64 = 100 << 30;

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
    /// The provisioner missed a deadline and was killed, or got the request too late; its unsent
    /// memory is freed.
    #[error("the provisioner missed a deadline: {0}")]
    TimedOut(String),
    /// The provisioner did not answer a request, and SIGKILL did not end it.
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
    /// Whether there are links to what libcuda loads by name too, such as the compiler of PTX.
    pub has_helpers: bool,
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
        std::fs::create_dir_all(&self.libraries)?;
        let helpers = driver.helpers.iter().filter(|_| self.has_helpers);
        for file in helpers.chain([&driver.libcuda]) {
            // Provisioners of several GPUs start at the same time, so each link has a temporary
            // name before its rename.
            let temporary = format!("new-{:x}", rand::random::<u64>());
            let temporary = self.libraries.join(temporary);
            std::os::unix::fs::symlink(&file.path, &temporary)?;
            std::fs::rename(&temporary, self.libraries.join(&file.soname))?;
        }
        Ok(())
    }
}

enum Job {
    /// Starts the provisioner, if it does not run. Its record has the outcome.
    Start,
    Request {
        request: ProvisionerRequest,
        /// How long the provisioner may take.
        timeout: Duration,
        /// When no tenant waits for the answer any more.
        expires: Instant,
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

    fn is_barred(&self, gpu: &GpuUuid) -> bool {
        self.drained.contains(gpu) || self.barred.contains(gpu)
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
}

impl Records {
    /// Changes the record of a GPU, unless the GPU has left the node.
    fn update<T>(&self, gpu: &GpuUuid, change: impl FnOnce(&mut RuntimeRecord) -> T) -> Option<T> {
        let mut result = None;
        self.runtimes.send_if_modified(|all| {
            let Some(record) = all.get_mut(gpu) else {
                return false;
            };
            let before = record.clone();
            result = Some(change(record));
            *record != before
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
            },
        }
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

    /// Creates memory on a GPU, which may lend `lendable`. The returned descriptor is the only
    /// reference to the memory.
    ///
    /// # Errors
    /// [`ProvisionerError`]. Except with [`ProvisionerError::Hung`], no memory exists then.
    pub async fn create(
        &self,
        gpu: &GpuUuid,
        bytes: Bytes,
        lendable: Bytes,
    ) -> Result<OwnedFd, ProvisionerError> {
        let (bytes, lendable) = (bytes.0, lendable.0);
        let request = ProvisionerRequest::Create { bytes, lendable };
        match self.ask(gpu, request, CREATE_TIMEOUT).await? {
            (ProvisionerResponse::Created { bytes: created }, Some(fd)) if created == bytes => {
                Ok(fd)
            }
            (other, _) => Err(ProvisionerError::Exited(format!(
                "unexpected response to create: {other:?}"
            ))),
        }
    }

    /// Waits until the driver has scrubbed freed memory, so that the next create need not.
    pub async fn await_scrub(&self, gpu: &GpuUuid, bytes: Bytes) {
        let timeout = CREATE_TIMEOUT + Duration::from_secs(bytes.0 / MIN_SCRUB_RATE);
        let scrubbed = self
            .ask(
                gpu,
                ProvisionerRequest::AwaitScrub { bytes: bytes.0 },
                timeout,
            )
            .await;
        if let Err(error) = scrubbed {
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
        self.records.runtimes.send_if_modified(|all| {
            let before = all.len();
            all.retain(|gpu, _| gpus.contains(gpu));
            all.len() != before
        });
    }

    /// Whether a GPU must have no provisioner.
    pub fn is_drained(&self, gpu: &GpuUuid) -> bool {
        self.threads().drained.contains(gpu)
    }

    /// Whether a GPU may have a provisioner.
    pub fn may_hold(&self, gpu: &GpuUuid) -> bool {
        self.threads().may_hold(gpu)
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(
        &self,
        gpu: &GpuUuid,
        request: ProvisionerRequest,
        timeout: Duration,
    ) -> JobResult {
        let (reply, answer) = oneshot::channel();
        let job = Job::Request {
            request,
            timeout,
            expires: Instant::now() + REQUEST_TIMEOUT,
            reply,
        };
        let thread = self
            .thread(gpu)
            .map_err(|error| ProvisionerError::Exited(error.to_string()))?;
        let exited = || ProvisionerError::Exited("its thread has exited".to_owned());
        thread.send(job).map_err(|_| exited())?;
        answer.await.unwrap_or_else(|_| Err(exited()))
    }

    fn thread(&self, gpu: &GpuUuid) -> io::Result<Sender<Job>> {
        let mut threads = self.threads();
        if let Some(thread) = threads.running.get(gpu) {
            return Ok(thread.jobs.clone());
        }
        if threads.is_barred(gpu) || threads.may_hold(gpu) {
            return Err(io::Error::other(format!(
                "{gpu} is drained or lost, or its last provisioner has not exited"
            )));
        }
        let (jobs, received) = channel();
        let ends = Arc::<AtomicBool>::default();
        let (program, records) = (self.program.clone(), self.records.clone());
        let supervisor = ProcessSupervisor::new(gpu.clone(), program, ends.clone(), records);
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

#[cfg(any(test, feature = "testing"))]
impl Program {
    /// A program of a folder, on a machine without a driver.
    pub fn without_driver(folder: &std::path::Path, name: &str) -> Program {
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
            has_helpers: false,
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
            let created = provisioners.create(&gpu, Bytes::gib(1), Bytes::gib(1));
            let created = created.await;
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
