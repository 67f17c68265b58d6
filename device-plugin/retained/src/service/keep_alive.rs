//! Keeps one exported descriptor open in the fd store, because exports are fast while one exists.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};

use super::{Completion, GRANULARITY, State};
use crate::fdstore_client::{Connection, FdStoreError};

/// The size of the export keep-alive.
const KEEP_ALIVE_BYTES: Bytes = Bytes(GRANULARITY);

/// A descriptor that the fd store keeps open, because exports are fast while one exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KeepAlive {
    None,
    Creating(GpuUuid),
    /// The fd store has it. The GPU is unknown if an earlier version of the agent created it.
    Stored(Option<GpuUuid>),
    Closing,
}

impl State {
    /// Whether the keep-alive may be on a GPU. A drained GPU has none, nor has a MIG instance
    /// without leases, because an administrator could not destroy the instance.
    pub(super) fn may_have_keep_alive(&self, gpu: &GpuUuid) -> bool {
        !self.drained.contains(gpu) && (!gpu.is_mig() || self.leases.has_leases_on(gpu))
    }

    /// Creates the export keep-alive: exports are fast while one exported descriptor is open (F3 in
    /// docs/internals/facts.md).
    pub(super) fn create_keep_alive(&mut self, gpu: GpuUuid) {
        let Some(connection) = self.connection.clone() else {
            return;
        };
        self.keep_alive = KeepAlive::Creating(gpu.clone());
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let created = provisioners.create(&gpu, KEEP_ALIVE_BYTES, KEEP_ALIVE_BYTES);
            match created.await {
                Ok(fd) => store_keep_alive(connection, gpu, fd).await,
                // Without a keep-alive exports are only slower. The node's next tick tries again.
                Err(_) => Completion::KeepAliveChanged(connection.number(), KeepAlive::None),
            }
        });
    }

    /// Closes the keep-alive if its GPU may have none or is unknown. The next one is created on
    /// another GPU.
    pub(super) fn close_misplaced_keep_alive(&mut self) {
        if let (KeepAlive::Stored(gpu), Some(connection)) = (&self.keep_alive, &self.connection)
            && !gpu
                .as_ref()
                .is_some_and(|gpu| self.may_have_keep_alive(gpu))
        {
            self.keep_alive = KeepAlive::Closing;
            let (number, closed) = (connection.number(), connection.close(LeaseId(KEEP_ALIVE)));
            self.jobs.spawn(async move {
                match closed.await {
                    Ok(()) => Completion::KeepAliveChanged(number, KeepAlive::None),
                    // The fd store lists what it has on the next connection.
                    Err(_) => Completion::Nothing,
                }
            });
        }
    }
}

/// Stores the keep-alive in the fd store.
pub(super) async fn store_keep_alive(
    connection: Connection,
    gpu: GpuUuid,
    fd: OwnedFd,
) -> Completion {
    let lease = LeaseId(KEEP_ALIVE);
    // The fd store would refuse a second one, and the first one may be on another GPU.
    drop(connection.close(lease));
    let stored = match connection.put(lease, encode_gpu(&gpu), fd).await {
        Ok(sent) => sent.stored().await,
        Err(error) => Err(error),
    };
    let keep_alive = match stored {
        Ok(()) => KeepAlive::Stored(Some(gpu)),
        Err(FdStoreError::Refused(_)) => KeepAlive::None,
        // The fd store lists what it has on the next connection.
        Err(FdStoreError::Disconnected) => return Completion::Nothing,
    };
    Completion::KeepAliveChanged(connection.number(), keep_alive)
}

/// The blob of the keep-alive: the UUID of its GPU.
pub(super) fn encode_gpu(gpu: &GpuUuid) -> Blob {
    gpu.as_str().to_owned().try_into().unwrap_or_default()
}

/// The GPU of the keep-alive; `None` if an earlier version of the agent did not record it.
pub(super) fn parse_gpu(blob: &Blob) -> Option<GpuUuid> {
    blob.as_str().parse().ok()
}
