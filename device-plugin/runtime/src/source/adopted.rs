//! Owns device memory that cudarc allocated, so that it can be used and freed like any block.
//!
//! A free orders cudarc's stream behind all uses, and then drops the slice, which frees the memory
//! in that stream. The host does not wait.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Context, Stream};
use crate::error::{CudaError, ResourceError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, FreeError, Origin, Reaped, Tag, check_free,
};
use crate::source::block_uses::{BlockUses, RetiredBlock, forward_block_uses};

/// Memory of another allocator, which the drop of `owner` frees.
#[derive(Debug)]
struct Adopted {
    owner: Mutex<Option<Box<dyn Any + Send>>>,
    /// Stream in which the owner frees the memory.
    stream: Stream,
}

impl Adopted {
    /// Orders the owner's stream behind the free, and takes the owner.
    fn take(retired: &RetiredBlock<Adopted>) -> Result<Option<Box<dyn Any + Send>>, CudaError> {
        let Adopted { owner, stream } = &retired.payload;
        stream.wait_for(&retired.stream)?;
        Ok(owner.lock().unwrap_or_else(PoisonError::into_inner).take())
    }
}

/// Memory of a device that other allocators have given up.
#[derive(Debug)]
pub(crate) struct AdoptedMemory {
    context: Context,
    origin: Origin,
    next_generation: AtomicU64,
    blocks: BlockUses<Adopted>,
}

static OF_DEVICE: Mutex<Option<HashMap<u32, Arc<AdoptedMemory>>>> = Mutex::new(None);

impl AdoptedMemory {
    /// Returns the process's adopted memory of a context's device.
    pub(crate) fn of(context: &Context) -> Arc<AdoptedMemory> {
        let mut all = OF_DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.get_or_insert_default().entry(context.ordinal());
        let memory = known.or_insert_with(|| {
            Arc::new(AdoptedMemory {
                context: context.clone(),
                origin: Origin::unique(),
                next_generation: AtomicU64::new(0),
                blocks: BlockUses::new(context),
            })
        });
        Arc::clone(memory)
    }

    /// Adopts memory, which `stream` may use now and in which the owner frees it.
    ///
    /// # Errors
    /// [`ResourceError::PointerCollision`] if a live block has some of its bytes. The owner is then
    /// never dropped.
    pub(crate) fn adopt(
        &self,
        address: u64,
        layout: Layout,
        owner: Box<dyn Any + Send>,
        stream: &Stream,
    ) -> Result<Block, ResourceError> {
        let block = BlockRef {
            address,
            layout,
            origin: self.origin,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        let adopted = Adopted {
            owner: Mutex::new(Some(owner)),
            stream: stream.clone(),
        };
        self.blocks.insert(block, stream, adopted)?;
        Ok(Block::new(block))
    }

    /// Returns the owner of a block instead of a free, behind all uses. The memory is the caller's
    /// then, so nothing of the block stays here.
    pub(crate) fn take_back(
        &self,
        block: Block,
        stream: &Stream,
    ) -> Result<Option<Box<dyn Any + Send>>, FreeError> {
        let known = block.as_ref();
        let owner = self.retire(block, stream)?;
        self.blocks.forget_retired(known);
        Ok(owner)
    }

    /// Takes the owner of a block, behind all uses.
    fn retire(
        &self,
        block: Block,
        stream: &Stream,
    ) -> Result<Option<Box<dyn Any + Send>>, FreeError> {
        let block = check_free(self.origin, self.context.ordinal(), block, stream)?;
        let mut owner = None;
        self.blocks.retire(block, stream, |retired| {
            owner = Adopted::take(retired)?;
            Ok(())
        })?;
        Ok(owner)
    }
}

impl DeviceMemoryResource for AdoptedMemory {
    /// Allocates nothing: other allocators do.
    fn allocate(&self, _: Layout, _: &Stream, _: Tag) -> Result<Block, ResourceError> {
        /// `CUDA_ERROR_NOT_SUPPORTED`
        const NOT_SUPPORTED: i32 = 801;
        Err(ResourceError::Cuda(CudaError {
            call: "AdoptedMemory::allocate",
            code: NOT_SUPPORTED,
        }))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        drop(self.retire(block, stream)?);
        // This block was freed. A later reap reports the failures of other blocks.
        let _ = self.reap_pending();
        Ok(())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let free = |retired: &RetiredBlock<Adopted>| Adopted::take(retired).map(drop);
        self.blocks.reap(free, |_| Ok(()))
    }

    fn kind(&self) -> &'static str {
        "adopted"
    }

    forward_block_uses!();
}
