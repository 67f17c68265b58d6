//! Places blocks in address ranges by TLSF (two-level segregated fit), with headers outside the
//! memory.
//!
//! The heap computes with numbers and touches neither memory nor driver, because a host write to
//! GPU memory costs more than an allocation. An allocation takes the first block of the smallest
//! class that fits, and the remainder stays free. A free merges with both neighbours at once. Both
//! take a bounded number of steps, with two exceptions, so that a request fails only if no block
//! fits. When all larger classes are empty, the request's own class is searched. When no block is
//! surely large enough for a request with an alignment, that class and all larger ones are
//! searched.
//!
//! *Deps* are the streams that may still use memory ([`StreamDeps`]). The heap only stores and
//! merges them; its callers let a stream wait.

mod free_lists;
mod header;
mod regions;

use super::epoch::StreamDeps;
use super::size_classes::{ClassLists, NO_BLOCK, SizeClass};
use header::{Header, LAST_FREED, SENTINEL, fold, is_free, unfold};

pub(super) use regions::{EdgeBlock, EmptyRegion};

/// Blocks start at multiples of this and have such sizes, as CUDA's own allocations and RMM's do.
pub(super) const GRANULE: u64 = 256;

/// A remainder of up to this fraction of a block gets no header of its own.
const MAX_SLACK_SHIFT: u32 = 6;
/// A remainder above this many granules always gets a header.
const MAX_SLACK: u32 = 64;

/// Identifies a block of a heap, and never another one after the header is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockId {
    /// Index of the header.
    pub(super) index: u32,
    /// Number of the allocation in this heap, from 1.
    pub(super) serial: u64,
}

/// Allocated block.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeapBlock {
    /// Identity for the free.
    pub(super) id: BlockId,
    /// First address.
    pub(super) address: u64,
    /// Size in bytes, at least the requested size.
    pub(super) bytes: u64,
    /// Streams that may still use the memory.
    pub(super) deps: StreamDeps,
}

/// Reason for which the heap refuses a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeapError {
    /// The block is not this heap's, or was freed before.
    #[error("failed to use the block: it is not allocated")]
    NotLive,
    /// Uses of the block are open.
    #[error("failed to free the block: {0} uses are open")]
    InUse(u32),
}

/// Uses of a live block before a new one.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlierUses {
    /// Streams that used the block.
    pub(super) all: StreamDeps,
    /// Slots of those streams that may have written the block.
    pub(super) writers: u64,
}

/// Change of the number of open uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseCount {
    Inc,
    Keep,
    Dec,
}

#[derive(Debug)]
pub(super) struct TlsfHeap {
    headers: Vec<Header>,
    free_headers: u32,
    classes: ClassLists,
    /// Free and allocated bytes.
    total_bytes: u64,
    free_bytes: u64,
    requested_bytes: u64,
    /// Block that was freed right after its allocation, kept in no list and unmerged. A program
    /// that allocates and frees one size repeatedly gets this block without a split or merge.
    last_freed: u32,
    /// Number of allocations so far.
    allocations: u64,
    /// Number of frees so far.
    frees: u64,
}

impl Default for TlsfHeap {
    fn default() -> TlsfHeap {
        TlsfHeap::new()
    }
}

