//! Serves the control socket from inside the namespaces, and takes everything down at the end.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use super::cgroups::{Cgroup, CgroupError};
use super::forward;
use super::namespace::{self, MountIds, NamespaceError};
use super::processes::{ProcessState, Processes};
use super::protocol::{Reply, Request};
use crate::cluster::RunFolder;

/// The time after which a program that ignores a signal is killed, and the bound of the removal of
/// cgroups.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// The node process exits unless an owner connects within this time.
const OWNER_TIMEOUT: Duration = Duration::from_secs(15);

/// The child cgroup of the node process itself.
const LEAF: &str = "node";

/// The error of a node process that fails.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The run folder cannot be used.
    #[error("{path}: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another node process has the run folder.
    #[error("another cluster runs in {0}")]
    InUse(PathBuf),
    /// The cgroup cannot be made, emptied or removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The namespaces cannot be made.
    #[error("the node's namespaces: {0}")]
    Namespace(#[from] NamespaceError),
}

/// The cause of the node process's exit.
enum StopCause {
    OwnerGone,
    Requested { keep_logs: bool },
}

/// Runs the node process of `folder` until a request stops it or its owner disconnects.
///
/// # Errors
/// When the node process cannot start, or cannot take everything down.
pub fn run(folder: &RunFolder) -> Result<(), NodeError> {
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| NodeError::File { path, source }
    };
    let lock = File::create(folder.lock()).map_err(file(&folder.lock()))?;
    lock.try_lock()
        .map_err(|_| NodeError::InUse(folder.path().to_path_buf()))?;
    let cgroup = folder.cgroup()?;
    cgroup.enter(LEAF)?;
    // Both sockets are opened before the namespaces change, because they face the host.
    let api = TcpListener::bind(("127.0.0.1", 0)).map_err(file(Path::new("127.0.0.1")))?;
    let port = api
        .local_addr()
        .map_err(file(Path::new("127.0.0.1")))?
        .port();
    fs::write(folder.port(), port.to_string()).map_err(file(&folder.port()))?;
    fs::write(folder.pid(), std::process::id().to_string()).map_err(file(&folder.pid()))?;
    namespace::enter(&folder.scratch())?;
    let mounts = namespace::mount_ids().map_err(file(Path::new("/proc/self/mountinfo")))?;
    // Orphans (container shims) become children of the node process, which reaps them.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| file(Path::new("subreaper"))(error.into()))?;
    let control =
        UnixListener::bind(folder.control_socket()).map_err(file(&folder.control_socket()))?;

    let processes = Arc::new(Processes::default());
    let reaper = Arc::clone(&processes);
    thread::spawn(move || reaper.reap_forever());
    thread::spawn(move || forward::serve(api));
    let power = Power {
        cgroup: cgroup.clone(),
        mounts,
    };
    let keep_logs = match serve(control, processes, power) {
        StopCause::OwnerGone => false,
        StopCause::Requested { keep_logs } => keep_logs,
    };
    cgroup.kill(KILL_TIMEOUT)?;
    cgroup.leave()?;
    cgroup.remove(KILL_TIMEOUT)?;
    namespace::leave(&folder.scratch()).map_err(file(&folder.scratch()))?;
    if !keep_logs {
        folder.remove().map_err(file(folder.path()))?;
    }
    drop(lock);
    Ok(())
}

/// The processes that a power loss ends, and the mounts that outlive it.
struct Power {
    cgroup: Cgroup,
    mounts: MountIds,
}

impl Power {
    /// Kills every process, and removes what a machine loses with its power.
    fn cut(&self, processes: &Processes) -> io::Result<()> {
        self.cgroup.kill(KILL_TIMEOUT).map_err(io::Error::other)?;
        processes.wait_for_all(KILL_TIMEOUT)?;
        let children = self.cgroup.remove_children_except(LEAF);
        children.map_err(io::Error::other)?;
        namespace::forget_volatile_state(&self.mounts)
    }
}

/// Answers requests until one of them stops the node, or its owner disconnects.
fn serve(control: UnixListener, processes: Arc<Processes>, power: Power) -> StopCause {
    let power = Arc::new(power);
    let (ends, end) = mpsc::channel();
    let owned = Arc::new(AtomicBool::new(false));
    let kept = Arc::new(AtomicBool::new(false));
    {
        let (ends, owned) = (ends.clone(), Arc::clone(&owned));
        thread::spawn(move || {
            thread::sleep(OWNER_TIMEOUT);
            if !owned.load(Ordering::SeqCst) {
                let _ = ends.send(StopCause::OwnerGone);
            }
        });
    }
    thread::spawn(move || {
        for stream in control.incoming().flatten() {
            let session = Session {
                processes: Arc::clone(&processes),
                power: Arc::clone(&power),
                stop_sender: ends.clone(),
                has_owner: Arc::clone(&owned),
                detached: Arc::clone(&kept),
            };
            thread::spawn(move || session.serve(&stream));
        }
    });
    end.recv().unwrap_or(StopCause::OwnerGone)
}

/// One connection to the control socket.
struct Session {
    processes: Arc<Processes>,
    power: Arc<Power>,
    stop_sender: Sender<StopCause>,
    /// Whether some connection has taken ownership.
    has_owner: Arc<AtomicBool>,
    /// Whether the cluster outlives its owner.
    detached: Arc<AtomicBool>,
}

impl Session {
    fn serve(&self, stream: &UnixStream) {
        let mut owner = false;
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let reply = match serde_json::from_str(&line) {
                Ok(request) => {
                    owner |= matches!(request, Request::TakeOwnership);
                    self.answer(request)
                }
                Err(error) => Reply::Failed {
                    why: format!("request not understood: {error}"),
                },
            };
            let Ok(text) = serde_json::to_string(&reply) else {
                break;
            };
            if writeln!(&*stream, "{text}").is_err() {
                break;
            }
        }
        if owner && !self.detached.load(Ordering::SeqCst) {
            let _ = self.stop_sender.send(StopCause::OwnerGone);
        }
    }

    fn answer(&self, request: Request) -> Reply {
        match request {
            Request::TakeOwnership => {
                self.has_owner.store(true, Ordering::SeqCst);
                Reply::Done
            }
            Request::Detach => {
                self.detached.store(true, Ordering::SeqCst);
                Reply::Done
            }
            Request::Spawn {
                name,
                program,
                arguments,
                environment,
                log,
            } => {
                match self
                    .processes
                    .spawn(&name, &program, &arguments, &environment, &log)
                {
                    Ok(pid) => Reply::Running { pid },
                    Err(error) => Reply::Failed {
                        why: format!("{name}: {error}"),
                    },
                }
            }
            Request::End { name, kill } => match self.processes.end(&name, kill, KILL_TIMEOUT) {
                Ok(how) => Reply::Ended { how },
                Err(error) => Reply::Failed {
                    why: error.to_string(),
                },
            },
            Request::Status { name } => match self.processes.state(&name) {
                Some(ProcessState::Running(pid)) => Reply::Running { pid },
                Some(ProcessState::Ended(how)) => Reply::Ended { how },
                None => Reply::Failed {
                    why: format!("{name} was never started"),
                },
            },
            Request::PowerOff => match self.power.cut(&self.processes) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed {
                    why: error.to_string(),
                },
            },
            Request::Stop { keep_logs } => {
                let _ = self.stop_sender.send(StopCause::Requested { keep_logs });
                Reply::Done
            }
        }
    }
}
