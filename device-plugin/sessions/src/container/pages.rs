//! Creates credit pages, and reuses those of exited processes.
//!
//! A page occupies the agent's memory as long as any process keeps its descriptor, and processes
//! may keep every descriptor that they receive. So each container gets a bounded number. A reused
//! page stays within its container, which can only tamper with its own pages.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::credit_page::{CreditPage, PageError};

use super::super::MAX_PROCESSES;
use super::super::rate_limit::RateLimiter;

/// The time in which a container earns one more page, beyond an initial budget of two pages for
/// each possible process.
const PAGE_INTERVAL: Duration = Duration::from_secs(1);

/// The pages that wait for reuse at most: each costs the agent a descriptor.
const MAX_FREE_PAGES: usize = 64;

/// Creates a page with this number of accounts.
type MakePage = fn(usize) -> Result<(CreditPage, OwnedFd), PageError>;

/// The pages of one container.
#[derive(Debug)]
pub(super) struct PagePool {
    make: MakePage,
    rate_limiter: RateLimiter,
    free: Vec<Arc<OwnedFd>>,
    max_free: usize,
}

/// Why a process gets no page.
#[derive(Debug, thiserror::Error)]
pub(super) enum PageUnavailable {
    #[error("{0}")]
    Failed(#[from] PageError),
    #[error("the container has used its budget of pages")]
    TooMany,
}

impl PagePool {
    pub(super) fn new(make: MakePage) -> PagePool {
        PagePool {
            make,
            rate_limiter: RateLimiter::new(2 * MAX_PROCESSES as u32 * PAGE_INTERVAL),
            free: Vec::new(),
            max_free: MAX_FREE_PAGES,
        }
    }

    /// Limits the number of pages that wait for reuse.
    pub(super) fn set_max_free(&mut self, count: usize) {
        self.max_free = count.min(MAX_FREE_PAGES);
    }

    /// Takes a page for a process, mapped and blank.
    pub(super) fn take_page(
        &mut self,
        accounts: usize,
        now: Instant,
    ) -> Result<(CreditPage, Arc<OwnedFd>), PageUnavailable> {
        if let Some(fd) = self.free.pop() {
            return Ok((CreditPage::recycle(&fd, accounts)?, fd));
        }
        if !self.rate_limiter.try_charge(PAGE_INTERVAL, now) {
            return Err(PageUnavailable::TooMany);
        }
        let (page, fd) = (self.make)(accounts)?;
        Ok((page, Arc::new(fd)))
    }

    /// Takes back the page of an exited process.
    pub(super) fn return_page(&mut self, fd: Arc<OwnedFd>) {
        if self.free.len() < self.max_free {
            self.free.push(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_few_when_processes_keep_them() {
        let (mut pages, now) = (PagePool::new(CreditPage::create), Instant::now());
        let mut kept = Vec::new();
        while let Ok((_, fd)) = pages.take_page(1, now) {
            kept.push(fd);
        }
        assert_eq!(kept.len(), 2 * MAX_PROCESSES);
        let later = now + 3 * PAGE_INTERVAL;
        let more = (0..10)
            .filter_map(|_| pages.take_page(1, later).ok())
            .count();
        assert_eq!(more, 3);
        pages.return_page(kept.remove(0));
        assert!(
            pages.take_page(1, later).is_ok(),
            "the page of an exited process"
        );
        assert!(matches!(
            pages.take_page(1, later),
            Err(PageUnavailable::TooMany)
        ));
    }

    #[test]
    fn pages_are_reused_when_processes_exit() {
        let (mut pages, now) = (PagePool::new(CreditPage::create), Instant::now());
        for _ in 0..10 * MAX_PROCESSES {
            let (page, fd) = pages.take_page(2, now).unwrap();
            let slot = page.slot(1).unwrap();
            assert_eq!(
                (slot.word().granted, slot.quota().0, page.fence()),
                (0, 0, 0)
            );
            assert!(slot.grant(bursar_protocol::units::Units(5)));
            slot.set_quota(bursar_protocol::units::Units(7));
            page.set_fence(Some(bursar_protocol::fence::Fence::Drained));
            pages.return_page(fd);
        }
    }
}
