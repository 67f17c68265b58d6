//! Creates credit pages, and reuses those of exited processes.
//!
//! A page occupies the agent's memory as long as any process keeps its descriptor, and processes
//! may keep every descriptor that they receive. So the agent keeps the page of an exited process
//! for the next one, and a container never has more than [`MAX_PAGES`]. A reused page stays within
//! its container, which can only tamper with its own pages.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::credit_page::{CreditPage, PageError};

use super::super::MAX_PROCESSES;
use super::super::rate_limit::RateLimiter;

/// The most pages of a container: two for each possible process, its page and the former one. The
/// third page of a process that has abandoned hellos counts among them.
const MAX_PAGES: u32 = 2 * MAX_PROCESSES as u32;

/// The time for which a page counts that the agent could not keep for reuse. The agent cannot tell
/// whether a process still holds it.
const PAGE_INTERVAL: Duration = Duration::from_secs(1);

/// Creates a page with this number of accounts.
type MakePage = fn(usize) -> Result<(CreditPage, OwnedFd), PageError>;

/// The pages of one container.
#[derive(Debug)]
pub(crate) struct PagePool {
    make: MakePage,
    /// The pages of processes, and those that wait for reuse.
    count: u32,
    free: Vec<Arc<OwnedFd>>,
    /// The pages that may wait for reuse at most: each costs the agent a descriptor.
    max_free: usize,
    /// The pages that the agent did not keep, as a debt of time.
    dropped: RateLimiter,
}

/// Why a process gets no page.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PageUnavailable {
    #[error("{0}")]
    Failed(#[from] PageError),
    #[error("the container has used its budget of pages")]
    TooMany,
}

impl PagePool {
    pub(super) fn new(make: MakePage) -> PagePool {
        PagePool {
            make,
            count: 0,
            free: Vec::new(),
            max_free: MAX_PAGES as usize,
            dropped: RateLimiter::new(MAX_PAGES * PAGE_INTERVAL),
        }
    }

    /// Limits the number of pages that wait for reuse.
    pub(crate) fn set_max_free(&mut self, count: usize) {
        self.max_free = count.min(MAX_PAGES as usize);
    }

    /// Takes a page for a process, mapped and blank.
    pub(super) fn take_page(
        &mut self,
        accounts: usize,
        now: Instant,
    ) -> Result<(CreditPage, Arc<OwnedFd>), PageUnavailable> {
        if let Some(fd) = self.free.pop() {
            let page = CreditPage::recycle(&fd, accounts);
            return Ok((page.inspect_err(|_| self.drop_page(now))?, fd));
        }
        let mut all = self.dropped;
        if !all.try_charge(PAGE_INTERVAL * (self.count + 1), now) {
            return Err(PageUnavailable::TooMany);
        }
        let (page, fd) = (self.make)(accounts)?;
        self.count += 1;
        Ok((page, Arc::new(fd)))
    }

    /// Takes back a page whose process image has ended.
    pub(super) fn return_page(&mut self, fd: Arc<OwnedFd>, now: Instant) {
        match self.free.len() < self.max_free {
            true => self.free.push(fd),
            false => self.drop_page(now),
        }
    }

    fn drop_page(&mut self, now: Instant) {
        self.count -= 1;
        self.dropped.charge(PAGE_INTERVAL, now);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The descriptors that hostile processes keep, by the page's inode.
    type Kept = BTreeMap<u64, Arc<OwnedFd>>;

    /// Lets as many processes as possible exit at once, after each has given its page away.
    fn hoard(pages: &mut PagePool, kept: &mut Kept, now: Instant) {
        let processes: Vec<_> = (0..MAX_PROCESSES)
            .map_while(|_| pages.take_page(1, now).ok())
            .collect();
        for (_, fd) in processes {
            let inode = rustix::fs::fstat(&fd).unwrap().st_ino;
            kept.insert(inode, Arc::clone(&fd));
            pages.return_page(fd, now);
        }
    }

    #[test]
    fn pages_stay_bounded_however_long_they_are_kept() {
        let (mut pages, start) = (PagePool::new(CreditPage::create), Instant::now());
        let mut kept = Kept::new();
        for hour in 0..24_u32 {
            hoard(&mut pages, &mut kept, start + hour * 3600 * PAGE_INTERVAL);
        }
        assert_eq!(kept.len(), MAX_PROCESSES);
        // Processes that live on return nothing.
        let later = start + 30 * 3600 * PAGE_INTERVAL;
        while let Ok((_, fd)) = pages.take_page(1, later) {
            kept.insert(rustix::fs::fstat(&fd).unwrap().st_ino, fd);
        }
        assert_eq!(kept.len(), MAX_PAGES as usize);
        let refused = pages.take_page(1, later + 3600 * PAGE_INTERVAL);
        assert!(matches!(refused, Err(PageUnavailable::TooMany)));
    }

    #[test]
    fn dropped_pages_are_replaced_at_one_a_second() {
        let (mut pages, now) = (PagePool::new(CreditPage::create), Instant::now());
        pages.set_max_free(0);
        let mut kept = Kept::new();
        while kept.len() < MAX_PAGES as usize {
            hoard(&mut pages, &mut kept, now);
        }
        assert!(pages.take_page(1, now).is_err());
        hoard(&mut pages, &mut kept, now + 3 * PAGE_INTERVAL);
        assert_eq!(kept.len(), MAX_PAGES as usize + 3);
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
            pages.return_page(fd, now);
        }
    }
}
