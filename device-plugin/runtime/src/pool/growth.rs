//! Grows a pool by slabs of its source.

use std::alloc::Layout;
use std::sync::{MutexGuard, PoisonError};

use super::Pool;
use super::epoch::StreamDeps;
use super::shards::{Allocation, Request};
use super::tlsf::{self, EmptyRegion};
use crate::error::{ErrorClass, ResourceError};
use crate::resource::{Block, BudgetSnapshot, DeviceMemoryResource, FreeError, Tag};

/// Slab sizes are multiples of this, because the driver allocates linear memory above 1 MiB in such
/// steps.
pub(super) const SLAB_STEP: u64 = 2 << 20;

#[derive(Debug)]
pub(super) struct Slab {
    block: Block,
    span: EmptyRegion,
}

#[derive(Debug, Default)]
pub(super) struct Slabs {
    /// Indexed by the region's number.
    pub(super) all: Vec<Option<Slab>>,
    pub(super) bytes: u64,
}

impl<R: DeviceMemoryResource> Pool<R> {
    pub(super) fn slabs(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_growth(&self) -> MutexGuard<'_, ()> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room from any shard, grows the pool, or makes the source reclaim memory.
    pub(super) fn allocate_or_grow(&self, request: Request) -> Result<Allocation, ResourceError> {
        let mut gave_back = false;
        loop {
            if let Some(allocation) = self.shards.allocate_any(request) {
                return Ok(allocation);
            }
            // Another thread may use up the new slab first; the loop then adds one more.
            let Err(error) = self.grow(request) else {
                continue;
            };
            if error.class() != ErrorClass::OutOfMemory || gave_back {
                return Err(error);
            }
            gave_back = true;
            let released = self.release_empty_slabs()?;
            if released + self.source.reap_pending()?.freed == 0 {
                return Err(error);
            }
        }
    }

    /// Adds a slab that has room for a request.
    fn grow(&self, request: Request) -> Result<(), ResourceError> {
        let used = self.slabs().bytes;
        let room = self.settings.maximum.saturating_sub(used);
        // A slab starts at a multiple of a granule, so only larger alignments need more room.
        let min_bytes = request
            .bytes
            .checked_add(request.align.saturating_sub(tlsf::GRANULE))
            .and_then(|bytes| bytes.checked_next_multiple_of(SLAB_STEP))
            .filter(|&bytes| bytes <= room)
            .ok_or_else(|| {
                let limit = self.settings.maximum;
                self.over_budget(request, BudgetSnapshot { limit, used })
            })?;
        let wanted = self.settings.step.clamp(min_bytes, room);
        match self.add_slab(wanted) {
            Err(error) if error.class() == ErrorClass::OutOfMemory && wanted > min_bytes => {
                self.add_slab(min_bytes)
            }
            other => other,
        }
    }

    pub(super) fn add_slab(&self, bytes: u64) -> Result<(), ResourceError> {
        let (internal, slot) = self.slots.internal_stream();
        let too_large = || ResourceError::TooLarge {
            ordinal: self.ordinal,
            requested: bytes,
        };
        let size = usize::try_from(bytes).map_err(|_| too_large())?;
        let layout =
            Layout::from_size_align(size, tlsf::GRANULE as usize).map_err(|_| too_large())?;
        let block = self.source.allocate(layout, internal, Tag("slab"))?;
        let mut slabs = self.slabs();
        let vacant = slabs.all.iter().position(Option::is_none);
        let region = vacant.unwrap_or(slabs.all.len());
        // A stream-ordered source allocated the slab for work of the internal stream.
        let deps = match internal.is_idle() {
            Ok(true) => StreamDeps::NONE,
            _ => self.clock.stamp_free(slot.bit()),
        };
        let added = u32::try_from(region)
            .ok()
            .and_then(|region| self.shards.add_region(region, block.address(), bytes, deps));
        let Some(span) = added else {
            drop(slabs);
            // The source answers for the slab even if this free fails.
            let _ = self.source.deallocate(block, internal);
            return Err(too_large());
        };
        if vacant.is_none() {
            slabs.all.push(None);
        }
        slabs.all[region] = Some(Slab { block, span });
        slabs.bytes += bytes;
        Ok(())
    }

    /// Releases empty slabs. The holder of `growth` waits for the device here, so only threads that
    /// need that memory wait too.
    pub(super) fn release_empty_slabs(&self) -> Result<u64, ResourceError> {
        self.shards.return_chunks();
        let count = self.slabs().all.len();
        let mut released = 0;
        for region in 0..count {
            let mut slabs = self.slabs();
            let Some(deps) = slabs.all[region]
                .as_ref()
                .and_then(|slab| self.shards.remove_region(slab.span))
            else {
                continue;
            };
            let Some(slab) = slabs.all[region].take() else {
                continue;
            };
            drop(slabs);
            let bytes = slab.block.bytes();
            if let Err((slab, error)) = self.release_slab(slab, deps) {
                let span =
                    self.shards
                        .add_region(slab.span.region, slab.block.address(), bytes, deps);
                let slab = span.map(|span| Slab { span, ..slab });
                self.slabs().all[region] = slab;
                return Err(error);
            }
            self.slabs().bytes -= bytes;
            released += bytes;
        }
        Ok(released)
    }

    fn release_slab(&self, slab: Slab, deps: StreamDeps) -> Result<(), (Slab, ResourceError)> {
        let (internal, slot) = self.slots.internal_stream();
        let unmet = self.clock.unmet(slot, deps);
        if let Err(error) = self.slots.wait(&self.clock, internal, Some(slot), unmet) {
            return Err((slab, error.into()));
        }
        match self.source.deallocate(slab.block, internal) {
            Err(FreeError::Refused { block, reason }) => Err((Slab { block, ..slab }, reason)),
            // The source counts and retries a failed free.
            Ok(()) | Err(FreeError::Retired { .. }) => Ok(()),
        }
    }
}
