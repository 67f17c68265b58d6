//! Admits processes that say hello.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use bursar_protocol::messages::{HeldCredit, RejectReason, Response};
use bursar_protocol::{POISON_SINCE, VERSION};
use tokio_util::sync::CancellationToken;

use super::super::{ContainerResolver, Process};
use super::Container;
use super::memory::AdmittedProcess;
use super::recorder::ChangeNumber;

/// The answer to a hello, and what must happen before the agent sends it.
pub(in super::super) struct Admission {
    pub(in super::super) welcome: Response,
    pub(in super::super) page: Arc<OwnedFd>,
    /// The change that the checkpoint must hold before the agent answers.
    pub(in super::super) change: ChangeNumber,
    /// Cancelled when another connection takes over this process.
    pub(in super::super) superseded: CancellationToken,
    /// Whether the process had another image before.
    pub(in super::super) replaced_image: bool,
}

impl Container {
    /// Admits a process that says hello.
    pub(in super::super) fn handle_hello(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        resolver: &dyn ContainerResolver,
    ) -> Result<Admission, RejectReason> {
        let pid = process.pid;
        let cgroup = self.resolve_cgroup(pid, resolver)?;
        if self.memory.is_full_for(pid) {
            return Err(RejectReason::Busy);
        }
        let admitted = self
            .memory
            .admit(process, image, version, holdings, resolver);
        let AdmittedProcess {
            page,
            generation,
            superseded,
            replaced,
        } = admitted.map_err(|error| {
            if let Some(suppressed) = self.log_limiter.due("no page", Instant::now()) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, %error, suppressed, "failed to create a credit page");
            }
            RejectReason::Busy
        })?;
        self.cgroup = Some(cgroup);
        self.recorder.drop_requests_of(pid);
        if let Some(replaced) = &replaced {
            self.record_exit(replaced);
        }
        self.memory.refresh_pages();
        self.publish_fences();
        let welcome = Response::Welcome {
            version: version.min(VERSION),
            generation: (version >= POISON_SINCE).then_some(generation),
            quotas: self.memory.wire_quotas(),
        };
        Ok(Admission {
            welcome,
            page,
            change: self.note_change(),
            superseded,
            replaced_image: replaced.is_some(),
        })
    }
}
