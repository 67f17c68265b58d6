//! Allocates memory that can be exported as a file descriptor: `cuMemCreate` and `cuMemMap`.
//!
//! [`Exportable::guarded`] leaves the addresses around each block, and those of freed blocks,
//! unmapped. A kernel that runs past a block's end or uses a freed block then faults at once.
//! Unmapping does not wait for kernels, so a freed block is retired until the work before its free
//! is done.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Physical;
use crate::driver::{Access, Context, Mapping, Reservation, Stream};
use crate::error::{CudaError, ErrorClass, ResourceError};
use crate::resource::physical::{PhysicalBlock, PhysicalMemoryResource, ReleaseError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, FreeError, Origin, Reaped, Tag, check_free,
    check_request,
};
use crate::source::block_uses::{BlockUses, forward_block_uses};

/// Mapping, addresses and memory of a block.
#[derive(Debug)]
struct Backing {
    mapping: Mapping,
    addresses: Arc<Reservation>,
    /// `None` once the memory was released.
    memory: Option<PhysicalBlock>,
}

/// Unmapped addresses around blocks and of freed blocks.
#[derive(Debug)]
struct GuardPages {
    /// Addresses of the blocks that were freed last.
    quarantine: Mutex<VecDeque<Arc<Reservation>>>,
    max_quarantined: usize,
}

/// Exportable device memory, in multiples of the driver's granularity (2 MiB): maps what a physical
/// memory resource creates.
#[derive(Debug)]
pub struct Exportable<P: PhysicalMemoryResource = Physical> {
    context: Context,
    physical: P,
    guards: Option<GuardPages>,
    origin: Origin,
    next_generation: AtomicU64,
    blocks: BlockUses<Backing>,
}

/// Leaves live blocks to the context, as every resource does. Retired blocks are released after a
/// synchronization, because unmapping does not wait for kernels; if that fails they are left to the
/// context too.
impl<P: PhysicalMemoryResource> Drop for Exportable<P> {
    fn drop(&mut self) {
        let (live, mut retired) = self.blocks.take_payloads();
        std::mem::forget(live);
        if !retired.is_empty() && self.context.synchronize().is_err() {
            std::mem::forget(retired);
            return;
        }
        for backing in &mut retired {
            // Memory that the driver does not release stays with the process image.
            let _ = self.release_backing(backing);
        }
    }
}

impl Exportable {
    /// Allocates exportable memory of a context's device.
    ///
    /// # Errors
    /// The driver's error for the query of the granularity.
    pub fn new(context: &Context) -> Result<Exportable, CudaError> {
        Ok(Exportable::over(context, Physical::new(context.device())?))
    }

    /// Allocates blocks between unmapped addresses, and keeps the addresses of the last
    /// `quarantine` freed blocks unmapped.
    ///
    /// A block ends as close to the unmapped addresses as its alignment permits.
    ///
    /// # Errors
    /// As [`Exportable::new`].
    pub fn guarded(context: &Context, quarantine: usize) -> Result<Exportable, CudaError> {
        let mut memory = Exportable::new(context)?;
        memory.guards = Some(GuardPages {
            quarantine: Mutex::default(),
            max_quarantined: quarantine,
        });
        Ok(memory)
    }
}

impl<P: PhysicalMemoryResource> Exportable<P> {
    /// Maps what a resource of the same device creates, such as a [`Budget`](crate::Budget) over
    /// [`Physical`].
    pub fn over(context: &Context, physical: P) -> Exportable<P> {
        Exportable {
            context: context.clone(),
            physical,
            guards: None,
            origin: Origin::unique(),
            next_generation: AtomicU64::new(0),
            blocks: BlockUses::new(context),
        }
    }

