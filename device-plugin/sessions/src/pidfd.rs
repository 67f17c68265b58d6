//! Waits for the exit of a process, by its pidfd.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A pidfd: its process is never confused with a later one that has the same pid.
pub struct ProcessExit(AsyncFd<OwnedFd>);

impl ProcessExit {
    /// Opens the process that has this pid now.
    ///
    /// # Errors
    /// `ESRCH` when no process has the pid, and the other errors of `pidfd_open(2)`.
    pub fn open(pid: u32) -> io::Result<ProcessExit> {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        #[expect(
            deprecated,
            reason = "unsound for types that lend a descriptor they do not own; this one owns it"
        )]
        AsyncFd::with_interest(pidfd, Interest::READABLE).map(ProcessExit)
    }

    /// Returns once the process has exited, also as a zombie.
    pub async fn wait(&self) {
        // An error means that the runtime is shutting down.
        let _ = self.0.readable().await;
    }
}
