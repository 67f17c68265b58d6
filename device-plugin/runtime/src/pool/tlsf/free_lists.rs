//! Keeps free blocks and unused headers in linked lists.

use super::super::size_classes::{NO_BLOCK, SizeClass};
use super::header::{Header, UNUSED};
use super::{GRANULE, TlsfHeap};

impl TlsfHeap {
    /// Returns the class whose first block has at least `size` granules: the request's own class or
    /// the smallest above.
    #[inline]
    pub(super) fn find_class(&mut self, size: u32) -> Option<SizeClass> {
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
    pub(super) fn find_aligned(&mut self, size: u32, align: u64) -> Option<u32> {
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

    #[inline]
    pub(super) fn link(&mut self, index: u32) {
        let class = SizeClass::of(self.headers[index as usize].size);
        self.link_in(class, index);
    }

    /// Adds a block at the head of its class.
    #[inline]
    pub(super) fn link_in(&mut self, class: SizeClass, index: u32) {
        let next = self.classes.push_front(class, index);
        let header = &mut self.headers[index as usize];
        header.previous = NO_BLOCK;
        header.next = next;
        self.headers[next as usize].previous = index;
    }

    #[inline]
    pub(super) fn unlink(&mut self, index: u32) {
        let class = SizeClass::of(self.headers[index as usize].size);
        self.unlink_from(class, index);
    }

    /// Removes a block from its class.
    #[inline(always)]
    pub(super) fn unlink_from(&mut self, class: SizeClass, index: u32) {
        let Header { previous, next, .. } = self.headers[index as usize];
        if previous == NO_BLOCK {
            return self.unlink_first(class, index);
        }
        self.headers[next as usize].previous = previous;
        self.headers[previous as usize].next = next;
    }

    /// Removes the first block of its class.
    #[inline]
    pub(super) fn unlink_first(&mut self, class: SizeClass, index: u32) {
        let next = self.headers[index as usize].next;
        self.headers[next as usize].previous = NO_BLOCK;
        self.classes.replace_head(class, next);
    }

    pub(super) fn list(&self, class: SizeClass) -> impl Iterator<Item = u32> {
        let some = |index: u32| (index != NO_BLOCK).then_some(index);
        std::iter::successors(some(self.classes.head(class)), move |&index| {
            some(self.headers[index as usize].next)
        })
    }

    pub(super) fn list_from(&self, class: SizeClass) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(class), |&class| self.classes.above(class))
            .flat_map(|class| self.list(class))
    }

    /// Takes an unused header; `None` if all indices are used.
    #[inline]
    pub(super) fn take_header(&mut self) -> Option<u32> {
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
    pub(super) fn recycle_header(&mut self, index: u32) {
        let header = &mut self.headers[index as usize];
        header.size = 0;
        header.next = self.free_headers;
        self.free_headers = index;
    }
}

/// Returns the granules from `address` to the next multiple of `align`.
fn alignment_skip(address: u64, align: u64) -> u64 {
    (address.next_multiple_of(align) - address) / GRANULE
}
