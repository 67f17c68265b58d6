//! A heap of address ranges: which block a request gets, and what a free block becomes one with.
//!
//! It knows numbers only, neither memory nor driver: headers stand beside the memory, for a GPU's memory cannot be
//! written from the host for the price of an allocation. An allocation takes the first block of the smallest class
//! that fits and gives back the rest; a free merges with both neighbours at once. Both take a bounded number of
//! steps, but for one search: where every larger class is empty, the request's own class is looked through, so that
//! nothing is refused that fits somewhere.

use super::epoch::StreamDeps;
use super::size_classes::{ClassLists, NO_BLOCK, SizeClass};

/// Blocks begin at multiples of this and have such sizes: what CUDA's own allocations guarantee, and RMM's.
pub(super) const GRANULE: u64 = 256;

/// A rest of up to this part of a block is not worth a header of its own.
const MAX_SLACK_SHIFT: u32 = 6;
/// A rest above this many granules always is.
const MAX_SLACK: u32 = 64;

/// A block of a heap. It never names another block, even after its header is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockId {
    /// The header's place.
    pub(super) index: u32,
    /// The number of the allocation among all of its heap, from 1.
    pub(super) serial: u64,
}

/// What an allocation got.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeapBlock {
    /// To free it by.
    pub(super) id: BlockId,
    /// Where it begins.
    pub(super) address: u64,
    /// Its size in bytes, at least the request's.
    pub(super) bytes: u64,
    /// What may still use it.
    pub(super) deps: StreamDeps,
}

/// A region that is free from end to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EmptyRegion {
    /// The region's name.
    pub(super) region: u32,
    /// The block that spans it.
    pub(super) index: u32,
}

/// Why nothing was done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeapError {
    /// It is not this heap's, or was freed before.
    #[error("the block is not allocated")]
    NotLive,
    /// Uses of it are open.
    #[error("{0} uses of the block are open")]
    InUse(u32),
}

/// What becomes of the uses of a block that are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseCount {
    Inc,
    Keep,
    Dec,
}

/// A free block at an end of a region that is not free from end to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EdgeBlock {
    /// The region's name.
    pub(super) region: u32,
    /// The block.
    index: u32,
    /// Its bytes.
    pub(super) bytes: u64,
    /// Whether it is the lower end.
    pub(super) low: bool,
    /// What may still use it.
    pub(super) deps: StreamDeps,
}

