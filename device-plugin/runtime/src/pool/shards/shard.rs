//! Keeps the heap and the credit of one shard.

use std::sync::atomic::{AtomicU64, Ordering};

use bursar_biased_lock::BiasedLock;

use super::{Allocation, BlockHandle, Request};
use crate::pool::tlsf::{BlockId, EmptyRegion, HeapBlock, TlsfHeap};

/// Chunk of a shard.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Block in the central heap.
    pub(super) id: BlockId,
    /// Region in the shard's heap.
    pub(super) span: EmptyRegion,
}

/// Heap and chunks of a shard, guarded by its lock.
#[derive(Debug, Default)]
pub(super) struct ShardState {
    pub(super) heap: TlsfHeap,
    /// Indexed by the region's number. Empty for the central heap, whose regions are slabs.
    pub(super) chunks: Vec<Option<Chunk>>,
    /// Number of draws while credit was low.
    pub(super) draws: u32,
}

impl ShardState {
    #[inline]
    pub(super) fn allocate(&mut self, shard: usize, request: Request) -> Option<Allocation> {
        let taken = self.heap.allocate(request.bytes, request.align)?;
        Some(Allocation {
            handle: BlockHandle {
                shard: shard as u32,
                id: taken.id,
            },
            address: taken.address,
            deps: taken.deps,
        })
    }

    pub(super) fn add_chunk(&mut self, chunk: HeapBlock) -> Option<()> {
        let vacant = self.chunks.iter().position(Option::is_none);
        let region = vacant.unwrap_or(self.chunks.len());
        let index = u32::try_from(region).ok()?;
        let span = self
            .heap
            .add_region(index, chunk.address, chunk.bytes, chunk.deps)?;
        if vacant.is_none() {
            self.chunks.push(None);
        }
        self.chunks[region] = Some(Chunk { id: chunk.id, span });
        Some(())
    }
}

/// Shard on cache lines of its own, because other threads use its neighbours.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Shard {
    pub(super) state: BiasedLock<ShardState>,
    /// Bytes that the shard may allocate without asking the account. Written under the state's lock
    /// only, and read without it.
    credit: AtomicU64,
}

impl Shard {
    #[inline]
    pub(super) fn credit(&self) -> u64 {
        self.credit.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set_credit(&self, _: &mut ShardState, bytes: u64) {
        self.credit.store(bytes, Ordering::Relaxed);
    }

    /// Takes and returns the shard's idle credit.
    pub(super) fn take_credit(&self, state: &mut ShardState) -> u64 {
        let idle = self.credit();
        self.set_credit(state, 0);
        idle
    }
}
