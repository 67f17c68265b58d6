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

use super::epoch::StreamDeps;
use super::size_classes::{ClassLists, NO_BLOCK, SizeClass};

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

/// Region that is entirely free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EmptyRegion {
    /// Region's number.
    pub(super) region: u32,
    /// Header of the block that spans the region.
    pub(super) index: u32,
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

/// Folds the bits of 64 stream slots into 32, one for slots that are 32 apart: a header has no more
/// room.
fn fold(slots: u64) -> u32 {
    (slots as u32) | (slots >> u32::BITS) as u32
}

/// Returns the slots that [`fold`] maps to these bits.
fn unfold(bits: u32) -> u64 {
    u64::from(bits) | u64::from(bits) << u32::BITS
}

/// Change of the number of open uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseCount {
    Inc,
    Keep,
    Dec,
}

/// Free block at an edge of a region that is not entirely free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EdgeBlock {
    /// Region's number.
    pub(super) region: u32,
    /// Header of the block.
    index: u32,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Whether the block is at the lower edge.
    pub(super) low: bool,
    /// Streams that may still use the block.
    pub(super) deps: StreamDeps,
}

/// Exactly one cache line: a merge with both neighbours touches three. Fields that are written
/// separately are not adjacent where they would be read together, because such a load would miss
/// store-to-load forwarding.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Header {
    /// Slots of the deps. Of a free block: the streams that may still use it. Of an allocated
    /// block: the streams that callers have recorded with [`TlsfHeap::update_use`]; the free adds
    /// its own.
    slots: u64,
    address: u64,
    /// Stamp of the deps.
    stamp: u64,
    /// Number of the allocation; 0 for a free block.
    serial: u64,
    /// Requested bytes.
    requested: u64,
    /// Size in granules; 0 for an unused header and for [`SENTINEL`].
    size: u32,
    /// Neighbour at the lower address.
    below: u32,
    /// Neighbour at the higher address.
    above: u32,
    /// Free block: neighbours in the list of its class. Unused header: `next` is the next unused
    /// one. Allocated block: `previous` counts open uses, and `next` has the folded slots of the
    /// streams that write the block ([`fold`]).
    previous: u32,
    next: u32,
    region: u32,
}

impl Header {
    #[inline]
    fn deps(&self) -> StreamDeps {
        StreamDeps {
            slots: self.slots,
            stamp: self.stamp,
        }
    }

    #[inline]
    fn set_deps(&mut self, StreamDeps { slots, stamp }: StreamDeps) {
        self.slots = slots;
        self.stamp = stamp;
    }
}

const UNUSED: Header = Header {
    slots: 0,
    address: 0,
    stamp: 0,
    serial: 0,
    requested: 0,
    size: 0,
    below: NO_BLOCK,
    above: NO_BLOCK,
    previous: NO_BLOCK,
    next: NO_BLOCK,
    region: 0,
};

/// Header with the index [`NO_BLOCK`]: the neighbour at the edges of regions and lists. It is never
/// free, and code writes to it without a check, which saves a branch.
const SENTINEL: Header = Header {
    serial: LAST_FREED,
    ..UNUSED
};

