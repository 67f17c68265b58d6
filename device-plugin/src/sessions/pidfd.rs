//! Waits for the death of a process, by its pidfd.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A process whose death can be waited for: never one that later has the same pid.
pub(crate) struct ProcessExit(AsyncFd<OwnedFd>);

impl ProcessExit {
    /// The process that has this pid now.
    ///
    /// # Errors
    /// `ESRCH` when there is none, and what else `pidfd_open(2)` answers.
    pub(crate) fn open(pid: u32) -> io::Result<ProcessExit> {
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

    /// Returns once the process has ended (a zombie has).
    pub(crate) async fn wait(&self) {
        // An error means that the runtime shuts down.
        let _ = self.0.readable().await;
    }
}
