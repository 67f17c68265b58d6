//! Lists the pools of this process.

use std::ffi::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use bursar_protocol::units::Units;

use super::Pool;
use super::prefetch::PrefetchedCredit;
use crate::deferred_free;
use crate::driver_calls::{captures, driver};
use crate::fork_local::ForkLocal;
use crate::location::ChargeTo;
use crate::session_state::MAX_DEVICES;

/// All pools that this process has used or created.
pub(crate) struct Pools {
    head: AtomicPtr<Pool>,
    /// The pool that each device allocates from; null where the driver must be asked.
    current: [AtomicPtr<Pool>; MAX_DEVICES],
    /// Held by the thread that reconciles or registers pools.
    pub(super) lock: ForkLocal<()>,
}

/// The pools of this process.
pub(crate) static POOLS: Pools = Pools {
    head: AtomicPtr::new(std::ptr::null_mut()),
    current: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_DEVICES],
    lock: ForkLocal::new(),
};

/// Forgets the parent's pools, in a forked child.
pub(crate) fn reset() {
    POOLS.reset();
}

/// Trims and reconciles every pool of this process. Returns whether that discharged anything.
pub(crate) fn reclaim() -> bool {
    POOLS.reclaim()
}

impl Pools {
    /// Forgets the parent's pools, in a forked child.
    fn reset(&self) {
        self.head.store(std::ptr::null_mut(), Ordering::Release);
        for current in &self.current {
            current.store(std::ptr::null_mut(), Ordering::Release);
        }
        self.lock.reset();
    }

    fn all(&self) -> impl Iterator<Item = &'static Pool> {
        let last = self.head.load(Ordering::Acquire).cast_const();
        // SAFETY: entries are leaked, and change through atomics only.
        std::iter::successors(unsafe { last.as_ref() }, |pool| unsafe {
            pool.next.as_ref()
        })
    }

    /// Finds the pool with a handle. A null handle is no pool's.
    pub(crate) fn find(&self, handle: u64) -> Option<&'static Pool> {
        self.all()
            .find(|pool| pool.handle.load(Ordering::Acquire) == handle)
            .filter(|_| handle != 0)
    }

    /// Returns the pool with a handle, and registers it where it is new.
    pub(crate) fn register(&self, handle: u64, charge_to: ChargeTo) -> &'static Pool {
        if let Some(known) = self.find(handle) {
            return known;
        }
        let guard = self.lock.lock();
        match self.find(handle) {
            Some(known) => known,
            None => self.insert(handle, charge_to, &guard),
        }
    }

    fn insert(
        &self,
        handle: u64,
        charge_to: ChargeTo,
        _lock: &MutexGuard<'_, ()>,
    ) -> &'static Pool {
        let is_free =
            |pool: &&Pool| pool.handle.load(Ordering::Acquire) == 0 && pool.charge_to == charge_to;
        if let Some(free) = self.all().find(is_free) {
            free.destroyed.store(false, Ordering::Release);
            free.handle.store(handle, Ordering::Release);
            return free;
        }
        let entry = Box::leak(Box::new(Pool {
            handle: AtomicU64::new(handle),
            charge_to,
            account: AtomicU8::new(0),
            accounted: AtomicU32::new(0),
            prefetched: PrefetchedCredit::default(),
            exported: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            next: self.head.load(Ordering::Acquire),
        }));
        self.head.store(entry, Ordering::Release);
        entry
    }

    /// Registers a pool that was just created. A registered pool with the same handle was destroyed
    /// unseen.
    pub(crate) fn created(&self, handle: u64, charge_to: ChargeTo) {
        let guard = self.lock.lock();
        if let Some(before) = self.find(handle) {
            before.unregister(&guard);
        }
        self.insert(handle, charge_to, &guard);
    }

    /// Returns the pool that a device allocates from, if the shim knows it without asking the
    /// driver.
    #[inline]
    pub(crate) fn current_pool(&self, device: c_int) -> Option<&'static Pool> {
        let place = self.current.get(usize::try_from(device).ok()?)?;
        // SAFETY: null or a leaked entry.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    }

    /// Sets the pool that a device allocates from. Without a pool the driver is asked next time.
    pub(crate) fn set_current_pool(&self, device: c_int, pool: Option<&'static Pool>) {
        let place = usize::try_from(device)
            .ok()
            .and_then(|device| self.current.get(device));
        if let Some(place) = place {
            let pool = pool.map_or(std::ptr::null(), std::ptr::from_ref);
            place.store(pool.cast_mut(), Ordering::Release);
        }
    }

    /// Reconciles every pool, so that memory returned at synchronizes is no longer charged.
    pub(crate) fn reconcile(&self) {
        // Collected before the pools are reconciled, because collecting synchronizes.
        deferred_free::collect();
        if self.all().next().is_some() {
            self.reconcile_all(&self.lock.lock());
        }
    }

    /// Trims and reconciles every pool. Returns whether that discharged anything.
    fn reclaim(&self) -> bool {
        let collected = deferred_free::collect();
        if self.all().next().is_none() {
            return collected;
        }
        let guard = self.lock.lock();
        let before = self.accounted();
        self.trim_all();
        self.reconcile_all(&guard);
        collected || self.accounted() < before
    }

    /// Reclaims the memory of pools and graphs. Where pools have unused memory, waits for all work
    /// and reclaims again. Runs without the lock: graphs may take it, and the work may wait for
    /// another thread.
    pub(super) fn reclaim_after_sync(&self) {
        crate::graphs::reclaim();
        self.reclaim();
        if self.may_free_after_sync() && !captures::may_be_active() {
            let _ = driver!(cuCtxSynchronize());
            self.reclaim();
        }
    }

    /// Returns whether any pool has a step that is not used, or linear memory waits for its stream.
    pub(crate) fn may_free_after_sync(&self) -> bool {
        let _guard = self.lock.lock();
        self.all().any(Pool::has_unused_step) || deferred_free::has_pending()
    }

    fn accounted(&self) -> u64 {
        let accounted = |pool: &Pool| u64::from(pool.accounted.load(Ordering::Acquire));
        self.all().map(accounted).sum()
    }

    fn trim_all(&self) {
        for pool in self.all() {
            pool.trim();
        }
    }

    fn reconcile_all(&self, lock: &MutexGuard<'_, ()>) {
        for pool in self.all() {
            let _ = pool.reconcile(Units::ZERO);
            pool.destroy_if_empty(lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RECONCILING;
    use super::*;

    #[test]
    fn created_pool_waits_until_its_handle_is_reconciled() {
        let pools: &Pools = Box::leak(Box::new(Pools {
            head: AtomicPtr::default(),
            current: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_DEVICES],
            lock: ForkLocal::new(),
        }));
        let pool = pools.register(1, ChargeTo::Host);
        let reconcile = || {
            let _guard = pools.lock.lock();
            pool.accounted.store(RECONCILING, Ordering::Release);
            std::thread::yield_now();
            pool.accounted.swap(0, Ordering::AcqRel)
        };
        std::thread::scope(|scope| {
            let creating = scope.spawn(|| {
                for _ in 0..10_000 {
                    pools.created(1, ChargeTo::Host);
                }
            });
            while !creating.is_finished() {
                assert_eq!(reconcile(), RECONCILING);
            }
        });
    }
}
