//! Records the memory that stream-ordered memory pools use and reserve.

use crate::abi::Code;
use std::collections::BTreeMap;

/// Granularity of the memory that a pool takes from its GPU.
const STEP: u64 = 32 << 20;

/// The sizes of a pool. Positions of allocations are not modelled, so a pool never fragments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PoolSizes {
    /// Bytes in use.
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// Bytes charged to the GPU.
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    /// Bytes that the pool keeps when the host synchronizes.
    pub(crate) threshold: u64,
    /// By stream: bytes freed in stream order since the host last synchronized.
    ///
    /// The stream may reuse these bytes; the pool cannot release them.
    pub(crate) freed_in_stream: BTreeMap<u64, u64>,
}

impl PoolSizes {
    /// Bytes to take from the GPU so that a stream can allocate `len` more.
    ///
    /// With `waits`, the stream also uses memory that other streams have yet to free.
    pub(crate) fn growth(&self, len: u64, stream: u64, waits: bool) -> u64 {
        let others = self.freed_in_stream.iter().filter(|(of, _)| **of != stream);
        let others: u64 = if waits {
            0
        } else {
            others.map(|(_, bytes)| bytes).sum()
        };
        (self.used + others + len)
            .next_multiple_of(STEP)
            .saturating_sub(self.reserved)
    }

    pub(crate) fn grow(&mut self, len: u64, stream: u64, growth: u64) {
        self.used += len;
        self.reserved += growth;
        self.used_high = self.used_high.max(self.used);
        self.reserved_high = self.reserved_high.max(self.reserved);
        // Reused memory no longer counts as freed; the stream's own memory is reused first.
        let streams: Vec<u64> = std::iter::once(stream)
            .chain(self.freed_in_stream.keys().copied())
            .collect();
        for of in streams {
            let excess = (self.used + self.unsynchronized()).saturating_sub(self.reserved);
            if let Some(bytes) = self.freed_in_stream.get_mut(&of) {
                *bytes -= excess.min(*bytes);
            }
        }
    }

    /// Bytes freed in stream order since the host last synchronized.
    fn unsynchronized(&self) -> u64 {
        self.freed_in_stream.values().sum()
    }

    /// Bytes to release, in whole steps, if `keep` bytes may stay.
    pub(crate) fn surplus(&self, keep: u64) -> u64 {
        let keep = keep.min(self.reserved) / STEP * STEP;
        let busy = (self.used + self.unsynchronized()).next_multiple_of(STEP);
        self.reserved - keep.max(busy).min(self.reserved)
    }
}

/// The location of a pool's memory, which decides about the charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolLocation {
    Device(usize),
    /// The host, or managed memory: no GPU is charged.
    Host,
}

#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) place: PoolLocation,
    pub(crate) sizes: PoolSizes,
    /// The REUSE attributes, 1 to 3, which are recorded only.
    pub(crate) reuse: [i32; 3],
    /// Created for export.
    pub(crate) exportable: bool,
    /// A default pool, which cannot be destroyed.
    pub(crate) default: bool,
    /// Destroyed by the program, but its last allocation is not freed yet.
    pub(crate) destroyed: bool,
}

/// Linear memory that a stream freed; released when the host synchronizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeferredFree {
    pub(crate) stream: u64,
    pub(crate) unit: usize,
    pub(crate) len: u64,
    pub(crate) address: u64,
}

/// The work that a synchronization waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncScope {
    /// All work of a stream.
    Stream(u64),
    /// All work.
    All,
}

impl SyncScope {
    pub(crate) fn covers(self, stream: u64) -> bool {
        self == SyncScope::All || self == SyncScope::Stream(stream)
    }
}

/// All pools of this image. The first handles are the devices' default pools.
#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) pools: BTreeMap<u64, Pool>,
    /// The current pool of each device.
    pub(crate) current_pools: Vec<u64>,
    /// The default pools outside devices, by allocation type, location type and id.
    pub(crate) host_defaults: BTreeMap<(i32, i32, i32), u64>,
    pub(crate) deferred_frees: Vec<DeferredFree>,
    handle_count: u64,
}

pub(crate) fn default_pool(device: usize) -> u64 {
    0x5167_0000_0000 + (device as u64 + 1) * 0x100
}

impl Pools {
    pub(crate) fn new(devices: usize) -> Pools {
        let default = |device| Pool {
            default: true,
            ..Pool::new(PoolLocation::Device(device))
        };
        Pools {
            pools: (0..devices)
                .map(|device| (default_pool(device), default(device)))
                .collect(),
            current_pools: (0..devices).map(default_pool).collect(),
            host_defaults: BTreeMap::new(),
            deferred_frees: Vec::new(),
            handle_count: devices as u64,
        }
    }

    pub(crate) fn live(&mut self, pool: u64) -> Result<&mut Pool, Code> {
        self.pools
            .get_mut(&pool)
            .filter(|pool| !pool.destroyed)
            .ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn insert(&mut self, pool: Pool) -> u64 {
        self.handle_count += 1;
        let handle = default_pool(self.handle_count as usize);
        self.pools.insert(handle, pool);
        handle
    }
}

impl Pool {
    pub(crate) fn new(place: PoolLocation) -> Pool {
        Pool {
            place,
            sizes: PoolSizes::default(),
            reuse: [1; 3],
            exportable: false,
            default: false,
            destroyed: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(requests: &[u64]) -> u64 {
        let mut sizes = PoolSizes::default();
        for len in requests {
            let growth = sizes.growth(*len, 0, false);
            sizes.grow(*len, 0, growth);
        }
        sizes.reserved
    }

    #[test]
    fn pool_grows_in_steps_of_32_mib() {
        assert_eq!(taken(&[1]), 32 << 20);
        assert_eq!(taken(&[33 << 20]), 64 << 20);
        assert_eq!(taken(&[32 << 20]), 32 << 20);
        assert_eq!(taken(&[1 << 20, 1 << 20]), 32 << 20);
    }

    #[test]
    fn surplus_excludes_memory_in_use() {
        let sizes = PoolSizes {
            used: 33 << 20,
            reserved: 128 << 20,
            ..PoolSizes::default()
        };
        assert_eq!(sizes.surplus(0), 64 << 20);
        assert_eq!(sizes.surplus(96 << 20), 32 << 20);
        assert_eq!(sizes.surplus(u64::MAX), 0);
    }

    #[test]
    fn pool_reuses_other_streams_memory_only_as_last_resort() {
        let mut sizes = PoolSizes::default();
        sizes.grow(64 << 20, 1, 64 << 20);
        sizes.used = 0;
        sizes.freed_in_stream.insert(1, 64 << 20);
        assert_eq!(sizes.surplus(0), 0, "no synchronise has seen it");
        assert_eq!(sizes.growth(64 << 20, 1, false), 0);
        assert_eq!(sizes.growth(64 << 20, 2, false), 64 << 20);
        assert_eq!(sizes.growth(64 << 20, 2, true), 0);
        sizes.grow(64 << 20, 2, 0);
        assert_eq!((sizes.used, sizes.unsynchronized()), (64 << 20, 0));
    }
}
