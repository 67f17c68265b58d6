//! Reproduces RMM's "random allocations" (cpp/benchmarks/random_allocations), draw for draw.
//!
//! The benchmark takes twice as many steps as allocations. A step allocates a uniformly drawn size
//! with a probability of 73 %, unless all allocations are made or the live bytes would reach the
//! limit. Otherwise the step frees a drawn live block. A failed allocation becomes a free.

use super::minstd::Minstd;

/// Limit of live bytes in RMM's run.
pub(crate) const MAX_LIVE: u64 = 16_000 << 20;

/// Allocator under measurement.
pub(crate) trait BenchAllocator {
    /// Live allocation.
    type Block;

    /// Allocates; `None` on failure.
    fn allocate(&self, bytes: u64) -> Option<Self::Block>;

    /// Frees a block and returns its requested bytes.
    fn free(&self, block: Self::Block) -> u64;
}

/// One cell of the table.
#[derive(Clone, Copy)]
pub(crate) struct Cell {
    /// Number of allocations.
    pub(crate) allocations: u64,
    /// Largest size in MiB.
    pub(crate) max_mib: u64,
    /// Limit of live bytes.
    pub(crate) max_live: u64,
    /// First random number; RMM's is 1.
    pub(crate) seed: u64,
}

/// Runs a cell and returns the number of failed allocations.
pub(crate) fn run<S: BenchAllocator>(source: &S, cell: Cell) -> u64 {
    let mut random = Minstd::new(cell.seed);
    let mut live: Vec<S::Block> = Vec::new();
    let (mut allocations, mut live_bytes, mut failed) = (0, 0, 0);
    for _ in 0..2 * cell.allocations {
        let bytes = random.within(1, cell.max_mib << 20);
        let mut allocates = true;
        if !live.is_empty() {
            let chance = random.within(0, 99);
            allocates =
                chance < 73 && allocations < cell.allocations && live_bytes + bytes < cell.max_live;
        }
        if allocates {
            match source.allocate(bytes) {
                Some(block) => {
                    live.push(block);
                    allocations += 1;
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
    // RMM's run ends without live blocks unless an allocation failed.
    for block in live {
        source.free(block);
    }
    failed
}