/// Serial number of the block that was freed last and is not merged yet.
const LAST_FREED: u64 = u64::MAX;

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

    /// Adds a free region of whole granules. `None` if the region is empty or has 1 TiB or more, or
    /// if all indices of headers are used.
    pub(super) fn add_region(
        &mut self,
        region: u32,
        address: u64,
        size: u64,
        deps: StreamDeps,
    ) -> Option<EmptyRegion> {
        let size = u32::try_from(size / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let index = self.take_header()?;
        let header = &mut self.headers[index as usize];
        *header = Header {
            address,
            size,
            region,
            ..UNUSED
        };
        header.set_deps(deps);
        self.total_bytes += to_bytes(size);
        self.free_bytes += to_bytes(size);
        self.link(index);
        Some(EmptyRegion { region, index })
    }

    /// Returns the deps of a region that is entirely free. The region's lowest header never
    /// changes, because merges and splits keep the lower header.
    pub(super) fn empty_region_deps(&self, region: EmptyRegion) -> Option<StreamDeps> {
        let header = self.headers.get(region.index as usize)?;
        let spans = header.size > 0 && header.below == NO_BLOCK && header.above == NO_BLOCK;
        (spans && is_free(header) && header.region == region.region).then_some(header.deps())
    }

    /// Removes a region that is entirely free, and returns its deps.
    pub(super) fn remove_region(&mut self, region: EmptyRegion) -> Option<StreamDeps> {
        self.merge_last_freed();
        let deps = self.empty_region_deps(region)?;
        let size = to_bytes(self.headers[region.index as usize].size);
        self.unlink(region.index);
        self.total_bytes -= size;
        self.free_bytes -= size;
        self.recycle_header(region.index);
        Some(deps)
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

    /// Allocates a block that another heap will suballocate. It counts no requested bytes.
    pub(super) fn allocate_chunk(&mut self, bytes: u64) -> Option<HeapBlock> {
        let size = u32::try_from(bytes / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let class = self.find_class(size)?;
        let index = self.take_low(self.classes.head(class), size);
        Some(self.finish_allocation(index, 0))
    }

    /// Splits a chunk at a free edge that the heap of its shard reports. Returns the rest of the
    /// chunk and the edge, both allocated.
    pub(super) fn split_chunk(
        &mut self,
        id: BlockId,
        edge: &EdgeBlock,
    ) -> Option<(BlockId, BlockId)> {
        let size = self.live(id).ok()?.size;
        let split_at = u32::try_from(edge.bytes / GRANULE)
            .ok()
            .filter(|&split_at| 0 < split_at && split_at < size)?;
        let index = self.split(id.index, if edge.low { split_at } else { size - split_at })?;
        self.allocations += 1;
        let upper = &mut self.headers[index as usize];
        upper.serial = self.allocations;
        upper.previous = 0;
        let (lower, upper) = (
            id,
            BlockId {
                index,
                serial: self.allocations,
            },
        );
        Some(if edge.low {
            (upper, lower)
        } else {
            (lower, upper)
        })
    }

    /// Returns the free blocks at the edges of regions that are not entirely free.
    pub(super) fn edge_blocks(&mut self) -> Vec<EdgeBlock> {
        self.merge_last_freed();
        let Some(first) = self.classes.smallest() else {
            return Vec::new();
        };
        let edges = self.list_from(first).filter_map(|index| {
            let header = &self.headers[index as usize];
            let (low, high) = (header.below == NO_BLOCK, header.above == NO_BLOCK);
            (low != high).then_some(EdgeBlock {
                region: header.region,
                index,
                bytes: to_bytes(header.size),
                low,
                deps: header.deps(),
            })
        });
        edges.collect()
    }

    /// Removes the free edge of a region, and returns the rest of the region.
    pub(super) fn remove_edge(&mut self, edge: &EdgeBlock, region: EmptyRegion) -> EmptyRegion {
        let Header {
            above, below, size, ..
        } = self.headers[edge.index as usize];
        self.unlink(edge.index);
        self.recycle_header(edge.index);
        self.total_bytes -= to_bytes(size);
        self.free_bytes -= to_bytes(size);
        if edge.low {
            self.headers[above as usize].below = NO_BLOCK;
            return EmptyRegion {
                index: above,
                ..region
            };
        }
        self.headers[below as usize].above = NO_BLOCK;
        region
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

    /// Returns the class whose first block has at least `size` granules: the request's own class or
    /// the smallest above.
    #[inline]
    fn find_class(&mut self, size: u32) -> Option<SizeClass> {
        let own = SizeClass::of(size);
        let first = self.classes.head(own);
        if self.headers[first as usize].size >= size {
            return Some(own);
        }
        match self.classes.above(own) {
            Some(class) => Some(class),
            None => self.find_in_class(own, size),
        }
    }

    /// Moves a sufficiently large block of a class to the head of its list.
    #[cold]
    fn find_in_class(&mut self, class: SizeClass, size: u32) -> Option<SizeClass> {
        if self.last_freed != NO_BLOCK {
            self.merge_last_freed();
            return self.find_class(size);
        }
        let index = self
            .list(class)
            .find(|&index| self.headers[index as usize].size >= size)?;
        self.unlink(index);
        self.link(index);
        Some(class)
    }

    /// Returns a free block of at least `size` granules at a multiple of `align`. The part below
    /// the aligned address becomes a free block of its own.
    #[cold]
    fn find_aligned(&mut self, size: u32, align: u64) -> Option<u32> {
        self.merge_last_freed();
        let align_granules = u32::try_from(align / GRANULE).ok()?;
        // The largest skip that any address can need; a block that needs less may be smaller.
        let roomy = self.find_class(size.checked_add(align_granules - 1)?);
        let fits = |&index: &u32| {
            let header = &self.headers[index as usize];
            u64::from(header.size) >= u64::from(size) + alignment_skip(header.address, align)
        };
        let index = match roomy {
            Some(class) => self.classes.head(class),
            None => self.list_from(SizeClass::of(size)).find(fits)?,
        };
        let skip =
            u32::try_from(alignment_skip(self.headers[index as usize].address, align)).ok()?;
        if skip == 0 {
            return Some(index);
        }
        self.unlink(index);
        let rest = self.split(index, skip);
        self.link(index);
        self.link(rest?);
        rest
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

    #[inline]
    fn link(&mut self, index: u32) {
        let class = SizeClass::of(self.headers[index as usize].size);
        self.link_in(class, index);
    }

    /// Adds a block at the head of its class.
    #[inline]
    fn link_in(&mut self, class: SizeClass, index: u32) {
        let next = self.classes.push_front(class, index);
        let header = &mut self.headers[index as usize];
        header.previous = NO_BLOCK;
        header.next = next;
        self.headers[next as usize].previous = index;
    }

    #[inline]
    fn unlink(&mut self, index: u32) {
        let class = SizeClass::of(self.headers[index as usize].size);
        self.unlink_from(class, index);
    }

    /// Removes a block from its class.
    #[inline(always)]
    fn unlink_from(&mut self, class: SizeClass, index: u32) {
        let Header { previous, next, .. } = self.headers[index as usize];
        if previous == NO_BLOCK {
            return self.unlink_first(class, index);
        }
        self.headers[next as usize].previous = previous;
        self.headers[previous as usize].next = next;
    }

    /// Removes the first block of its class.
    #[inline]
    fn unlink_first(&mut self, class: SizeClass, index: u32) {
        let next = self.headers[index as usize].next;
        self.headers[next as usize].previous = NO_BLOCK;
        self.classes.replace_head(class, next);
    }

    /// Takes an unused header; `None` if all indices are used.
    #[inline]
    fn take_header(&mut self) -> Option<u32> {
        let index = self.free_headers;
        if index == NO_BLOCK {
            return self.new_header();
        }
        self.free_headers = self.headers[index as usize].next;
        Some(index)
    }

    #[cold]
    fn new_header(&mut self) -> Option<u32> {
        let index = u32::try_from(self.headers.len()).ok()?;
        self.headers.push(UNUSED);
        Some(index)
    }

    /// Adds a header to the unused ones.
    #[inline]
    fn recycle_header(&mut self, index: u32) {
        let header = &mut self.headers[index as usize];
        header.size = 0;
        header.next = self.free_headers;
        self.free_headers = index;
    }

    fn list(&self, class: SizeClass) -> impl Iterator<Item = u32> {
        let some = |index: u32| (index != NO_BLOCK).then_some(index);
        std::iter::successors(some(self.classes.head(class)), move |&index| {
            some(self.headers[index as usize].next)
        })
    }

    fn list_from(&self, class: SizeClass) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(class), |&class| self.classes.above(class))
            .flat_map(|class| self.list(class))
    }
}

/// Returns whether the remainder of a split gets a header of its own.
#[inline]
fn should_split(rest: u32, size: u32) -> bool {
    rest > (size >> MAX_SLACK_SHIFT).min(MAX_SLACK)
}

#[inline]
fn is_free(header: &Header) -> bool {
    header.serial == 0
}

#[inline]
fn to_bytes(granules: u32) -> u64 {
    u64::from(granules) * GRANULE
}

/// Returns the granules from `address` to the next multiple of `align`.
fn alignment_skip(address: u64, align: u64) -> u64 {
    (address.next_multiple_of(align) - address) / GRANULE
}

#[cfg(test)]
mod tests;
