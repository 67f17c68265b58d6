//! Allocates stream-ordered memory from the driver's own pool: `cuMemAllocAsync` and
//! `cuMemFreeAsync`.
//!
//! A free is ordered behind every reported use in any stream, and the block is retired until that
//! work is done. No call waits, and a block may be freed in another stream than it was allocated
//! in.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Context, LINEAR_ALIGNMENT, Stream};
use crate::error::{CudaError, ResourceError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, FreeError, Origin, Reaped, Tag, check_free,
    check_request,
};
use crate::source::block_uses::{BlockUses, RetiredBlock, forward_block_uses};
use crate::vouched;

/// Number of retired blocks above which a free reaps.
const REAP_THRESHOLD: usize = 256;

/// Memory of the driver's default pool of a device.
#[derive(Debug)]
pub struct StreamOrdered {
    context: Context,
    origin: Origin,
    next_generation: AtomicU64,
    blocks: BlockUses<()>,
}

impl StreamOrdered {
    /// Allocates from the pool of a context's device.
    pub fn new(context: &Context) -> StreamOrdered {
        StreamOrdered {
            context: context.clone(),
            origin: Origin::unique(),
            next_generation: AtomicU64::new(0),
            blocks: BlockUses::new(context),
        }
    }

    fn free(&self, retired: &RetiredBlock<()>) -> Result<(), CudaError> {
        vouched::free_async(&self.context, retired.block.address, &retired.stream)
    }
}

impl DeviceMemoryResource for StreamOrdered {
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal(), layout, LINEAR_ALIGNMENT, stream)?;
        let bytes = layout.size();
        let address = self
            .context
            .allocate_async(bytes, stream)
            .map_err(|error| {
                ResourceError::from_alloc_failure(self.ordinal(), bytes as u64, error)
            })?;
        let block = BlockRef {
            address,
            layout,
            origin: self.origin,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        self.blocks.insert(block, stream, ())?;
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        self.blocks
            .retire(block, stream, |retired| self.free(retired))?;
        if self.blocks.retired_count() > REAP_THRESHOLD {
            // This block was freed. A later reap reports the failures of other blocks.
            let _ = self.reap_pending();
        }
        Ok(())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        self.blocks.reap(|retired| self.free(retired), |_| Ok(()))
    }

    fn kind(&self) -> &'static str {
        "stream-ordered"
    }

    forward_block_uses!();
}
