//! RMM's "random allocations" (cpp/benchmarks/random_allocations), draw for draw.
//!
//! Twice as many steps as allocations. A step allocates a uniformly drawn size with a probability of 73 %, unless all
//! allocations were made or the live bytes would reach the limit; otherwise it frees a drawn live block. An
//! allocation that fails becomes a free.

use super::minstd::Minstd;

/// Bytes that may be live in RMM's run.
pub(crate) const MAX_LIVE: u64 = 16_000 << 20;

/// What is measured: something that hands out `Block`s.
pub(crate) trait BenchAllocator {
    /// A live allocation.
    type Block;

    /// Allocates; `None` where it fails.
    fn allocate(&self, bytes: u64) -> Option<Self::Block>;

    /// Frees; how many bytes it was asked for.
    fn free(&self, block: Self::Block) -> u64;
}

/// One cell of the table.
#[derive(Clone, Copy)]
pub(crate) struct Cell {
    /// How many allocations.
    pub(crate) allocations: u64,
    /// The largest size in MiB.
    pub(crate) max_mib: u64,
    /// Bytes that may be live.
    pub(crate) max_live: u64,
    /// The first random number; RMM's is 1.
    pub(crate) seed: u64,
}

/// Runs a cell; how many allocations failed.
pub(crate) fn run<S: BenchAllocator>(source: &S, cell: Cell) -> u64 {
    let mut random = Minstd::new(cell.seed);
    let mut live: Vec<S::Block> = Vec::new();
    let (mut made, mut live_bytes, mut failed) = (0, 0, 0);
    for _ in 0..2 * cell.allocations {
        let bytes = random.within(1, cell.max_mib << 20);
        let mut allocates = true;
        if !live.is_empty() {
            let chance = random.within(0, 99);
            allocates =
                chance < 73 && made < cell.allocations && live_bytes + bytes < cell.max_live;
        }
        if allocates {
            match source.allocate(bytes) {
                Some(block) => {
                    live.push(block);
                    made += 1;
                    live_bytes += bytes;
                    continue;
                }
                None => failed += 1,
            }
        }
        if !live.is_empty() {
            let drawn = random.within(0, cell.allocations - 1);
            live_bytes -= source.free(live.swap_remove(drawn as usize % live.len()));
        }
    }
    // RMM's run ends with nothing live, but where an allocation failed.
    for block in live {
        source.free(block);
    }
    failed
}
