//! Runs the simulated kernel module of a machine for a test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

/// The longest wait for an answer of the module's process.
const PATIENCE: Duration = Duration::from_secs(20);

/// A channel group, as the kernel module sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimGroup {
    /// The process that made the client.
    pub pid: u32,
    /// The client's handle.
    pub client: u32,
    /// The group's handle.
    pub handle: u32,
    /// The slice that was last set, in microseconds.
    pub slice: u64,
    /// Whether it has work.
    pub is_busy: bool,
    /// How long it has had the GPU.
    pub finished: Duration,
}

/// A running kernel module. Dropped, it ends: what has its nodes open then gets errors.
#[derive(Debug)]
pub struct KernelModule {
    child: Child,
    socket: UnixStream,
    answers: BufReader<UnixStream>,
}

impl KernelModule {
    pub(crate) fn spawn(mut command: Command) -> Result<KernelModule> {
        let (socket, peer) = UnixStream::pair()?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let child = command
            .stdin(OwnedFd::from(peer.try_clone()?))
            .stdout(Stdio::from(OwnedFd::from(peer)))
            .spawn()
            .context("starting the kernel module")?;
        let mut module = KernelModule {
            child,
            answers: BufReader::new(socket.try_clone()?),
            socket,
        };
        let greeting = module.read_line()?;
        ensure!(greeting == "ready", "the kernel module said `{greeting}`");
        Ok(module)
    }

    fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line);
        let read = read.context("waiting for the kernel module")?;
        ensure!(read > 0, "the kernel module has ended");
        Ok(line.trim_end().to_owned())
    }

    fn request(&mut self, line: &str) -> Result<String> {
        self.socket.write_all(format!("{line}\n").as_bytes())?;
        self.read_line()
    }

    /// Makes slices without effect, or gives them their effect back.
    ///
    /// # Errors
    /// The module's process has ended.
    pub fn set_inert(&mut self, is_inert: bool) -> Result<()> {
        let state = if is_inert { "inert on" } else { "inert off" };
        self.request(state).map(|_| ())
    }

    /// The number of clients of all processes.
    ///
    /// # Errors
    /// The module's process has ended.
    pub fn clients(&mut self) -> Result<usize> {
        Ok(self.request("clients")?.parse()?)
    }

    /// The number of calls of all processes so far.
    ///
    /// # Errors
    /// The module's process has ended.
    pub fn calls(&mut self) -> Result<u64> {
        Ok(self.request("calls")?.parse()?)
    }

    /// The groups of a GPU, by the GPU's position.
    ///
    /// # Errors
    /// The module's process has ended.
    pub fn groups(&mut self, gpu: usize) -> Result<Vec<SimGroup>> {
        let text = self.request(&format!("groups {gpu}"))?;
        let groups = text.split_terminator(',').map(|group| {
            let numbers: Vec<u64> = group
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()?;
            let &[pid, client, handle, slice, is_busy, finished] = &numbers[..] else {
                anyhow::bail!("the kernel module said `{group}` of a group");
            };
            Ok(SimGroup {
                pid: u32::try_from(pid)?,
                client: u32::try_from(client)?,
                handle: u32::try_from(handle)?,
                slice,
                is_busy: is_busy != 0,
                finished: Duration::from_nanos(finished),
            })
        });
        groups.collect()
    }
}

impl Drop for KernelModule {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
