//! The layout of the shared table.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// GPUs and MIG instances, at most.
pub const MAX_UNITS: usize = 32;
/// Living process images, at most.
pub const MAX_IMAGES: usize = 1024;
/// Living shared allocations (VMM, IPC), at most.
pub const MAX_OBJECTS: usize = 16384;
/// XID events that a slow reader can be behind.
pub const MAX_XIDS: usize = 256;
/// Names this layout; changed with it.
pub(crate) const MAGIC: u64 = 0x5349_4d47_5055_0004;

/// Fields below `mutex` are written by its owner only, except where they say otherwise. A fresh file's
/// zeros mean: nothing there.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawTable {
    pub(crate) magic: AtomicU64,
    pub(crate) mutex: UnsafeCell<libc::pthread_mutex_t>,
    /// The pid namespace that `simgpu init` ran in: the host's.
    pub(crate) host_namespace: AtomicU64,
    /// Read at any time.
    pub(crate) scrub: AtomicU32,
    /// XIDs so far; readers wait on it as a futex.
    pub(crate) xid_count: AtomicU32,
    pub(crate) next_id: AtomicU64,
    pub(crate) objects_high_water: AtomicU32,
    /// Read at any time: NVML's calls that are about no GPU wait.
    pub(crate) hung: AtomicU32,
    pub(crate) units: [RawUnit; MAX_UNITS],
    pub(crate) xids: [RawXid; MAX_XIDS],
    pub(crate) images: [RawImage; MAX_IMAGES],
    pub(crate) objects: [RawObject; MAX_OBJECTS],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawUnit {
    /// The sum of all images' charges and objects' sizes.
    pub(crate) used: AtomicU64,
    /// Read at any time: the GPU fell off the bus.
    pub(crate) lost: AtomicU32,
    /// Read at any time: NVML's calls about the GPU wait.
    pub(crate) hung: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawXid {
    pub(crate) unit: AtomicU32,
    pub(crate) code: AtomicU32,
    /// 0 when no process is named; as the host's pid namespace numbers it.
    pub(crate) pid: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawImage {
    pub(crate) used: AtomicU32,
    /// Its own idea of its pid, true in `namespace`.
    pub(crate) pid: AtomicU32,
    pub(crate) namespace: AtomicU64,
    /// Which image: place numbers are used again, serials are not.
    pub(crate) serial: AtomicU64,
    /// The pid that an observer on the host last saw, for when the process is dead and a child lives.
    pub(crate) host_pid: AtomicU32,
    /// Read at any time by the image: a sticky code injected from outside; 0 for none.
    pub(crate) injected: AtomicI32,
    /// By unit, by [`crate::Charge`].
    pub(crate) charges: [[AtomicU64; 3]; MAX_UNITS],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawObject {
    pub(crate) used: AtomicU32,
    pub(crate) unit: AtomicU32,
    pub(crate) id: AtomicU64,
    pub(crate) size: AtomicU64,
    /// Finds the object of a descriptor that came through a socket.
    pub(crate) inode: AtomicU64,
    pub(crate) creator: AtomicU32,
    /// The creator's serial, for the place may belong to another by now.
    pub(crate) creator_serial: AtomicU64,
}
