//! Limits the bytes that are allocated through the adaptor.
//!
//! A block counts from before the upstream allocates it until the upstream has released its bytes.
//! A free that waits for a stream, or that failed, still counts. A full budget reaps its upstream
//! and retries; the adaptor never waits. Bytes that the upstream releases by itself count until a
//! reap, or until the number of freed blocks that count has doubled.
#![forbid(unsafe_code)]

mod reservation;

use std::alloc::Layout;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use bursar_driver::account::BudgetAccount;
pub use reservation::Reservation;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::{ErrorClass, ResourceError};
use crate::resource::physical::{PhysicalBlock, PhysicalMemoryResource, ReleaseError};
use crate::resource::{
    Block, BlockRef, BudgetSnapshot, DeviceMemoryResource, FreeError, Reaped, Tag,
};

/// Limit over an upstream resource.
#[derive(Debug)]
pub struct Budget<R> {
    upstream: Upstream<R>,
    account: Arc<BudgetAccount>,
    retired: Mutex<Retired>,
}

/// Number of freed blocks below which a free does not look for released ones.
const MIN_RETIRED_CHECK: usize = 256;

#[derive(Debug, Default)]
struct Retired {
    /// Freed blocks that still count.
    blocks: Vec<BlockRef>,
    /// Number of them after the last look for released ones.
    last_count: usize,
}

impl<R> Budget<R> {
    /// Limits a resource to `limit` bytes.
    pub fn new(resource: R, limit: u64) -> Self {
        Self::with_account(resource, Arc::new(BudgetAccount::new(limit)))
    }

    /// Limits a resource by an account that other budgets may share.
    ///
    /// A full budget reaps its own resource only. Bytes that another budget has retired count until
    /// that one reaps. So share an account only among resources that retire nothing, such as
    /// [`Direct`](crate::Direct), a [`Pool`](crate::Pool) and [`Physical`](crate::Physical).
    pub fn with_account(resource: R, account: Arc<BudgetAccount>) -> Self {
        Budget {
            upstream: Upstream::new(resource),
            account,
            retired: Mutex::default(),
        }
    }

    /// Returns the account, to read or to change its limit.
    pub fn account(&self) -> &Arc<BudgetAccount> {
        &self.account
    }
}

impl<R: DeviceMemoryResource> Budget<R> {
    /// Retries while a reap makes room, and once more after that, because another thread may have
    /// made room.
    fn retry_after_reap<T>(
        &self,
        attempt: impl Fn() -> Result<T, ResourceError>,
    ) -> Result<T, ResourceError> {
        loop {
            match attempt() {
                Err(error) if error.class() == ErrorClass::OutOfMemory => {}
                other => return other,
            }
            // A failed reap is not the reason for which there is no room.
            let _ = self.upstream.resource.reap_pending();
            if self.uncharge_reaped() == 0 {
                return attempt();
            }
        }
    }

    fn try_allocate(
        &self,
        layout: Layout,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Block, ResourceError> {
        let bytes = layout.size() as u64;
        self.account.charge_for(self.ordinal(), bytes)?;
        self.upstream
            .allocate(layout, stream, tag)
            .inspect_err(|_| self.account.uncharge(bytes))
    }

    /// Uncharges retired blocks that the upstream has released since, and returns their bytes.
    fn uncharge_reaped(&self) -> u64 {
        let mut retired = self.retired();
        let mut freed = 0;
        retired.blocks.retain(|block| {
            let stays = self
                .upstream
                .resource
                .is_retired(self.upstream.translate(*block));
            freed += if stays { 0 } else { block.bytes() };
            stays
        });
        retired.last_count = retired.blocks.len();
        self.account.uncharge(freed);
        freed
    }

    fn retired(&self) -> MutexGuard<'_, Retired> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retired_bytes(&self) -> u64 {
        self.retired().blocks.iter().map(BlockRef::bytes).sum()
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Budget<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.retry_after_reap(|| self.try_allocate(layout, stream, tag))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let freed = block.as_ref();
        let result = self.upstream.deallocate(block, stream);
        if matches!(result, Err(FreeError::Refused { .. })) {
            return result;
        }
        if self
            .upstream
            .resource
            .is_retired(self.upstream.translate(freed))
        {
            let mut retired = self.retired();
            retired.blocks.push(freed);
            let is_due = retired.blocks.len() >= MIN_RETIRED_CHECK.max(2 * retired.last_count);
            drop(retired);
            if is_due {
                self.uncharge_reaped();
            }
        } else {
            self.account.uncharge(freed.bytes());
        }
        result
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.account.snapshot())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let result = self.upstream.resource.reap_pending();
        let freed = self.uncharge_reaped();
        result?;
        Ok(Reaped {
            freed,
            pending: self.retired_bytes(),
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.upstream
            .resource
            .is_retired(self.upstream.translate(block))
    }

    fn kind(&self) -> &'static str {
        "budget"
    }

    forward!(identity, bytes_outstanding, uses);
}

impl<R: PhysicalMemoryResource> PhysicalMemoryResource for Budget<R> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        self.account.charge_for(self.ordinal(), bytes)?;
        self.upstream
            .create(bytes, tag)
            .inspect_err(|_| self.account.uncharge(bytes))
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let bytes = block.bytes();
        self.upstream.release(block)?;
        self.account.uncharge(bytes);
        Ok(())
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.account.snapshot())
    }

    fn kind(&self) -> &'static str {
        "budget"
    }

    forward!(physical_identity);
}
