//! Calls the upstream resource of an adaptor and translates block origins.
#![forbid(unsafe_code)]

use std::alloc::Layout;

use crate::driver::{Access, Stream};
use crate::error::ResourceError;
use crate::resource::physical::{
    PhysicalBlock, PhysicalMemoryResource, ReleaseError, check_physical_origin,
};
use crate::resource::{
    Block, BlockRef, BlockUse, DeviceMemoryResource, FreeError, Origin, Tag, check_origin,
};

/// Upstream resource of an adaptor, with the adaptor's own origin.
#[derive(Debug)]
pub(crate) struct Upstream<R> {
    pub(crate) resource: R,
    pub(crate) origin: Origin,
}

impl<R> Upstream<R> {
    pub(crate) fn new(resource: R) -> Self {
        Upstream {
            resource,
            origin: Origin::unique(),
        }
    }
}

impl<R: PhysicalMemoryResource> Upstream<R> {
    pub(crate) fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        let block = self.resource.create(bytes, tag)?;
        Ok(block.with_origin(self.origin))
    }

    pub(crate) fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let block = check_physical_origin(self.origin, block)?.with_origin(self.resource.origin());
        self.resource
            .release(block)
            .map_err(|ReleaseError { block, reason }| ReleaseError {
                block: block.with_origin(self.origin),
                reason,
            })
    }
}

impl<R: DeviceMemoryResource> Upstream<R> {
    /// Returns an adaptor's block as the upstream knows it. Does not check the block's origin.
    pub(crate) fn translate(&self, block: BlockRef) -> BlockRef {
        block.with_origin(self.resource.origin())
    }

    pub(crate) fn allocate(
        &self,
        layout: Layout,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Block, ResourceError> {
        let block = self.resource.allocate(layout, stream, tag)?;
        Ok(block.with_origin(self.origin))
    }

    pub(crate) fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_origin(self.origin, block)?.with_origin(self.resource.origin());
        self.resource
            .deallocate(block, stream)
            .map_err(|error| match error {
                FreeError::Refused { block, reason } => FreeError::Refused {
                    block: block.with_origin(self.origin),
                    reason,
                },
                retired @ FreeError::Retired { .. } => retired,
            })
    }

    /// Returns an adaptor's block as the upstream knows it; refuses a foreign block.
    fn check_and_translate(&self, block: BlockRef) -> Result<BlockRef, ResourceError> {
        let (origin, found) = (self.origin, block.origin);
        if found != origin {
            return Err(ResourceError::Foreign { origin, found });
        }
        Ok(self.translate(block))
    }

    pub(crate) fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        let used =
            self.resource
                .prepare_block_use(self.check_and_translate(block)?, stream, access)?;
        Ok(BlockUse { block, ..used })
    }

    pub(crate) fn finish_block_use(
        &self,
        used: BlockUse,
        stream: &Stream,
    ) -> Result<(), ResourceError> {
        let block = self.check_and_translate(used.block)?;
        self.resource
            .finish_block_use(BlockUse { block, ..used }, stream)
    }

    pub(crate) fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        self.resource
            .record_block_use(self.check_and_translate(block)?, stream, access)
    }
}

/// Implements methods of an adaptor that only forward to its field `upstream`, an [`Upstream`].
/// `identity` and `budget_snapshot` are the same methods in both interfaces.
macro_rules! forward {
    ($($method:ident),* $(,)?) => { $($crate::adaptor::upstream::forward!(@ $method);)* };
    (@ allocate) => {
        fn allocate(&self, layout: std::alloc::Layout, stream: &$crate::driver::Stream, tag: $crate::resource::Tag)
            -> Result<$crate::resource::Block, $crate::error::ResourceError> {
            self.upstream.allocate(layout, stream, tag)
        }
    };
    (@ deallocate) => {
        fn deallocate(&self, block: $crate::resource::Block, stream: &$crate::driver::Stream)
            -> Result<(), $crate::resource::FreeError> {
            self.upstream.deallocate(block, stream)
        }
    };
    (@ identity) => {
        fn ordinal(&self) -> u32 {
            self.upstream.resource.ordinal()
        }
        fn origin(&self) -> $crate::resource::Origin {
            self.upstream.origin
        }
    };
    (@ bytes_outstanding) => {
        fn bytes_outstanding(&self) -> $crate::resource::Outstanding {
            self.upstream.resource.bytes_outstanding()
        }
    };
    (@ budget_snapshot) => {
        fn budget_snapshot(&self) -> Option<$crate::resource::BudgetSnapshot> {
            self.upstream.resource.budget_snapshot()
        }
    };
    (@ reap_pending) => {
        fn reap_pending(&self) -> Result<$crate::resource::Reaped, $crate::error::ResourceError> {
            self.upstream.resource.reap_pending()
        }
    };
    (@ is_retired) => {
        fn is_retired(&self, block: $crate::resource::BlockRef) -> bool {
            self.upstream.resource.is_retired(self.upstream.translate(block))
        }
    };
    (@ release) => {
        fn release(&self, block: $crate::resource::physical::PhysicalBlock)
            -> Result<(), $crate::resource::physical::ReleaseError> {
            self.upstream.release(block)
        }
    };
    (@ physical_identity) => {
        fn uuid(&self) -> $crate::driver::GpuUuid {
            self.upstream.resource.uuid()
        }
        fn granularity(&self) -> u64 {
            self.upstream.resource.granularity()
        }
        fn bytes_outstanding(&self) -> u64 {
            self.upstream.resource.bytes_outstanding()
        }
        $crate::adaptor::upstream::forward!(@ identity);
    };
    (@ uses) => {
        fn supports_block_use_tracking(&self) -> bool {
            self.upstream.resource.supports_block_use_tracking()
        }
        fn prepare_block_use(&self, block: $crate::resource::BlockRef, stream: &$crate::driver::Stream, access: $crate::driver::Access)
            -> Result<$crate::resource::BlockUse, $crate::error::ResourceError> {
            self.upstream.prepare_block_use(block, stream, access)
        }
        fn finish_block_use(&self, used: $crate::resource::BlockUse, stream: &$crate::driver::Stream)
            -> Result<(), $crate::error::ResourceError> {
            self.upstream.finish_block_use(used, stream)
        }
        fn record_block_use(&self, block: $crate::resource::BlockRef, stream: &$crate::driver::Stream, access: $crate::driver::Access)
            -> Result<(), $crate::error::ResourceError> {
            self.upstream.record_block_use(block, stream, access)
        }
    };
}
pub(crate) use forward;
