//! A heap of address ranges: which block a request gets, and what a free block becomes one with.
//!
//! It knows numbers only, neither memory nor driver: headers stand beside the memory, for a GPU's memory cannot be
//! written from the host for the price of an allocation. An allocation takes the first block of the smallest class
//! that fits and gives back the rest; a free merges with both neighbours at once. Both take a bounded number of
//! steps, but for one search: where every larger class is empty, the request's own class is looked through, so that
//! nothing is refused that fits somewhere.

use super::epoch::After;
use super::size_classes::{Class, Classes, NONE};

/// Blocks begin at multiples of this and have such sizes: what CUDA's own allocations guarantee, and RMM's.
pub(super) const GRANULE: u64 = 256;

/// A rest of up to this part of a block is not worth a header of its own.
const CRUMB_SHIFT: u32 = 6;
/// A rest above this many granules always is.
const CRUMB_MOST: u32 = 64;

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
pub(super) struct Taken {
    /// To free it by.
    pub(super) id: BlockId,
    /// Where it begins.
    pub(super) address: u64,
    /// Its size in bytes, at least the request's.
    pub(super) bytes: u64,
    /// What may still use it.
    pub(super) after: After,
}

/// A region that is free from end to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Whole {
    /// The region's name.
    pub(super) region: u32,
    /// The block that spans it.
    pub(super) index: u32,
}

/// Why nothing was done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// It is not this heap's, or was freed before.
    #[error("the block is not allocated")]
    NotLive,
    /// Uses of it are open.
    #[error("{0} uses of the block are open")]
    InUse(u32),
}

/// What becomes of the uses of a block that are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Open {
    More,
    Same,
    Fewer,
}

/// A free block at an end of a region that is not free from end to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The region's name.
    pub(super) region: u32,
    /// The block.
    index: u32,
    /// Its bytes.
    pub(super) bytes: u64,
    /// Whether it is the lower end.
    pub(super) low: bool,
    /// What may still use it.
    pub(super) after: After,
}

/// Exactly a cache line: a merge with both neighbours touches three. Fields that are written one by one do not stand side
/// by side where they would be read as one: a processor cannot read together what it has yet to write apart.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Header {
    /// Of a free block: the lanes of what may still use it. Of an allocated one: of what may, beside what it is freed by.
    lanes: u64,
    address: u64,
    /// When the latest of these uses was.
    stamp: u64,
    /// The allocation's number; 0 while the block is free.
    serial: u64,
    /// Bytes that were asked for.
    asked: u64,
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
    fn after(&self) -> After {
        After {
            lanes: self.lanes,
            stamp: self.stamp,
        }
    }

    #[inline]
    fn set_after(&mut self, After { lanes, stamp }: After) {
        self.lanes = lanes;
        self.stamp = stamp;
    }
}

const UNUSED: Header = Header {
    lanes: 0,
    address: 0,
    stamp: 0,
    serial: 0,
    asked: 0,
    size: 0,
    below: NONE,
    above: NONE,
    previous: NONE,
    next: NONE,
    region: 0,
};

/// The header with the index [`NONE`]: the neighbour of a block that has none, and of the ends of lists. It is never free,
/// and written to like any other, which saves to ask each time.
const EDGE: Header = Header {
    serial: ASIDE,
    ..UNUSED
};

/// The number of a block that is neither allocated nor one with its neighbours.
const ASIDE: u64 = u64::MAX;

/// The heap.
#[derive(Debug)]
pub(super) struct Heap {
    headers: Vec<Header>,
    unused: u32,
    classes: Classes,
    /// Bytes, free or not.
    all: u64,
    free: u64,
    asked: u64,
    /// A free block that stands in no list, and is one with no neighbour: the last allocation's, freed before the next. Who
    /// allocates and frees the same size over and over gets it as it is.
    aside: u32,
    /// Allocations so far.
    taken: u64,
    /// Frees so far.
    freed: u64,
}

impl Default for Heap {
    fn default() -> Heap {
        Heap::new()
    }
}

impl Heap {
    /// A heap without memory.
    pub(super) fn new() -> Heap {
        Heap {
            headers: vec![EDGE],
            unused: NONE,
            classes: Classes::new(),
            all: 0,
            free: 0,
            asked: 0,
            aside: NONE,
            taken: 0,
            freed: 0,
        }
    }

    /// Bytes that are free.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Bytes of allocated blocks, as large as they are.
    pub(super) fn live_bytes(&self) -> u64 {
        self.all - self.free
    }

    /// Bytes of allocated blocks, as they were asked for.
    pub(super) fn asked_bytes(&self) -> u64 {
        self.asked
    }

    /// Allocated blocks.
    pub(super) fn live_blocks(&self) -> u64 {
        self.taken - self.freed
    }

