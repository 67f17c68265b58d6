//! Allocates managed memory of a runtime, with statistics of its own.
#![forbid(unsafe_code)]

use std::sync::Arc;

use bytemuck::Pod;

use crate::adaptor::statistics::AllocationCounts;
use crate::driver::{Attach, Stream};
use crate::memory::error::MemoryError;
use crate::memory::managed_ref::ManagedRef;
use crate::resource::Tag;
use crate::runtime::{DeviceRuntime, ManagedSource, SharedResource};

/// Allocator of a runtime's managed memory, which all handles of the runtime share.
///
/// Each allocation is a `cuMemAllocManaged`. The shim charges it to the container's quota of
/// managed memory, or without such a quota to its device quota. The sizes are bytes of the virtual
/// address range, wherever the pages are.
#[derive(Debug)]
pub struct ManagedAllocator {
    runtime: DeviceRuntime,
    source: Arc<ManagedSource>,
}

impl DeviceRuntime {
    /// Returns the allocator of managed memory.
    pub fn managed(&self) -> ManagedAllocator {
        let source = Arc::clone(self.managed_source());
        ManagedAllocator {
            runtime: self.with_shared_resource(Arc::clone(&source) as SharedResource),
            source,
        }
    }
}

impl ManagedAllocator {
    /// Allocates memory for `len` items and attaches it.
    ///
    /// # Errors
    /// As [`ManagedRef::allocate`].
    pub fn allocate<T: Pod>(
        &self,
        len: usize,
        attach: Attach,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ManagedRef<T>, MemoryError> {
        ManagedRef::allocate(&self.runtime, len, attach, stream, tag)
    }

    /// Returns the counts of all managed memory of the runtime so far.
    pub fn statistics(&self) -> AllocationCounts {
        self.source.counts()
    }

    /// Returns the runtime whose resource is managed memory, to compose adaptors over.
    pub fn runtime(&self) -> &DeviceRuntime {
        &self.runtime
    }
}
