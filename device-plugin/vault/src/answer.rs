//! What the vault answers to a message: values in, values out.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bursar_protocol::vault::{Entry, FromVault, Refusal, ToVault, VERSION};

use crate::held::Held;

/// The answer, and the descriptor that goes with it. One that came and is not kept is closed here.
pub(crate) fn answer<'a>(
    held: &'a mut Held,
    message: ToVault,
    fd: Option<OwnedFd>,
) -> (FromVault, Option<BorrowedFd<'a>>) {
    let done = match message {
        ToVault::Hello { version: 0 } => Err(Refusal::Version),
        ToVault::Hello { version } => Ok(FromVault::Ready {
            version: version.min(VERSION),
            leases: count(held.count()),
            room: count(held.room()),
        }),
        ToVault::Put { lease, blob } => match fd {
            Some(fd) => held.put(lease, fd, blob).map(|()| FromVault::Held),
            None => Err(Refusal::NoDescriptor),
        },
        ToVault::Update { lease, blob } => held.update(lease, blob).map(|()| FromVault::Held),
        ToVault::Get { lease } => match held.get(lease) {
            Ok((fd, blob)) => {
                let blob = blob.clone();
                return (FromVault::Lease(Entry { lease, blob }), Some(fd.as_fd()));
            }
            Err(refusal) => Err(refusal),
        },
        ToVault::Drop { lease } => {
            held.remove(lease);
            Ok(FromVault::Dropped)
        }
        ToVault::List { from } => Ok(FromVault::Listed {
            leases: held.from(from),
        }),
    };
    (done.unwrap_or_else(FromVault::Refused), None)
}

fn count(leases: usize) -> u32 {
    u32::try_from(leases).unwrap_or(u32::MAX)
}