    /// Bytes of the largest free block.
    pub(super) fn largest_free(&mut self) -> u64 {
        self.settle();
        let Some(class) = self.classes.largest() else {
            return 0;
        };
        let sizes = self
            .list(class)
            .map(|index| self.headers[index as usize].size);
        bytes(sizes.max().unwrap_or(0))
    }

    /// Adds a region of free memory, whole granules; `None` where it is too large for one or empty.
    pub(super) fn add(
        &mut self,
        region: u32,
        address: u64,
        size: u64,
        after: After,
    ) -> Option<Whole> {
        let size = u32::try_from(size / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let index = self.header()?;
        let header = &mut self.headers[index as usize];
        *header = Header {
            address,
            size,
            region,
            ..UNUSED
        };
        header.set_after(after);
        self.all += bytes(size);
        self.free += bytes(size);
        self.link(index);
        Some(Whole { region, index })
    }

    /// Whether a region is free from end to end, and what may still use it. Its lowest block is the one that
    /// [`Heap::add`] answered: merging keeps the lower header, splitting too.
    pub(super) fn whole(&self, whole: Whole) -> Option<After> {
        let header = self.headers.get(whole.index as usize)?;
        let spans = header.size > 0 && header.below == NONE && header.above == NONE;
        (spans && is_free(header) && header.region == whole.region).then_some(header.after())
    }

    /// Takes a region away that is free from end to end; what may still use it.
    pub(super) fn remove(&mut self, whole: Whole) -> Option<After> {
        self.settle();
        let after = self.whole(whole)?;
        let size = bytes(self.headers[whole.index as usize].size);
        self.unlink(whole.index);
        self.all -= size;
        self.free -= size;
        self.recycle(whole.index);
        Some(after)
    }

    /// A block of at least `asked` bytes at a multiple of `align` (a power of two).
    #[inline]
    pub(super) fn allocate(&mut self, asked: u64, align: u64) -> Option<Taken> {
        let size = u32::try_from(asked.div_ceil(GRANULE)).ok()?.max(1);
        let index = if align > GRANULE {
            let index = self.find_aligned(size, align)?;
            self.cut_bottom(index, size)
        } else if let Some(rest) = self.headers[self.aside as usize].size.checked_sub(size)
            && !is_worth_it(rest, size)
        {
            std::mem::replace(&mut self.aside, NONE)
        } else {
            let class = self.find(size)?;
            self.cut_top(class, size)
        };
        Some(self.hand_out(index, asked))
    }

    /// A block for another heap to cut up: one that nobody asked for yet.
    pub(super) fn lend(&mut self, bytes: u64) -> Option<Taken> {
        let size = u32::try_from(bytes / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let class = self.find(size)?;
        let index = self.cut_bottom(self.classes.first(class), size);
        Some(self.hand_out(index, 0))
    }

    /// Cuts a lent block where one of its ends is free in the heap that has it: what stays lent, and the end.
    pub(super) fn divide(&mut self, id: BlockId, end: &End) -> Option<(BlockId, BlockId)> {
        let size = self.live(id).ok()?.size;
        let cut = u32::try_from(end.bytes / GRANULE)
            .ok()
            .filter(|&cut| 0 < cut && cut < size)?;
        let index = self.split(id.index, if end.low { cut } else { size - cut })?;
        self.taken += 1;
        let upper = &mut self.headers[index as usize];
        upper.serial = self.taken;
        upper.previous = 0;
        let (lower, upper) = (
            id,
            BlockId {
                index,
                serial: self.taken,
            },
        );
        Some(if end.low {
            (upper, lower)
        } else {
            (lower, upper)
        })
    }

    /// The free blocks at the ends of regions that are not free from end to end.
    pub(super) fn ends(&mut self) -> Vec<End> {
        self.settle();
        let Some(first) = self.classes.smallest() else {
            return Vec::new();
        };
        let ends = self.list_from(first).filter_map(|index| {
            let header = &self.headers[index as usize];
            let (low, high) = (header.below == NONE, header.above == NONE);
            (low != high).then_some(End {
                region: header.region,
                index,
                bytes: bytes(header.size),
                low,
                after: header.after(),
            })
        });
        ends.collect()
    }

    /// Takes the free end of a region away; the region without it.
    pub(super) fn remove_end(&mut self, end: &End, whole: Whole) -> Whole {
        let Header {
            above, below, size, ..
        } = self.headers[end.index as usize];
        self.unlink(end.index);
        self.recycle(end.index);
        self.all -= bytes(size);
        self.free -= bytes(size);
        if end.low {
            self.headers[above as usize].below = NONE;
            return Whole {
                index: above,
                ..whole
            };
        }
        self.headers[below as usize].above = NONE;
        whole
    }

    /// Frees a block that `after` may still use. `left` says what of a neighbour's users is still to be waited for by
    /// who waits for `after`. Answers the bytes that were asked for.
    #[inline]
    pub(super) fn free(
        &mut self,
        id: BlockId,
        after: After,
        left: impl Fn(After) -> After,
    ) -> Result<u64, Refusal> {
        let header = self.live(id)?;
        let (uses, asked) = (header.previous, header.asked);
        if uses != 0 {
            return Err(Refusal::InUse(uses));
        }
        self.free += bytes(header.size);
        self.asked -= asked;
        self.freed += 1;
        let header = &mut self.headers[id.index as usize];
        header.set_after(header.after().and(after));
        let mut index = id.index;
        if id.serial == self.taken {
            header.serial = ASIDE;
            index = std::mem::replace(&mut self.aside, index);
            if index == NONE {
                return Ok(asked);
            }
        }
        // Who waits for what was set aside earlier waits for `after` where both are one and the same stream.
        let set_aside = self.headers[index as usize].lanes;
        let waits = index == id.index || (set_aside == after.lanes && set_aside.is_power_of_two());
        self.merge(index, |before| if waits { left(before) } else { before });
        Ok(asked)
    }

    /// Makes the block that was set aside one with its neighbours.
    #[cold]
    fn settle(&mut self) {
        let index = std::mem::replace(&mut self.aside, NONE);
        if index != NONE {
            self.merge(index, |all| all);
        }
    }

    /// Makes a block that was freed one with its neighbours, and puts it in its list.
    #[inline]
    fn merge(&mut self, mut index: u32, left: impl Fn(After) -> After) {
        let header = &mut self.headers[index as usize];
        header.serial = 0;
        let mut after = header.after();
        let Header {
            mut size,
            below,
            mut above,
            ..
        } = *header;
        let upper = self.headers[above as usize];
        if is_free(&upper) {
            self.unlink(above);
            self.recycle(above);
            size += upper.size;
            after = after.and(left(upper.after()));
            above = upper.above;
        }
        let mut stays = false;
        let lower = self.headers[below as usize];
        if is_free(&lower) {
            self.recycle(index);
            index = below;
            size += lower.size;
            after = after.and(left(lower.after()));
            let before = Class::of(lower.size);
            stays = before == Class::of(size);
            if !stays {
                self.unlink_from(before, index);
            }
        }
        let header = &mut self.headers[index as usize];
        header.size = size;
        header.set_after(after);
        header.above = above;
        self.headers[above as usize].below = index;
        if !stays {
            self.link_in(Class::of(size), index);
        }
    }

    /// Remembers what more may use an allocated block.
    pub(super) fn used(&mut self, id: BlockId, after: After, open: Open) -> Result<(), Refusal> {
        self.live(id)?;
        let header = &mut self.headers[id.index as usize];
        header.set_after(header.after().and(after));
        header.previous = match open {
            Open::More => header.previous.saturating_add(1),
            Open::Same => header.previous,
            Open::Fewer => header.previous.saturating_sub(1),
        };
        Ok(())
    }

    #[inline]
    fn live(&self, id: BlockId) -> Result<&Header, Refusal> {
        let header = self.headers.get(id.index as usize);
        header
            .filter(|header| header.serial == id.serial && id.serial != 0)
            .ok_or(Refusal::NotLive)
    }

    /// The class whose first block has at least `size` granules: the request's own, or the smallest above it.
    #[inline]
    fn find(&mut self, size: u32) -> Option<Class> {
        let own = Class::of(size);
        let first = self.classes.first(own);
        if self.headers[first as usize].size >= size {
            return Some(own);
        }
        match self.classes.above(own) {
            Some(class) => Some(class),
            None => self.find_in(own, size),
        }
    }

    /// Makes a block of a class that is large enough its first.
    #[cold]
    fn find_in(&mut self, class: Class, size: u32) -> Option<Class> {
        if self.aside != NONE {
            self.settle();
            return self.find(size);
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
        self.settle();
        let room = u32::try_from(align / GRANULE).ok()?;
        // The largest shift that any address can need; a block that needs less may be smaller.
        let roomy = self.find(size.checked_add(room - 1)?);
        let fits = |&index: &u32| {
            let header = &self.headers[index as usize];
            u64::from(header.size) >= u64::from(size) + shift(header.address, align)
        };
        let index = match roomy {
            Some(class) => self.classes.first(class),
            None => self.list_from(Class::of(size)).find(fits)?,
        };
        let skip = u32::try_from(shift(self.headers[index as usize].address, align)).ok()?;
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
    fn cut_bottom(&mut self, index: u32, size: u32) -> u32 {
        self.unlink(index);
        let rest = self.headers[index as usize].size - size;
        if is_worth_it(rest, size)
            && let Some(rest) = self.split(index, size)
        {
            self.link(rest);
        }
        index
    }

    /// Cuts `size` granules from the upper end of a class's first block, where more than a crumb is left; what stands in no
    /// list then. The block keeps its place in its list as long as it stays in its class, which a large one does.
    #[inline]
    fn cut_top(&mut self, class: Class, size: u32) -> u32 {
        let index = self.classes.first(class);
        let rest = self.headers[index as usize].size - size;
        let top = if is_worth_it(rest, size) {
            self.split(index, rest)
        } else {
            None
        };
        let Some(top) = top else {
            self.unlink_first(class, index);
            return index;
        };
        let left = Class::of(rest);
        if left != class {
            self.unlink_first(class, index);
            self.link_in(left, index);
        }
        top
    }

    /// Allocates a block that stands in no list.
    #[inline]
    fn hand_out(&mut self, index: u32, asked: u64) -> Taken {
        self.taken += 1;
        let serial = self.taken;
        let header = &mut self.headers[index as usize];
        header.serial = serial;
        header.asked = asked;
        header.previous = 0;
        let taken = Taken {
            id: BlockId { serial, index },
            address: header.address,
            bytes: bytes(header.size),
            after: header.after(),
        };
        header.set_after(After::NOTHING);
        self.free -= taken.bytes;
        self.asked += asked;
        taken
    }

    /// Cuts a block after `size` granules; the rest, in no list.
    #[inline]
    fn split(&mut self, index: u32, size: u32) -> Option<u32> {
        let rest = self.header()?;
        let header = &mut self.headers[index as usize];
        let Header {
            address,
            size: whole,
            above,
            region,
            ..
        } = *header;
        let after = header.after();
        header.size = size;
        header.above = rest;
        let upper = &mut self.headers[rest as usize];
        upper.address = address + bytes(size);
        upper.size = whole - size;
        upper.below = index;
        upper.above = above;
        upper.region = region;
        upper.serial = 0;
        upper.asked = 0;
        upper.set_after(after);
        self.headers[above as usize].below = rest;
        Some(rest)
    }

    #[inline]
    fn link(&mut self, index: u32) {
        let class = Class::of(self.headers[index as usize].size);
        self.link_in(class, index);
    }

    /// Puts a block first in the list of its class.
    #[inline]
    fn link_in(&mut self, class: Class, index: u32) {
        let next = self.classes.put_first(class, index);
        let header = &mut self.headers[index as usize];
        header.previous = NONE;
        header.next = next;
        self.headers[next as usize].previous = index;
    }

    #[inline]
    fn unlink(&mut self, index: u32) {
        let class = Class::of(self.headers[index as usize].size);
        self.unlink_from(class, index);
    }

    /// Takes a block from the list of its class.
    #[inline(always)]
    fn unlink_from(&mut self, class: Class, index: u32) {
        let Header { previous, next, .. } = self.headers[index as usize];
        if previous == NONE {
            return self.unlink_first(class, index);
        }
        self.headers[next as usize].previous = previous;
        self.headers[previous as usize].next = next;
    }

    /// Takes the first block from the list of its class.
    #[inline]
    fn unlink_first(&mut self, class: Class, index: u32) {
        let next = self.headers[index as usize].next;
        self.headers[next as usize].previous = NONE;
        self.classes.take_first(class, next);
    }

    /// An unused header; `None` where all indices are used.
    #[inline]
    fn header(&mut self) -> Option<u32> {
        let index = self.unused;
        if index == NONE {
            return self.new_header();
        }
        self.unused = self.headers[index as usize].next;
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
    fn recycle(&mut self, index: u32) {
        let header = &mut self.headers[index as usize];
        header.size = 0;
        header.next = self.unused;
        self.unused = index;
    }

    fn list(&self, class: Class) -> impl Iterator<Item = u32> {
        let some = |index: u32| (index != NONE).then_some(index);
        std::iter::successors(some(self.classes.first(class)), move |&index| {
            some(self.headers[index as usize].next)
        })
    }

    fn list_from(&self, class: Class) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(class), |&class| self.classes.above(class))
            .flat_map(|class| self.list(class))
    }
}

/// Whether what is left of a block of which `size` granules are taken gets a header of its own.
#[inline]
fn is_worth_it(rest: u32, size: u32) -> bool {
    rest > (size >> CRUMB_SHIFT).min(CRUMB_MOST)
}

#[inline]
fn is_free(header: &Header) -> bool {
    header.serial == 0
}

#[inline]
fn bytes(granules: u32) -> u64 {
    u64::from(granules) * GRANULE
}

/// Granules from `address` to the next multiple of `align`.
fn shift(address: u64, align: u64) -> u64 {
    (address.next_multiple_of(align) - address) / GRANULE
}

#[cfg(test)]
mod tests;
