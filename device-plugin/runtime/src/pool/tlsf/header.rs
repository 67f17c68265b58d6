//! Describes a block in one cache line, outside the memory.

use super::super::epoch::StreamDeps;
use super::super::size_classes::NO_BLOCK;

/// Exactly one cache line: a merge with both neighbours touches three. Fields that are written
/// separately are not adjacent where they would be read together, because such a load would miss
/// store-to-load forwarding.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Header {
    /// Slots of the deps. Of a free block: the streams that may still use it. Of an allocated
    /// block: the streams that callers have recorded with
    /// [`update_use`](super::TlsfHeap::update_use); the free adds its own.
    pub(super) slots: u64,
    pub(super) address: u64,
    /// Stamp of the deps.
    pub(super) stamp: u64,
    /// Number of the allocation; 0 for a free block.
    pub(super) serial: u64,
    /// Requested bytes.
    pub(super) requested: u64,
    /// Size in granules; 0 for an unused header and for [`SENTINEL`].
    pub(super) size: u32,
    /// Neighbour at the lower address.
    pub(super) below: u32,
    /// Neighbour at the higher address.
    pub(super) above: u32,
    /// Free block: neighbours in the list of its class. Unused header: `next` is the next unused
    /// one. Allocated block: `previous` counts open uses, and `next` has the folded slots of the
    /// streams that write the block ([`fold`]).
    pub(super) previous: u32,
    pub(super) next: u32,
    pub(super) region: u32,
}

impl Header {
    #[inline]
    pub(super) fn deps(&self) -> StreamDeps {
        StreamDeps {
            slots: self.slots,
            stamp: self.stamp,
        }
    }

    #[inline]
    pub(super) fn set_deps(&mut self, StreamDeps { slots, stamp }: StreamDeps) {
        self.slots = slots;
        self.stamp = stamp;
    }
}

pub(super) const UNUSED: Header = Header {
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
pub(super) const SENTINEL: Header = Header {
    serial: LAST_FREED,
    ..UNUSED
};

/// Serial number of the block that was freed last and is not merged yet.
pub(super) const LAST_FREED: u64 = u64::MAX;

#[inline]
pub(super) fn is_free(header: &Header) -> bool {
    header.serial == 0
}

/// Folds the bits of 64 stream slots into 32, one for slots that are 32 apart: a header has no more
/// room.
#[inline]
pub(super) fn fold(slots: u64) -> u32 {
    (slots as u32) | (slots >> u32::BITS) as u32
}

/// Returns the slots that [`fold`] maps to these bits.
#[inline]
pub(super) fn unfold(bits: u32) -> u64 {
    u64::from(bits) | u64::from(bits) << u32::BITS
}
