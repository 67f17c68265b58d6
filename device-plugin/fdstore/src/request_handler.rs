//! Answers one message of the agent. Does no I/O.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bursar_protocol::fdstore::{
    FdStoreRequest, FdStoreResponse, OLDEST_VERSION, Refusal, StoredLease, VERSION,
};

use crate::fd_store::FdStore;

/// Returns the answer and the descriptor to send with it. A received descriptor that is not stored
/// is closed.
pub(crate) fn handle<'a>(
    store: &'a mut FdStore,
    message: FdStoreRequest,
    fd: Option<OwnedFd>,
) -> (FdStoreResponse, Option<BorrowedFd<'a>>) {
    let done = match message {
        FdStoreRequest::Hello {
            version: ..OLDEST_VERSION,
        } => Err(Refusal::Version),
        FdStoreRequest::Hello { version } => Ok(FdStoreResponse::Ready {
            version: version.min(VERSION),
            leases: to_u32(store.count()),
            room: to_u32(store.room()),
        }),
        FdStoreRequest::Put { lease, blob } => match fd {
            Some(fd) => store.put(lease, fd, blob).map(|()| FdStoreResponse::Stored),
            None => Err(Refusal::NoDescriptor),
        },
        FdStoreRequest::Update { lease, blob } => {
            store.update(lease, blob).map(|()| FdStoreResponse::Stored)
        }
        FdStoreRequest::Get { lease } => match store.get(lease) {
            Ok((fd, blob)) => {
                let blob = blob.clone();
                return (
                    FdStoreResponse::Lease(StoredLease { lease, blob }),
                    Some(fd.as_fd()),
                );
            }
            Err(refusal) => Err(refusal),
        },
        FdStoreRequest::Drop { lease } => {
            store.remove(lease);
            Ok(FdStoreResponse::Dropped)
        }
        FdStoreRequest::List { from } => Ok(FdStoreResponse::Listed {
            leases: store.list_from(from),
        }),
    };
    (done.unwrap_or_else(FdStoreResponse::Refused), None)
}

fn to_u32(leases: usize) -> u32 {
    u32::try_from(leases).unwrap_or(u32::MAX)
}
