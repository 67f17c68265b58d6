//! Provides the simulated GPU, and containers to start programs in.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use bursar_ledger::units::AllocationId;
use bursar_sessions::Sessions;
use bursar_sim_state::{MachineDir, Sim};

use crate::support::{GPU, built};

/// Bytes of a context here: 64 processes and their predecessors' children must fit on one card.
pub(crate) const CONTEXT: u64 = 16 << 20;

/// The card: an H200.
const MEMORY: u64 = 141 << 30;

/// The crowd leaves the CPU to the agent and to the neighbour, because it does not test CPU
/// sharing.
const NICE: libc::c_int = 10;

/// One simulated machine.
#[derive(Debug)]
pub(crate) struct Room {
    folder: tempfile::TempDir,
}

impl Room {
    /// Creates the machine's folder.
    pub(crate) fn new() -> Room {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sim.toml");
        let gpu = format!(
            "context = \"{CONTEXT}\"\n[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"{GPU}\"\nmemory = \"{MEMORY}\"\nminor = 0\n"
        );
        std::fs::write(&config, gpu).unwrap();
        MachineDir::at(folder.path().join("sim"))
            .init(&config, &[])
            .unwrap();
        Room { folder }
    }

    /// Returns the machine's folder.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Opens the machine's GPU.
    pub(crate) fn sim(&self) -> Sim {
        Sim::open(&self.folder.path().join("sim")).unwrap()
    }

    /// Starts a container for an allocation. Its folder exists, served or not.
    pub(crate) fn container(&self, allocation: AllocationId) -> Container {
        let alloc =
            Sessions::alloc_dir(&self.folder.path().join("run")).join(allocation.to_string());
        std::fs::create_dir_all(&alloc).unwrap();
        // Mounts as the agent's CDI device makes them. An idle process keeps the namespaces.
        let script = "set -e; mount -t tmpfs none /opt; mkdir -p /opt/bursar/lib /opt/bursar/drv; \
            touch /opt/bursar/lib/libcuda.so.1 /opt/bursar/drv/cuda.so.1; \
            mount --bind $SHIM /opt/bursar/lib/libcuda.so.1; mount --bind $REAL /opt/bursar/drv/cuda.so.1; \
            mount -t tmpfs none /run; mkdir /run/bursar; mount --bind -o ro $ALLOC /run/bursar; \
            echo made; exec sleep infinity";
        let mut command = Command::new("unshare");
        command.arg("--mount");
        // SAFETY: the call takes nothing and returns a number.
        let root = unsafe { libc::geteuid() } == 0;
        if !root {
            command.args(["--user", "--map-root-user"]);
        }
        let mut holder = command
            .args(["sh", "-c", script])
            .env("SHIM", built().join("libbursar_shim.so"))
            .env("REAL", built().join("libbursar_sim_cuda.so"))
            .env("ALLOC", alloc)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "made\n");
        let namespace = |name| File::open(format!("/proc/{}/ns/{name}", holder.id())).unwrap();
        let mut namespaces = Vec::new();
        if !root {
            namespaces.push(namespace("user"));
        }
        namespaces.push(namespace("mnt"));
        Container {
            holder,
            namespaces,
            sim: self.folder.path().join("sim"),
        }
    }
}

/// The mounts of a container.
#[derive(Debug)]
pub(crate) struct Container {
    holder: Child,
    namespaces: Vec<File>,
    sim: PathBuf,
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Container {
    /// Starts a program in the container. It prints `ready` once it has a context.
    pub(crate) fn start(&self, nice: bool) -> Program {
        let namespaces: Vec<i32> = self.namespaces.iter().map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_quota-client"));
        command
            .env_clear()
            .env("LD_LIBRARY_PATH", "/opt/bursar/lib")
            .env("SIMGPU_DEV", self.sim.join("dev"))
            .env("SIMGPU_DIR", &self.sim)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let enter = move || {
            for namespace in &namespaces {
                // SAFETY: plain system calls on open descriptors.
                if unsafe { libc::setns(*namespace, 0) } != 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            // SAFETY: plain system calls.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if nice {
                    libc::nice(NICE);
                }
            }
            Ok(())
        };
        // SAFETY: the closure between fork and exec makes system calls only.
        unsafe { command.pre_exec(enter) };
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Program {
            child,
            input,
            output,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Returns the program's pid.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line; does nothing once the program is gone.
    pub(crate) fn tell(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}");
    }

    /// Reads the next line; `None` once the program is gone.
    pub(crate) fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        let length = self.output.read_line(&mut line).unwrap_or(0);
        (length > 0 && line.ends_with('\n')).then(|| line.trim_end().to_owned())
    }

    /// Sends a line and returns the answer.
    pub(crate) fn ask(&mut self, line: impl AsRef<str>) -> Option<String> {
        self.tell(line.as_ref());
        self.hear()
    }

    /// Waits until a new image has a context. Fails with whatever else the image prints.
    pub(crate) fn begin(&mut self) -> Result<(), String> {
        match self.hear().as_deref() {
            Some("ready") => self.numbers("begin").map(drop),
            other => Err(format!("{other:?}")),
        }
    }

    /// Returns the numbers of an answer that begins with `ok`.
    pub(crate) fn numbers(&mut self, line: impl AsRef<str>) -> Result<Vec<u64>, String> {
        let answer = self.ask(line.as_ref()).ok_or("it is gone")?;
        let numbers = answer.strip_prefix("ok").map(|rest| {
            let words = rest.split_whitespace();
            words.map(|word| word.parse().unwrap()).collect()
        });
        numbers.ok_or(answer)
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: the child was not reaped yet, so the pid is its own.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Lets the program end by itself.
    pub(crate) fn leave(mut self) {
        drop(self.input);
        let _ = self.child.wait();
    }

    /// Kills the program by SIGKILL.
    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