    /// Exports a block's memory as a file descriptor.
    ///
    /// The descriptor keeps the memory past the block's free and this process's end (F4 in
    /// `docs/internals/facts.md`).
    ///
    /// # Errors
    /// [`ResourceError::Foreign`], [`ResourceError::Stale`], or the driver's error.
    pub fn export(&self, block: BlockRef) -> Result<OwnedFd, ResourceError> {
        let (origin, found) = (self.origin, block.origin);
        if found != origin {
            return Err(ResourceError::Foreign { origin, found });
        }
        let export = |backing: &Backing| backing.memory.as_ref().map(PhysicalBlock::export);
        let generation = block.generation;
        Ok(self
            .blocks
            .with_payload(block, export)?
            .ok_or(ResourceError::Stale { generation })??)
    }

    fn map_block(&self, layout: Layout, tag: Tag) -> Result<(u64, Backing), ResourceError> {
        let size = layout.size() as u64;
        let memory = self.physical.create(self.physical.round_up(size)?, tag)?;
        match self.map_at_new_addresses(&memory) {
            Ok((mapping, addresses)) => {
                let slack = match self.guards {
                    Some(_) => (memory.bytes() - size) & !(layout.align() as u64 - 1),
                    None => 0,
                };
                let address = mapping.address() + slack;
                let backing = Backing {
                    mapping,
                    addresses,
                    memory: Some(memory),
                };
                Ok((address, backing))
            }
            Err(error) => {
                // Memory that the driver does not release stays with the process image.
                let _ = self.physical.release(memory);
                Err(ResourceError::from_alloc_failure(
                    self.ordinal(),
                    size,
                    error,
                ))
            }
        }
    }

    fn map_at_new_addresses(
        &self,
        memory: &PhysicalBlock,
    ) -> Result<(Mapping, Arc<Reservation>), CudaError> {
        let guard = match self.guards {
            Some(_) => self.physical.granularity(),
            None => 0,
        };
        let bytes = memory.bytes() + 2 * guard;
        let addresses = Arc::new(self.context.driver().reserve(bytes)?);
        let mapping = addresses.map(guard, memory.handle(), Access::ReadWrite, &self.context)?;
        Ok((mapping, addresses))
    }

    fn release_backing(&self, backing: &mut Backing) -> Result<(), ResourceError> {
        backing.mapping.unmap()?;
        if let Some(memory) = backing.memory.take() {
            self.physical
                .release(memory)
                .map_err(|ReleaseError { block, reason }| {
                    backing.memory = Some(block);
                    reason
                })?;
        }
        if let Some(guards) = &self.guards {
            let mut quarantine = guards
                .quarantine
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            quarantine.push_back(Arc::clone(&backing.addresses));
            while quarantine.len() > guards.max_quarantined {
                quarantine.pop_front();
            }
        }
        Ok(())
    }
}

/// Maps memory that another process exported. The memory is released with its last mapping and
/// handle.
///
/// # Errors
/// The error that the driver returned.
pub fn import(
    context: &Context,
    descriptor: BorrowedFd<'_>,
    bytes: u64,
    access: Access,
) -> Result<Mapping, CudaError> {
    let handle = context.driver().import(descriptor, bytes)?;
    let addresses = Arc::new(context.driver().reserve(bytes)?);
    addresses.map(0, &handle, access, context)
}

impl<P: PhysicalMemoryResource> DeviceMemoryResource for Exportable<P> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let alignment = self.physical.granularity() as usize;
        check_request(self.ordinal(), layout, alignment, stream)?;
        let (address, backing) = match self.map_block(layout, tag) {
            Err(error)
                if error.class() == ErrorClass::OutOfMemory
                    && self.reap_pending().is_ok_and(|reaped| reaped.freed > 0) =>
            {
                self.map_block(layout, tag)?
            }
            other => other?,
        };
        let block = BlockRef {
            address,
            layout,
            origin: self.origin,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        self.blocks.insert(block, stream, backing)?;
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        self.blocks.retire(block, stream, |_| Ok(()))?;
        // This block was freed. A later reap reports the failures of other blocks.
        let _ = self.reap_pending();
        Ok(())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        self.blocks.reap(
            |_| Ok(()),
            |retired| self.release_backing(&mut retired.payload),
        )
    }

    fn kind(&self) -> &'static str {
        match self.guards {
            Some(_) => "guard-pages",
            None => "exportable",
        }
    }

    forward_block_uses!();
}
