//! A layer that holds what is allocated through it to a limit.
//!
//! A block counts from before it is asked for until the resource under the budget has given its bytes back: a
//! free that waits for a stream, or that failed, still counts. Where there is no room the budget reaps what is
//! pending and tries again; it never waits. What came back since the last reap counts until somebody needs it.
#![forbid(unsafe_code)]

mod account;
mod reservation;

use std::alloc::Layout;
use std::sync::{Arc, Mutex, PoisonError};

pub use account::Account;
pub use reservation::Reservation;

use crate::adaptor::upstream::{Under, pass_on};
use crate::driver::Stream;
use crate::error::{ErrorClass, FreeError, ResourceError};
use crate::resource::{Block, BlockRef, BudgetSnapshot, DeviceMemoryResource, Reaped, Tag};

/// A limit over a resource.
#[derive(Debug)]
pub struct Budget<R> {
    under: Under<R>,
    account: Arc<Account>,
    /// Blocks that were freed, and that still count.
    retired: Mutex<Vec<BlockRef>>,
}

impl<R: DeviceMemoryResource> Budget<R> {
    /// A limit in bytes over a resource.
    pub fn new(resource: R, limit: u64) -> Self {
        Self::on(resource, Arc::new(Account::new(limit)))
    }

    /// As above, on an account that others may use too.
    pub fn on(resource: R, account: Arc<Account>) -> Self {
        Budget {
            under: Under::new(resource),
            account,
            retired: Mutex::default(),
        }
    }

    /// The account, to resize it or to look at it.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    fn take(&self, bytes: u64) -> Result<(), ResourceError> {
        self.account
            .take(bytes)
            .map_err(|found| self.over(bytes, found))
    }

    fn over(&self, asked: u64, BudgetSnapshot { limit, used }: BudgetSnapshot) -> ResourceError {
        ResourceError::OverBudget {
            ordinal: self.ordinal(),
            asked,
            used,
            limit,
        }
    }

    /// Tries again as long as a reap made room, and once more where it made none: somebody else's may have.
    fn reaping<T>(
        &self,
        attempt: impl Fn() -> Result<T, ResourceError>,
    ) -> Result<T, ResourceError> {
        loop {
            match attempt() {
                Err(error) if error.class() == ErrorClass::OutOfMemory => {}
                other => return other,
            }
            // What the reap failed with, if it did, is not why there is no room.
            let _ = self.under.resource.reap_pending();
            if self.settle() == 0 {
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
        self.take(bytes)?;
        self.under
            .allocate(layout, stream, tag)
            .inspect_err(|_| self.account.give_back(bytes))
    }

    /// Lets what the resource under it has given back count no more.
    fn settle(&self) -> u64 {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let mut freed = 0;
        retired.retain(|block| {
            let stays = self.under.resource.is_retired(self.under.below(*block));
            freed += if stays { 0 } else { block.bytes() };
            stays
        });
        self.account.give_back(freed);
        freed
    }

    fn pending(&self) -> u64 {
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.iter().map(BlockRef::bytes).sum()
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Budget<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.reaping(|| self.try_allocate(layout, stream, tag))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let gone = block.as_ref();
        let answer = self.under.deallocate(block, stream);
        if matches!(answer, Err(FreeError::Refused { .. })) {
            return answer;
        }
        if self.under.resource.is_retired(self.under.below(gone)) {
            let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
            retired.push(gone);
        } else {
            self.account.give_back(gone.bytes());
        }
        answer
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.account.snapshot())
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let answer = self.under.resource.reap_pending();
        let freed = self.settle();
        answer?;
        Ok(Reaped {
            freed,
            pending: self.pending(),
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.under.resource.is_retired(self.under.below(block))
    }

    fn kind(&self) -> &'static str {
        "budget"
    }

    pass_on!(identity, bytes_outstanding, uses);
}