/// Exactly a cache line: a merge with both neighbours touches three. Fields that are written one by one do not stand side
/// by side where they would be read as one: a processor cannot read together what it has yet to write apart.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Header {
    /// Of a free block: the lanes of what may still use it. Of an allocated one: of what may, beside what it is freed by.
    slots: u64,
    address: u64,
    /// When the latest of these uses was.
    stamp: u64,
    /// The allocation's number; 0 while the block is free.
    serial: u64,
    /// Bytes that were asked for.
    requested: u64,
    /// In granules; 0 while the header is unused, and of [`EDGE`].
    size: u32,
    /// The neighbour at the lower address.
    below: u32,
    /// The neighbour at the higher address.
    above: u32,
    /// Of a free block: its neighbours in the class's list. Of an unused header: the next one. Of an allocated block:
    /// `previous` counts the uses that are open.
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
    fn set_deps(
        &mut self,
        StreamDeps {
            slots: lanes,
            stamp,
        }: StreamDeps,
    ) {
        self.slots = lanes;
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

/// The header with the index [`NONE`]: the neighbour of a block that has none, and of the ends of lists. It is never free,
/// and written to like any other, which saves to ask each time.
const SENTINEL: Header = Header {
    serial: LAST_FREED,
    ..UNUSED
};

/// The number of a block that is neither allocated nor one with its neighbours.
const LAST_FREED: u64 = u64::MAX;

/// The heap.
#[derive(Debug)]
pub(super) struct TlsfHeap {
    headers: Vec<Header>,
    free_headers: u32,
    classes: ClassLists,
    /// Bytes, free or not.
    total_bytes: u64,
    free_bytes: u64,
    requested_bytes: u64,
    /// A free block that stands in no list, and is one with no neighbour: the last allocation's, freed before the next. Who
    /// allocates and frees the same size over and over gets it as it is.
    last_freed: u32,
    /// Allocations so far.
    allocations: u64,
    /// Frees so far.
    frees: u64,
}

impl Default for TlsfHeap {
    fn default() -> TlsfHeap {
        TlsfHeap::new()
    }
}

impl TlsfHeap {
    /// A heap without memory.
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

    /// Bytes that are free.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Bytes of allocated blocks, as large as they are.
    pub(super) fn live_bytes(&self) -> u64 {
        self.total_bytes - self.free_bytes
    }

    /// Bytes of allocated blocks, as they were asked for.
    pub(super) fn requested_bytes(&self) -> u64 {
        self.requested_bytes
    }

    /// Allocated blocks.
    pub(super) fn live_blocks(&self) -> u64 {
        self.allocations - self.frees
    }

    /// Bytes of the largest free block.
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

    /// Adds a region of free memory, whole granules; `None` where it is too large for one or empty.
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

    /// Whether a region is free from end to end, and what may still use it. Its lowest block is the one that
    /// [`Heap::add`] answered: merging keeps the lower header, splitting too.
    pub(super) fn empty_region_deps(&self, region: EmptyRegion) -> Option<StreamDeps> {
        let header = self.headers.get(region.index as usize)?;
        let spans = header.size > 0 && header.below == NO_BLOCK && header.above == NO_BLOCK;
        (spans && is_free(header) && header.region == region.region).then_some(header.deps())
    }

    /// Takes a region away that is free from end to end; what may still use it.
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

    /// A block of at least `asked` bytes at a multiple of `align` (a power of two).
    #[inline]
    pub(super) fn allocate(&mut self, requested: u64, align: u64) -> Option<HeapBlock> {
        let size = u32::try_from(requested.div_ceil(GRANULE)).ok()?.max(1);
        let index = if align > GRANULE {
            let index = self.find_aligned(size, align)?;
            self.take_low(index, size)
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

    /// A block for another heap to cut up: one that nobody asked for yet.
    pub(super) fn allocate_chunk(&mut self, bytes: u64) -> Option<HeapBlock> {
        let size = u32::try_from(bytes / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let class = self.find_class(size)?;
        let index = self.take_low(self.classes.head(class), size);
        Some(self.finish_allocation(index, 0))
    }

    /// Cuts a lent block where one of its ends is free in the heap that has it: what stays lent, and the end.
    pub(super) fn split_chunk(
        &mut self,
        id: BlockId,
        end: &EdgeBlock,
    ) -> Option<(BlockId, BlockId)> {
        let size = self.live(id).ok()?.size;
        let split_at = u32::try_from(end.bytes / GRANULE)
            .ok()
            .filter(|&split_at| 0 < split_at && split_at < size)?;
        let index = self.split(id.index, if end.low { split_at } else { size - split_at })?;
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
        Some(if end.low {
            (upper, lower)
        } else {
            (lower, upper)
        })
    }

    /// The free blocks at the ends of regions that are not free from end to end.
    pub(super) fn edge_blocks(&mut self) -> Vec<EdgeBlock> {
        self.merge_last_freed();
        let Some(first) = self.classes.smallest() else {
            return Vec::new();
        };
        let ends = self.list_from(first).filter_map(|index| {
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
        ends.collect()
    }

    /// Takes the free end of a region away; the region without it.
    pub(super) fn remove_edge(&mut self, end: &EdgeBlock, region: EmptyRegion) -> EmptyRegion {
        let Header {
            above, below, size, ..
        } = self.headers[end.index as usize];
        self.unlink(end.index);
        self.recycle_header(end.index);
        self.total_bytes -= to_bytes(size);
        self.free_bytes -= to_bytes(size);
        if end.low {
            self.headers[above as usize].below = NO_BLOCK;
            return EmptyRegion {
                index: above,
                ..region
            };
        }
        self.headers[below as usize].above = NO_BLOCK;
        region
    }

    /// Frees a block that `after` may still use. `left` says what of a neighbour's users is still to be waited for by
    /// who waits for `after`. Answers the bytes that were asked for.
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
        // Who waits for what was set aside earlier waits for `after` where both are one and the same stream.
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

    /// Makes the block that was set aside one with its neighbours.
    #[cold]
    fn merge_last_freed(&mut self) {
        let index = std::mem::replace(&mut self.last_freed, NO_BLOCK);
        if index != NO_BLOCK {
            self.merge(index, |all| all);
        }
    }

    /// Makes a block that was freed one with its neighbours, and puts it in its list.
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

    /// Remembers what more may use an allocated block.
    pub(super) fn update_use(
        &mut self,
        id: BlockId,
        deps: StreamDeps,
        count: UseCount,
    ) -> Result<(), HeapError> {
        self.live(id)?;
        let header = &mut self.headers[id.index as usize];
        header.set_deps(header.deps().union(deps));
        header.previous = match count {
            UseCount::Inc => header.previous.saturating_add(1),
            UseCount::Keep => header.previous,
            UseCount::Dec => header.previous.saturating_sub(1),
        };
        Ok(())
    }

    #[inline]
    fn live(&self, id: BlockId) -> Result<&Header, HeapError> {
        let header = self.headers.get(id.index as usize);
        header
            .filter(|header| header.serial == id.serial && id.serial != 0)
            .ok_or(HeapError::NotLive)
    }

    /// The class whose first block has at least `size` granules: the request's own, or the smallest above it.
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

    /// Makes a block of a class that is large enough its first.
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

    /// A free block of at least `size` granules that begins at a multiple of `align`: what is below is cut off.
    #[cold]
    fn find_aligned(&mut self, size: u32, align: u64) -> Option<u32> {
        self.merge_last_freed();
        let align_granules = u32::try_from(align / GRANULE).ok()?;
        // The largest shift that any address can need; a block that needs less may be smaller.
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

    /// Takes a free block from its list, and gives back what is above `size` granules.
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

    /// Cuts `size` granules from the upper end of a class's first block, where more than a crumb is left; what stands in no
    /// list then. The block keeps its place in its list as long as it stays in its class, which a large one does.
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

    /// Allocates a block that stands in no list.
    #[inline]
    fn finish_allocation(&mut self, index: u32, requested: u64) -> HeapBlock {
        self.allocations += 1;
        let serial = self.allocations;
        let header = &mut self.headers[index as usize];
        header.serial = serial;
        header.requested = requested;
        header.previous = 0;
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

    /// Cuts a block after `size` granules; the rest, in no list.
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

    /// Puts a block first in the list of its class.
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

    /// Takes a block from the list of its class.
    #[inline(always)]
    fn unlink_from(&mut self, class: SizeClass, index: u32) {
        let Header { previous, next, .. } = self.headers[index as usize];
        if previous == NO_BLOCK {
            return self.unlink_first(class, index);
        }
        self.headers[next as usize].previous = previous;
        self.headers[previous as usize].next = next;
    }

    /// Takes the first block from the list of its class.
    #[inline]
    fn unlink_first(&mut self, class: SizeClass, index: u32) {
        let next = self.headers[index as usize].next;
        self.headers[next as usize].previous = NO_BLOCK;
        self.classes.replace_head(class, next);
    }

    /// An unused header; `None` where all indices are used.
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

    /// Keeps a header for later.
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

/// Whether what is left of a block of which `size` granules are taken gets a header of its own.
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

/// Granules from `address` to the next multiple of `align`.
fn alignment_skip(address: u64, align: u64) -> u64 {
    (address.next_multiple_of(align) - address) / GRANULE
}

#[cfg(test)]
mod tests;
