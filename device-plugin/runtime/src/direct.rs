//! The plainest source of memory: `cuMemAlloc` and `cuMemFree`, one call each.
//!
//! The driver's free waits for all work that may use the memory, so no block's use is tracked. A free that fails is
//! kept and tried again by [`reap_pending`](DeviceMemoryResource::reap_pending).
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::driver::{Context, LINEAR_ALIGNMENT, Stream};
use crate::error::{CudaError, FreeError, ResourceError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, Origin, Outstanding, Reaped, Tag, check_own,
    check_request, check_stream,
};

/// Linear memory of a context.
#[derive(Debug)]
pub struct Direct {
    context: Context,
    origin: Origin,
    made: AtomicU64,
    live: AtomicU64,
    /// Blocks whose free failed.
    failed: Mutex<Vec<BlockRef>>,
}

impl Direct {
    /// Linear memory of a context.
    pub fn new(context: &Context) -> Direct {
        Direct {
            context: context.clone(),
            origin: Origin::unique(),
            made: AtomicU64::new(0),
            live: AtomicU64::new(0),
            failed: Mutex::default(),
        }
    }

    fn free(&self, block: BlockRef) -> Result<(), CudaError> {
        self.context.free(block.address)
    }
}

impl DeviceMemoryResource for Direct {
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal(), layout, LINEAR_ALIGNMENT, stream)?;
        let bytes = layout.size() as u64;
        let address = self
            .context
            .allocate(layout.size())
            .map_err(|error| ResourceError::of_allocation(self.ordinal(), bytes, error))?;
        self.live.fetch_add(bytes, Ordering::Relaxed);
        Ok(Block::new(BlockRef {
            address,
            layout,
            origin: self.origin,
            generation: self.made.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        }))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_own(self.origin, block)?;
        if let Err(why) = check_stream(self.ordinal(), stream) {
            return Err(FreeError::Refused { block, why });
        }
        let (gone, bytes) = (block.as_ref(), block.bytes());
        let freed = self.free(gone);
        if freed.is_err() {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.push(gone);
        }
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        freed.map_err(|source| FreeError::Retired { bytes, source })
    }

    fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn bytes_outstanding(&self) -> Outstanding {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        Outstanding {
            live: self.live.load(Ordering::Relaxed),
            retired: failed.iter().map(BlockRef::bytes).sum(),
        }
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        // Freeing waits for the device: what is tried is taken off the list, and no lock is held meanwhile.
        let tried =
            std::mem::take(&mut *self.failed.lock().unwrap_or_else(PoisonError::into_inner));
        let (mut reaped, mut left, mut answer) = (Reaped::default(), Vec::new(), Ok(()));
        for block in tried {
            match self.free(block) {
                Ok(()) => reaped.freed += block.bytes(),
                Err(error) => {
                    answer = Err(error);
                    left.push(block);
                }
            }
        }
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.append(&mut left);
        reaped.pending = failed.iter().map(BlockRef::bytes).sum();
        answer?;
        Ok(reaped)
    }

    fn kind(&self) -> &'static str {
        "direct"
    }
}