impl TlsfHeap {
    pub(super) fn new() -> TlsfHeap {
        TlsfHeap {
            headers: vec![SENTINEL],
            free_headers: NO_BLOCK,
            classes: ClassLists::new(),
            total_bytes: 0,
            free_bytes: 0,
            requested_bytes: 0,
            last_freed: NO_BLOCK,
            allocations: 0,
            frees: 0,
        }
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Returns the bytes of allocated blocks after rounding.
    pub(super) fn live_bytes(&self) -> u64 {
        self.total_bytes - self.free_bytes
    }

    /// Returns the requested bytes of allocated blocks.
    pub(super) fn requested_bytes(&self) -> u64 {
        self.requested_bytes
    }

    pub(super) fn live_blocks(&self) -> u64 {
        self.allocations - self.frees
    }

    /// Returns the size of the largest free block in bytes.
    pub(super) fn largest_free(&mut self) -> u64 {
        self.merge_last_freed();
        let Some(class) = self.classes.largest() else {
            return 0;
        };
        let sizes = self
            .list(class)
            .map(|index| self.headers[index as usize].size);
        to_bytes(sizes.max().unwrap_or(0))
    }

    /// Allocates at least `requested` bytes at a multiple of `align`, a power of two.
    #[inline]
    pub(super) fn allocate(&mut self, requested: u64, align: u64) -> Option<HeapBlock> {
        let size = u32::try_from(requested.div_ceil(GRANULE)).ok()?.max(1);
        let index = if align > GRANULE {
            let index = self.find_aligned(size, align)?;
            self.take_low(index, size)
        // Without a last freed block this reads the sentinel, whose size of 0 suffices for nothing.
        } else if let Some(rest) = self.headers[self.last_freed as usize]
            .size
            .checked_sub(size)
            && !should_split(rest, size)
        {
            std::mem::replace(&mut self.last_freed, NO_BLOCK)
        } else {
            let class = self.find_class(size)?;
            self.take_high(class, size)
        };
        Some(self.finish_allocation(index, requested))
    }

    /// Frees a block that `deps` may still use, and returns its requested bytes.
    ///
    /// `remaining` returns the deps of a neighbour that a wait for `deps` does not cover.
    #[inline]
    pub(super) fn free(
        &mut self,
        id: BlockId,
        deps: StreamDeps,
        remaining: impl Fn(StreamDeps) -> StreamDeps,
    ) -> Result<u64, HeapError> {
        let header = self.live(id)?;
        let (uses, requested) = (header.previous, header.requested);
        if uses != 0 {
            return Err(HeapError::InUse(uses));
        }
        self.free_bytes += to_bytes(header.size);
        self.requested_bytes -= requested;
        self.frees += 1;
        let header = &mut self.headers[id.index as usize];
        header.set_deps(header.deps().union(deps));
        let mut index = id.index;
        if id.serial == self.allocations {
            header.serial = LAST_FREED;
            index = std::mem::replace(&mut self.last_freed, index);
            if index == NO_BLOCK {
                return Ok(requested);
            }
        }
        // A wait for `deps` covers the waits of the earlier block only if the same single stream
        // freed both.
        let freed_slots = self.headers[index as usize].slots;
        let covered =
            index == id.index || (freed_slots == deps.slots && freed_slots.is_power_of_two());
        self.merge(index, |lower_class| {
            if covered {
                remaining(lower_class)
            } else {
                lower_class
            }
        });
        Ok(requested)
    }

    /// Merges the last freed block with its neighbours.
    #[cold]
    fn merge_last_freed(&mut self) {
        let index = std::mem::replace(&mut self.last_freed, NO_BLOCK);
        if index != NO_BLOCK {
            self.merge(index, |all| all);
        }
    }

    /// Merges a freed block with its neighbours and adds the result to its list.
    #[inline]
    fn merge(&mut self, mut index: u32, remaining: impl Fn(StreamDeps) -> StreamDeps) {
        let header = &mut self.headers[index as usize];
        header.serial = 0;
        let mut deps = header.deps();
        let Header {
            mut size,
            below,
            mut above,
            ..
        } = *header;
        let upper = self.headers[above as usize];
        if is_free(&upper) {
            self.unlink(above);
            self.recycle_header(above);
            size += upper.size;
            deps = deps.union(remaining(upper.deps()));
            above = upper.above;
        }
        let mut same_class = false;
        let lower = self.headers[below as usize];
        if is_free(&lower) {
            self.recycle_header(index);
            index = below;
            size += lower.size;
            deps = deps.union(remaining(lower.deps()));
            let lower_class = SizeClass::of(lower.size);
            same_class = lower_class == SizeClass::of(size);
            if !same_class {
                self.unlink_from(lower_class, index);
            }
        }
        let header = &mut self.headers[index as usize];
        header.size = size;
        header.set_deps(deps);
        header.above = above;
        self.headers[above as usize].below = index;
        if !same_class {
            self.link_in(SizeClass::of(size), index);
        }
    }

    /// Adds deps to an allocated block, some of which write, and changes its count of open uses.
    /// Returns the uses before.
    pub(super) fn update_use(
        &mut self,
        id: BlockId,
        deps: StreamDeps,
        writers: u64,
        count: UseCount,
    ) -> Result<EarlierUses, HeapError> {
        self.live(id)?;
        let header = &mut self.headers[id.index as usize];
        let earlier = EarlierUses {
            all: header.deps(),
            writers: header.slots & unfold(header.next),
        };
        header.set_deps(earlier.all.union(deps));
        header.next |= fold(writers);
        header.previous = match count {
            UseCount::Inc => header.previous.saturating_add(1),
            UseCount::Keep => header.previous,
            UseCount::Dec => header.previous.saturating_sub(1),
        };
        Ok(earlier)
    }

    #[inline]
    fn live(&self, id: BlockId) -> Result<&Header, HeapError> {
        let header = self.headers.get(id.index as usize);
        header
            .filter(|header| header.serial == id.serial && id.serial != 0)
            .ok_or(HeapError::NotLive)
    }

    /// Takes a free block from its list and returns the remainder above `size` granules.
    fn take_low(&mut self, index: u32, size: u32) -> u32 {
        self.unlink(index);
        let rest = self.headers[index as usize].size - size;
        if should_split(rest, size)
            && let Some(rest) = self.split(index, size)
        {
            self.link(rest);
        }
        index
    }

    /// Takes `size` granules from the upper end of a class's first block.
    ///
    /// The remainder keeps its place in the list while it stays in its class, as a large block
    /// does. The taken part is in no list.
    #[inline]
    fn take_high(&mut self, class: SizeClass, size: u32) -> u32 {
        let index = self.classes.head(class);
        let rest = self.headers[index as usize].size - size;
        let top = if should_split(rest, size) {
            self.split(index, rest)
        } else {
            None
        };
        let Some(top) = top else {
            self.unlink_first(class, index);
            return index;
        };
        let remaining = SizeClass::of(rest);
        if remaining != class {
            self.unlink_first(class, index);
            self.link_in(remaining, index);
        }
        top
    }

    /// Marks a block outside the lists as allocated.
    #[inline]
    fn finish_allocation(&mut self, index: u32, requested: u64) -> HeapBlock {
        self.allocations += 1;
        let serial = self.allocations;
        let header = &mut self.headers[index as usize];
        header.serial = serial;
        header.requested = requested;
        header.previous = 0;
        header.next = 0;
        let block = HeapBlock {
            id: BlockId { serial, index },
            address: header.address,
            bytes: to_bytes(header.size),
            deps: header.deps(),
        };
        header.set_deps(StreamDeps::NONE);
        self.free_bytes -= block.bytes;
        self.requested_bytes += requested;
        block
    }

    /// Splits a block after `size` granules and returns the upper part, which is in no list.
    #[inline]
    fn split(&mut self, index: u32, size: u32) -> Option<u32> {
        let rest = self.take_header()?;
        let header = &mut self.headers[index as usize];
        let Header {
            address,
            size: total,
            above,
            region,
            ..
        } = *header;
        let deps = header.deps();
        header.size = size;
        header.above = rest;
        let upper = &mut self.headers[rest as usize];
        upper.address = address + to_bytes(size);
        upper.size = total - size;
        upper.below = index;
        upper.above = above;
        upper.region = region;
        upper.serial = 0;
        upper.requested = 0;
        upper.set_deps(deps);
        self.headers[above as usize].below = rest;
        Some(rest)
    }
}

/// Returns whether the remainder of a split gets a header of its own.
#[inline]
fn should_split(rest: u32, size: u32) -> bool {
    rest > (size >> MAX_SLACK_SHIFT).min(MAX_SLACK)
}

#[inline]
fn to_bytes(granules: u32) -> u64 {
    u64::from(granules) * GRANULE
}

#[cfg(test)]
mod tests;
