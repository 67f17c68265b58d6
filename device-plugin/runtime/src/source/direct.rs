//! The plainest sources of memory: one call of the driver for each block, one for its free.
//!
//! The driver's free waits for all work that may use the memory, so no block's use is tracked. A free that fails is
//! kept and tried again by [`reap_pending`](DeviceMemoryResource::reap_pending).
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Attach, Context, LINEAR_ALIGNMENT, Stream};
use crate::error::{CudaError, FreeError, ResourceError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, Origin, Outstanding, Reaped, Tag, check_free,
    check_request, remove_live,
};

/// What kind of memory: how it is allocated, and what it is called.
pub trait DriverAllocator: fmt::Debug + Send + Sync {
    /// What the resource is called in messages.
    const KIND: &'static str;

    /// Allocates from the driver what `cuMemFree` frees.
    ///
    /// # Errors
    /// What the driver answered.
    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64, CudaError>;
}

/// `cuMemAlloc`: memory of the device.
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

/// Memory that is allocated and freed one block at a time: the device's, or managed memory.
#[derive(Debug)]
pub struct Direct<S = Linear> {
    context: Context,
    source: S,
    origin: Origin,
    next_generation: AtomicU64,
    live_bytes: AtomicU64,
    /// Blocks that somebody owns.
    live_blocks: Mutex<HashSet<BlockRef>>,
    /// Blocks whose free failed.
    failed_frees: Mutex<Vec<BlockRef>>,
    /// Held by whoever tries them again; nobody waits for it.
    reap_lock: Mutex<()>,
}

/// Managed memory, one block at a time, attached as told.
pub type Managed = Direct<Attach>;

impl Direct {
    /// Memory of a context's device.
    pub fn new(context: &Context) -> Direct {
        Direct::with_allocator(context, Linear)
    }
}

impl<S: DriverAllocator> Direct<S> {
    /// Memory of a kind.
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

    fn live_blocks(&self) -> MutexGuard<'_, HashSet<BlockRef>> {
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
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.live_blocks().insert(block);
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        let block = remove_live(&mut self.live_blocks(), block)?;
        let (block_ref, bytes) = (block.as_ref(), block.bytes());
        let freed = self.context.free(block_ref.address);
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
        // A free waits for the device, so nobody may wait for this one: who comes meanwhile finds what is pending. What is
        // tried stays on the list, so that it goes on counting.
        let Ok(_only) = self.reap_lock.try_lock() else {
            return Ok(Reaped {
                freed: 0,
                pending: self.bytes_outstanding().retired,
            });
        };
        let candidates = self.failed_frees().clone();
        let (mut freed, mut result) = (Vec::new(), Ok(()));
        for block in candidates {
            match self.context.free(block.address) {
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
