//! Records the streams that use a block.

use super::epoch::{StreamDeps, StreamSlot};
use super::shards::BlockHandle;
use super::tlsf::UseCount;
use super::{Pool, heap_error};
use crate::driver::{Access, Stream};
use crate::error::ResourceError;
use crate::resource::{BlockRef, DeviceMemoryResource};

/// Recorded use of a block.
pub(super) struct RecordedUse {
    /// Slot of the stream that uses the block.
    pub(super) slot: StreamSlot,
    /// Slots of the streams that the use must follow.
    pub(super) before: u64,
}

impl<R: DeviceMemoryResource> Pool<R> {
    /// Returns the block's handle, the allocating stream's slot and the slot of the stream that
    /// will use the block.
    fn slots_of_use(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<(BlockHandle, StreamSlot, StreamSlot), ResourceError> {
        self.check(block, stream)?;
        let (handle, alloc_slot) = self.decode(block);
        match (alloc_slot, self.slots.slot_for(stream)?) {
            (Some(alloc_slot), Some(slot)) => Ok((handle, alloc_slot, slot)),
            _ => Err(self.stream_misuse()),
        }
    }

    pub(super) fn record_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
        count: UseCount,
    ) -> Result<RecordedUse, ResourceError> {
        let (handle, alloc_slot, slot) = self.slots_of_use(block, stream)?;
        let deps = self.clock.stamp_free(slot.bit());
        let writers = if access.writes() { slot.bit() } else { 0 };
        let earlier = self
            .shards
            .update_use(handle, deps, writers, count)
            .map_err(|reason| heap_error(block.generation, reason))?;
        let conflicting = match access.writes() {
            true => earlier.all.slots,
            false => earlier.writers,
        };
        let (slots, stamp) = (conflicting, earlier.all.stamp);
        let unmet = self.clock.unmet(slot, StreamDeps { slots, stamp });
        Ok(RecordedUse {
            slot,
            // The present work of the allocating stream, such as the first write, counts too.
            before: (unmet | alloc_slot.bit()) & !slot.bit(),
        })
    }
}
