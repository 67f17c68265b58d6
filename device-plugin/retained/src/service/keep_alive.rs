//! Keeps one exported descriptor open in the fd store, because exports are fast while one exists.

use std::sync::Arc;

use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};

use super::{Completion, GRANULARITY, State};

/// The size of the export keep-alive.
const KEEP_ALIVE_BYTES: Bytes = Bytes(GRANULARITY);

/// A descriptor that the fd store keeps open, because exports are fast while one exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KeepAlive {
    None,
    Creating(GpuUuid),
    /// The fd store has it, for a GPU that was not drained at its creation.
    Stored,
    Closing,
}

impl State {
    /// Whether the keep-alive may be on a GPU. A MIG instance without leases has none, because an
    /// administrator could not destroy the instance.
    pub(super) fn may_have_keep_alive(&self, gpu: &GpuUuid) -> bool {
        !gpu.is_mig() || self.leases.has_leases_on(gpu)
    }

    /// Creates the export keep-alive: exports are fast while one exported descriptor is open (F3 in
    /// docs/facts.md).
    pub(super) fn create_keep_alive(&mut self, gpu: GpuUuid) {
        let Some(connection) = self.connection.clone() else {
            return;
        };
        self.keep_alive = KeepAlive::Creating(gpu.clone());
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let lease = LeaseId(KEEP_ALIVE);
            // Without a keep-alive exports are only slower.
            let created = match provisioners.create(&gpu, KEEP_ALIVE_BYTES).await {
                Ok(fd) => connection.put(lease, Blob::default(), fd).await.is_ok(),
                Err(_) => false,
            };
            Completion::KeepAliveCreated(gpu, created)
        });
    }

    /// Closes the keep-alive. Its GPU is unknown after a restart; the next one is created on a GPU
    /// that is not drained.
    pub(super) fn close_keep_alive(&mut self) {
        if let (KeepAlive::Stored, Some(connection)) = (&self.keep_alive, &self.connection) {
            self.keep_alive = KeepAlive::Closing;
            let closed = connection.close(LeaseId(KEEP_ALIVE));
            self.jobs.spawn(async move {
                // A disconnected fd store lists what it has on the next connection.
                let _ = closed.await;
                Completion::KeepAliveClosed
            });
        }
    }
}
