//! Stores descriptors and their blobs by the number of their lease.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use bursar_protocol::fdstore::{Blob, MAX_LEASES, Refusal, StoredLease, fit_in_frame};

/// Open files of the process itself: sockets, and descriptors in transit.
const RESERVED_FILES: u64 = 64;

/// The memory of the process without leases, and of the messages that it handles.
const BASE_MEMORY: u64 = 16 << 20;

/// The most memory of one lease: the longest blob with the overhead of allocator and kernel. The
/// remainder covers fragmentation by blobs of other lengths
/// (`full_fd_store_stays_within_its_memory`).
const LEASE_MEMORY: u64 = 6 << 10;

/// How many leases the limits of open files and of memory allow; `None` is no limit. The kernel
/// kills an fd store that exceeds its memory limit, and with it all retained memory is lost.
pub(crate) fn capacity(open_files: Option<u64>, memory: Option<u64>) -> usize {
    let files = open_files
        .unwrap_or(u64::MAX)
        .saturating_sub(RESERVED_FILES);
    let blobs = memory.unwrap_or(u64::MAX).saturating_sub(BASE_MEMORY) / LEASE_MEMORY;
    usize::try_from(files.min(blobs)).map_or(MAX_LEASES, |room| room.min(MAX_LEASES))
}

/// The stored leases.
#[derive(Debug)]
pub(crate) struct FdStore {
    leases: BTreeMap<u64, (OwnedFd, Blob)>,
    /// How many leases the fd store may have.
    capacity: usize,
}

impl FdStore {
    pub(crate) fn with_capacity(capacity: usize) -> FdStore {
        FdStore {
            leases: BTreeMap::new(),
            capacity,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.count())
    }

    pub(crate) fn put(&mut self, lease: u64, fd: OwnedFd, blob: Blob) -> Result<(), Refusal> {
        if self.leases.contains_key(&lease) {
            return Err(Refusal::Exists);
        }
        if self.room() == 0 {
            return Err(Refusal::Full);
        }
        self.leases.insert(lease, (fd, blob));
        Ok(())
    }

    pub(crate) fn update(&mut self, lease: u64, blob: Blob) -> Result<(), Refusal> {
        let (_, stored) = self.leases.get_mut(&lease).ok_or(Refusal::Missing)?;
        *stored = blob;
        Ok(())
    }

    pub(crate) fn get(&self, lease: u64) -> Result<&(OwnedFd, Blob), Refusal> {
        self.leases.get(&lease).ok_or(Refusal::Missing)
    }

    pub(crate) fn remove(&mut self, lease: u64) {
        self.leases.remove(&lease);
    }

    /// The leases from a number on, as many as fit into one answer.
    pub(crate) fn list_from(&self, lease: u64) -> Vec<StoredLease> {
        let leases = self.leases.range(lease..);
        fit_in_frame(leases.map(|(lease, (_, blob))| StoredLease {
            lease: *lease,
            blob: blob.clone(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        rustix::pipe::pipe().unwrap().0
    }

    #[test]
    fn full_fd_store_refuses_until_a_lease_is_dropped() {
        let mut store = FdStore::with_capacity(1);
        assert_eq!(store.put(1, fd(), Blob::default()), Ok(()));
        assert_eq!(store.put(1, fd(), Blob::default()), Err(Refusal::Exists));
        assert_eq!(store.put(2, fd(), Blob::default()), Err(Refusal::Full));
        store.remove(1);
        assert_eq!(store.put(2, fd(), Blob::default()), Ok(()));
    }

    #[test]
    fn capacity_is_bounded_by_files_and_memory() {
        assert_eq!(capacity(Some(1024), None), 960);
        assert_eq!(capacity(Some(3), None), 0);
        assert_eq!(capacity(None, None), MAX_LEASES);
        assert_eq!(capacity(None, Some(BASE_MEMORY)), 0);
        assert_eq!(capacity(None, Some(64 << 20)), 8192);
        assert_eq!(capacity(Some(1024), Some(64 << 20)), 960);
        // The limit in the chart.
        assert_eq!(capacity(None, Some(400 << 20)), MAX_LEASES);
    }
}
