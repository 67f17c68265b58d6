//! Defines the memory layout of the shared table.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// Maximum number of GPUs and MIG instances.
pub const MAX_UNITS: usize = 32;
/// Maximum number of live process images.
pub const MAX_IMAGES: usize = 1024;
/// Maximum number of populations that the table tells apart for each image and unit.
pub const MAX_RUNS: usize = 16;
/// Maximum number of live shared allocations (VMM, IPC).
pub const MAX_OBJECTS: usize = 16384;
/// Capacity of the ring of XID events; a reader further behind misses the oldest.
pub const MAX_XIDS: usize = 256;
/// Identifies the layout; to be incremented with every change of it.
pub(crate) const MAGIC: u64 = 0x5349_4d47_5055_0009;

/// The table's file. In a new file all fields are zero.
///
/// Only the owner of `mutex` writes the fields below it. Fields marked "lock-free" are read without
/// the mutex.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawTable {
    pub(crate) magic: AtomicU64,
    pub(crate) mutex: UnsafeCell<libc::pthread_mutex_t>,
    /// The host's pid namespace, in which `simgpu init` ran.
    pub(crate) host_namespace: AtomicU64,
    /// Lock-free.
    pub(crate) scrub: AtomicU32,
    /// Number of XIDs so far; readers wait on it as a futex.
    pub(crate) xid_count: AtomicU32,
    pub(crate) next_id: AtomicU64,
    pub(crate) images_high_water: AtomicU32,
    pub(crate) objects_high_water: AtomicU32,
    /// Lock-free: whether NVML's calls that name no GPU hang.
    pub(crate) hung: AtomicU32,
    /// Lock-free: number of calls of the driver's context functions so far.
    pub(crate) context_calls: AtomicU64,
    /// The evictions of managed memory that the driver refuses from now on.
    pub(crate) evictions_to_refuse: AtomicU32,
    /// Lock-free: the milliseconds that the eviction of a GiB takes.
    pub(crate) eviction_delay: AtomicU32,
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
    /// Free bytes that the driver keeps for managed memory, and that NVML reports as used.
    pub(crate) managed_cache: AtomicU64,
    /// The number of the latest population of managed memory.
    pub(crate) populations: AtomicU64,
    /// Lock-free: whether the GPU fell off the bus.
    pub(crate) lost: AtomicU32,
    /// Lock-free: whether NVML's calls about the GPU hang.
    pub(crate) hung: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawXid {
    pub(crate) unit: AtomicU32,
    pub(crate) code: AtomicU32,
    /// The pid in the host's pid namespace; 0 if the event names no process.
    pub(crate) pid: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawImage {
    pub(crate) used: AtomicU32,
    /// The image's pid in `namespace`.
    pub(crate) pid: AtomicU32,
    pub(crate) namespace: AtomicU64,
    /// Identifies the image; slots are reused, serials are not.
    pub(crate) serial: AtomicU64,
    /// The pid that the host last observed, for when the process is dead but its child lives.
    pub(crate) host_pid: AtomicU32,
    /// Lock-free for the image: an injected sticky error code; 0 for none.
    pub(crate) injected: AtomicI32,
    /// The SM utilization that NVML reports, in percent; [`NO_SAMPLE`](crate::usage::NO_SAMPLE) for
    /// a process without a sample.
    pub(crate) sm_percent: AtomicU32,
    /// The bytes of managed memory that can be evicted before the owner has no host memory left.
    pub(crate) host_room: AtomicU64,
    /// Indexed by unit, then by [`crate::Charge`].
    pub(crate) charges: [[AtomicU64; 3]; MAX_UNITS],
    /// Indexed by unit.
    pub(crate) managed: [RawManaged; MAX_UNITS],
}

/// The managed memory of an image on a unit.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawManaged {
    /// The bytes that were evicted so far.
    pub(crate) evicted: AtomicU64,
    /// The populations with bytes on the unit, in no order.
    pub(crate) runs: [RawRun; MAX_RUNS],
}

/// The chunks of an image that became resident between two populations of other images.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawRun {
    /// The unit's number of the first population.
    pub(crate) number: AtomicU64,
    /// The bytes that are still there, in whole chunks; 0 in an unused run.
    pub(crate) bytes: AtomicU64,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawObject {
    pub(crate) used: AtomicU32,
    pub(crate) unit: AtomicU32,
    pub(crate) id: AtomicU64,
    pub(crate) size: AtomicU64,
    /// Identifies the object of a descriptor received over a socket.
    pub(crate) inode: AtomicU64,
    pub(crate) creator: AtomicU32,
    /// The creator's serial, because another image may use the creator's slot by now.
    pub(crate) creator_serial: AtomicU64,
}
