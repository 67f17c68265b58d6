//! Moves chunks between the central heap and the shards.

use super::shard::{Chunk, ShardState};
use super::{Allocation, CENTRAL, Request, Shards};
use crate::pool::tlsf::EdgeBlock;

/// Chunk sizes are multiples of this.
const CHUNK_STEP: u64 = 2 << 20;

/// A chunk has at most this fraction of the free bytes.
const CHUNK_DIVISOR: u64 = 8;

/// Number of blocks for which a new chunk has room if possible; the minimum is two.
const BLOCKS_PER_CHUNK: u64 = 4;

impl Shards {
    /// Adds a chunk to a shard and allocates from it, or from the central heap if there is no
    /// chunk.
    pub(super) fn refill(
        &self,
        shard: usize,
        state: &mut ShardState,
        request: Request,
    ) -> Option<Allocation> {
        if self.grow_shard(state, request).is_some()
            || self.return_idle_chunks() && self.grow_shard(state, request).is_some()
        {
            let allocation = state.allocate(shard, request);
            if allocation.is_some() {
                return allocation;
            }
        }
        self.central().allocate(CENTRAL, request)
    }

    /// Adds a chunk to a shard, if a sufficiently large one is left.
    fn grow_shard(&self, state: &mut ShardState, request: Request) -> Option<()> {
        let mut central = self.central();
        let max_chunk = central.heap.free_bytes() / CHUNK_DIVISOR;
        let block_bytes = request.bytes.saturating_add(request.align);
        let wanted = block_bytes
            .saturating_mul(BLOCKS_PER_CHUNK)
            .max(state.heap.live_bytes());
        let chunk = wanted.min(max_chunk).next_multiple_of(CHUNK_STEP);
        if block_bytes.saturating_mul(2) > chunk {
            return None;
        }
        state.add_chunk(central.heap.allocate_chunk(chunk)?)
    }

    /// Returns the empty chunks of all shards to the central heap.
    pub(in super::super) fn return_chunks(&self) {
        for shard in &self.shards[1..] {
            self.return_shard_chunks(&mut shard.state.lock());
        }
    }

    /// Returns empty chunks of shards whose lock is free at once; says whether there was one.
    fn return_idle_chunks(&self) -> bool {
        let states = self.shards[1..]
            .iter()
            .filter_map(|shard| shard.state.try_lock());
        let returned = states.map(|mut state| self.return_shard_chunks(&mut state));
        returned.sum::<usize>() > 0
    }

    pub(super) fn return_shard_chunks(&self, state: &mut ShardState) -> usize {
        let chunks = 0..state.chunks.len();
        let returned = chunks.filter(|&region| self.return_chunk(state, region));
        returned.count()
    }

    /// Returns a chunk that is empty.
    fn return_chunk(&self, state: &mut ShardState, region: usize) -> bool {
        let Some(chunk) = &state.chunks[region] else {
            return false;
        };
        let (id, span) = (chunk.id, chunk.span);
        let Some(deps) = state.heap.remove_region(span) else {
            return false;
        };
        state.chunks[region] = None;
        // The central heap counts the chunk as allocated while a shard owns it, so this cannot
        // fail.
        let _ = self.central().heap.free(id, deps, |all| all);
        true
    }

    /// Returns the free edges of a shard's chunks.
    pub(super) fn return_edges(&self, state: &mut ShardState) {
        for end in state.heap.edge_blocks() {
            self.return_edge(state, &end);
        }
    }

    fn return_edge(&self, state: &mut ShardState, end: &EdgeBlock) -> Option<()> {
        let chunk = state.chunks.get(end.region as usize)?.as_ref()?;
        let mut central = self.central();
        let (kept_id, edge_id) = central.heap.split_chunk(chunk.id, end)?;
        let span = state.heap.remove_edge(end, chunk.span);
        state.chunks[end.region as usize] = Some(Chunk { id: kept_id, span });
        // The split allocated the edge a moment ago under this lock, so this cannot fail.
        let _ = central.heap.free(edge_id, end.deps, |all| all);
        Some(())
    }
}
