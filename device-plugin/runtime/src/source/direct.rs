//! Allocates and frees each block by one call of the driver.
//!
//! The driver's free waits for all work that may use the memory, so this source tracks no uses.
//! [`reap_pending`](DeviceMemoryResource::reap_pending) retries failed frees.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Attach, Context, LINEAR_ALIGNMENT, Stream};
use crate::error::{CudaError, ResourceError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, FreeError, Origin, Outstanding, Reaped, Tag, check_free,
    check_request,
};
use crate::source::live_blocks::LiveBlocks;
use crate::vouched;

/// Driver call that allocates one kind of memory.
pub trait DriverAllocator: fmt::Debug + Send + Sync {
    /// Name of the resource in messages.
    const KIND: &'static str;

    /// Allocates memory that `cuMemFree` frees.
    ///
    /// # Errors
    /// The error that the driver returned.
    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64, CudaError>;
}

/// Device memory of `cuMemAlloc`.
#[derive(Clone, Copy, Debug)]
pub struct Linear;

impl DriverAllocator for Linear {
    const KIND: &'static str = "direct";

    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64, CudaError> {
        context.allocate(bytes)
    }
}

impl DriverAllocator for Attach {
    const KIND: &'static str = "managed";

    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64, CudaError> {
        context.allocate_managed(bytes, *self)
    }
}

/// Device or managed memory, allocated and freed one block at a time.
#[derive(Debug)]
pub struct Direct<S = Linear> {
    context: Context,
    source: S,
    origin: Origin,
    next_generation: AtomicU64,
    live_bytes: AtomicU64,
    /// Blocks that have an owner.
    live_blocks: Mutex<LiveBlocks>,
    /// Blocks whose free failed.
    failed_frees: Mutex<Vec<BlockRef>>,
    /// Held by the thread that retries failed frees; other threads do not wait for it.
    reap_lock: Mutex<()>,
}

/// Managed memory, allocated one block at a time with the given attachment.
pub type Managed = Direct<Attach>;

impl Direct {
    /// Allocates linear memory of a context's device.
    pub fn new(context: &Context) -> Direct {
        Direct::with_allocator(context, Linear)
    }
}

impl<S: DriverAllocator> Direct<S> {
    /// Allocates memory of one kind.
    pub fn with_allocator(context: &Context, source: S) -> Direct<S> {
        Direct {
            context: context.clone(),
            source,
            origin: Origin::unique(),
            next_generation: AtomicU64::new(0),
            live_bytes: AtomicU64::new(0),
            live_blocks: Mutex::default(),
            failed_frees: Mutex::default(),
            reap_lock: Mutex::default(),
        }
    }

    fn live_blocks(&self) -> MutexGuard<'_, LiveBlocks> {
        self.live_blocks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn failed_frees(&self) -> MutexGuard<'_, Vec<BlockRef>> {
        self.failed_frees
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: DriverAllocator> DeviceMemoryResource for Direct<S> {
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal(), layout, LINEAR_ALIGNMENT, stream)?;
        let bytes = layout.size() as u64;
        let address = self
            .source
            .allocate(&self.context, layout.size())
            .map_err(|error| ResourceError::from_alloc_failure(self.ordinal(), bytes, error))?;
        let block = BlockRef {
            address,
            layout,
            origin: self.origin,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        // The colliding memory is not freed, because that would free the live block.
        self.live_blocks().insert(block, self.ordinal())?;
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        let (block_ref, bytes) = (block.as_ref(), block.bytes());
        if !self.live_blocks().remove(&block_ref) {
            let generation = block_ref.generation;
            let reason = ResourceError::Stale { generation };
            return Err(FreeError::Refused { block, reason });
        }
        let freed = vouched::free(&self.context, block_ref.address);
        if freed.is_err() {
            self.failed_frees().push(block_ref);
        }
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        freed.map_err(|source| FreeError::Retired { bytes, source })
    }

    fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn bytes_outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.live_bytes.load(Ordering::Relaxed),
            retired: self.failed_frees().iter().map(BlockRef::bytes).sum(),
        }
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        // A free waits for the device, so a second thread does not wait here but returns the
        // pending bytes. A retried block stays in the list, so that its bytes keep counting.
        let Ok(_only) = self.reap_lock.try_lock() else {
            return Ok(Reaped {
                freed: 0,
                pending: self.bytes_outstanding().retired,
            });
        };
        let candidates = self.failed_frees().clone();
        let (mut freed, mut result) = (Vec::new(), Ok(()));
        for block in candidates {
            match vouched::free(&self.context, block.address) {
                Ok(()) => freed.push(block.generation),
                Err(error) => result = Err(error),
            }
        }
        let mut failed = self.failed_frees();
        let before: u64 = failed.iter().map(BlockRef::bytes).sum();
        failed.retain(|block| !freed.contains(&block.generation));
        let pending = failed.iter().map(BlockRef::bytes).sum();
        result?;
        Ok(Reaped {
            freed: before.saturating_sub(pending),
            pending,
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.failed_frees()
            .iter()
            .any(|failed| failed.generation == block.generation)
    }

    fn kind(&self) -> &'static str {
        S::KIND
    }
}
