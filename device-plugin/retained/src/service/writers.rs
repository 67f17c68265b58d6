//! Waits for the exit of processes that write a lease.

use std::sync::Arc;
use std::time::Duration;

use bursar_sessions::pidfd::ProcessExit;
use bursar_sessions::{ContainerResolver, Process};
use rustix::io::Errno;
use tracing::warn;

use super::{Completion, State};

/// The delay between two attempts to watch a process.
const WATCH_RETRY: Duration = Duration::from_secs(1);

impl State {
    /// Waits for the exit of writers only, because each wait takes a descriptor.
    pub(super) fn watch_writers(&mut self) {
        let writers = self.leases.writers();
        self.watched_writers.retain(|process, watch| {
            let writes = writers.contains(process);
            if !writes {
                watch.abort();
            }
            writes
        });
        for process in writers {
            self.watched_writers.entry(process).or_insert_with(|| {
                let membership = Arc::clone(&self.service.membership);
                self.jobs.spawn(async move {
                    wait_for_exit(process, membership.as_ref()).await;
                    Completion::ProcessEnded(process)
                })
            });
        }
    }
}

/// Returns once a process has exited.
async fn wait_for_exit(process: Process, membership: &dyn ContainerResolver) {
    loop {
        // The pidfd comes first: if `/proc` then shows the process, both are the same one.
        match ProcessExit::open(process.pid) {
            Ok(life) if membership.process(process.pid) == Some(process) => {
                return life.wait().await;
            }
            Ok(_) => return,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return,
            // The process may run: the agent may be out of descriptors, for example.
            Err(error) => {
                warn!(pid = process.pid, %error, "failed to watch the writer of a lease; retrying")
            }
        }
        tokio::time::sleep(WATCH_RETRY).await;
    }
}
