//! Reserves room in a budget, so that other users of the budget cannot take it.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use super::{Budget, BudgetAccount};
use crate::driver::{Access, Stream};
use crate::error::ResourceError;
use crate::resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, FreeError, Origin,
    Outstanding, Reaped, Tag,
};

/// Reserved bytes of a budget. Freed blocks return to the budget, not to the reservation, and
/// unused bytes return on drop.
#[derive(Debug)]
pub struct Reservation<R: DeviceMemoryResource> {
    budget: Arc<Budget<R>>,
    account: BudgetAccount,
}

impl<R: DeviceMemoryResource> Budget<R> {
    /// Reserves bytes, which count as used from now on.
    ///
    /// # Errors
    /// [`ResourceError::OverBudget`].
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation<R>, ResourceError> {
        self.retry_after_reap(|| self.account.charge_for(self.ordinal(), bytes))?;
        Ok(Reservation {
            budget: Arc::clone(self),
            account: BudgetAccount::new(bytes),
        })
    }
}

impl<R: DeviceMemoryResource> Drop for Reservation<R> {
    fn drop(&mut self) {
        let BudgetSnapshot { limit, used } = self.account.snapshot();
        self.budget.account.uncharge(limit - used);
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Reservation<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let bytes = layout.size() as u64;
        self.account.charge_for(self.ordinal(), bytes)?;
        // The budget has room, but the upstream may not.
        self.budget
            .retry_after_reap(|| self.budget.upstream.allocate(layout, stream, tag))
            .inspect_err(|_| self.account.uncharge(bytes))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        self.budget.deallocate(block, stream)
    }

    fn ordinal(&self) -> u32 {
        self.budget.ordinal()
    }

    fn origin(&self) -> Origin {
        self.budget.origin()
    }

    fn bytes_outstanding(&self) -> Outstanding {
        self.budget.bytes_outstanding()
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.account.snapshot())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        self.budget.reap_pending()
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.budget.is_retired(block)
    }

    fn supports_block_use_tracking(&self) -> bool {
        self.budget.supports_block_use_tracking()
    }

    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        self.budget.prepare_block_use(block, stream, access)
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        self.budget.finish_block_use(used, stream)
    }

    fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        self.budget.record_block_use(block, stream, access)
    }

    fn kind(&self) -> &'static str {
        "reservation"
    }
}
