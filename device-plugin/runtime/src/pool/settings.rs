//! Defines the limits and the statistics of a pool.

/// Size limits and growth of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Bytes of the first slab; 0 for none.
    pub initial: u64,
    /// Largest number of bytes that the pool takes from its source.
    pub maximum: u64,
    /// Bytes by which the pool grows if the source has as many and the request fits.
    pub step: u64,
    /// Largest number of requested bytes of live blocks, enforced exactly and without cost for an
    /// allocation. [`Pool::set_limit`](super::Pool::set_limit) changes it.
    pub limit: u64,
}

impl Default for PoolSettings {
    fn default() -> PoolSettings {
        PoolSettings {
            initial: 0,
            maximum: u64::MAX,
            step: 256 << 20,
            limit: u64::MAX,
        }
    }
}

/// Statistics of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Bytes taken from the source.
    pub reserved: u64,
    /// Number of slabs.
    pub slabs: usize,
    /// Requested bytes of live blocks.
    pub requested: u64,
    /// Bytes of live blocks after rounding.
    pub live: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Bytes that are free for the next request.
    pub free: u64,
    /// Largest free range. Adjacent ranges of several shards count separately until a request needs
    /// them as one.
    pub largest_free: u64,
    /// Number of blocks for which one stream had to wait for another.
    pub waits: u64,
}
