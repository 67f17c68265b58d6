//! Owns a block together with what is needed to use and to free it.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use crate::driver::Stream;
use crate::memory::error::MemoryError;
use crate::resource::{Block, BlockRef, FreeError, Tag};
use crate::runtime::{DeviceRuntime, SharedResource};
use crate::state::DeviceState;

/// Block with its resource, stream and state, freed when dropped.
#[derive(Debug)]
pub(crate) struct OwnedBlock {
    /// `None` once the block was freed.
    block: Option<Block>,
    pub(crate) block_ref: BlockRef,
    pub(crate) resource: SharedResource,
    /// Stream in whose order the block is freed.
    pub(crate) stream: Stream,
    /// State under which the block was allocated.
    pub(crate) state: Arc<DeviceState>,
}

impl OwnedBlock {
    pub(crate) fn allocate<T>(
        runtime: &DeviceRuntime,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<OwnedBlock, MemoryError> {
        // Checked before the allocation, so that memory of a device that is lost meanwhile is stale
        // from the start.
        runtime.state().check()?;
        let size = size_of::<T>();
        let layout = Layout::array::<T>(len).map_err(|_| MemoryError::TooLarge { len, size })?;
        let block = runtime.resource().allocate(layout, stream, tag)?;
        Ok(OwnedBlock {
            block_ref: block.as_ref(),
            block: Some(block),
            resource: Arc::clone(runtime.resource()),
            stream: stream.clone(),
            state: Arc::clone(runtime.state()),
        })
    }

    /// Owns a block that the caller allocated or adopted.
    pub(crate) fn from_parts(
        block: Block,
        resource: SharedResource,
        stream: Stream,
        state: Arc<DeviceState>,
    ) -> OwnedBlock {
        OwnedBlock {
            block_ref: block.as_ref(),
            block: Some(block),
            resource,
            stream,
            state,
        }
    }

    /// Takes the block, so that the drop frees nothing.
    pub(crate) fn take_block(&mut self) -> Option<Block> {
        self.block.take()
    }

    pub(crate) fn free(&mut self) -> Result<(), FreeError> {
        match self.block.take() {
            Some(block) => self.resource.deallocate(block, &self.stream),
            None => Ok(()),
        }
    }
}

impl Drop for OwnedBlock {
    fn drop(&mut self) {
        // After a failed free the resource keeps the block charged.
        let _ = self.free();
    }
}
