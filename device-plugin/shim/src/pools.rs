//! Stream-ordered pools: what each has taken of the GPU, and what its account was charged for that.
//!
//! A pool takes memory in steps and caches it, so it is charged what it has reserved (design F15):
//!
//! ```text
//! reserved by the pool  <=  accounted + reservations of the calls under way
//! ```
//!
//! *Ahead*: where the quota has plenty of room and nobody to share it with, a pool is charged for several
//! steps at once, and each allocation takes its part of them ([`part_of`]). Nothing else is looked at
//! before they are used up.
//! *Fast*: one compare-and-swap reserves credit for the request rounded up to the step (it never took more:
//! measured), the driver allocates, and where it now has reserved what is accounted, another one gives the
//! reservation back.
//! Otherwise the pool is *settled* under the lock: `accounted` becomes what is reserved. Only the lock's
//! holder changes it, and marks it while it asks the driver: whoever compared with it before had the
//! driver's growth done before the driver was asked.
//! *Tight*: where that much credit is not idle, the lock is taken, and credit for what the pool must
//! grow by is asked for. A pool that grew by more, which is then denied, is undone. Then every pool is
//! trimmed and settled, once more with all work waited for; and only then it is out of memory.
//!
//! Pools shrink by themselves at synchronises. That is noticed when they are looked at next.

mod prefetch;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use bursar_protocol::units::{UNIT, Units};
use prefetch::PrefetchedCredit;

use crate::accounting::{self, Denied};
use crate::alloc_table::{Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::deferred_free;
use crate::fork_local::ForkLocal;
use crate::hooks::{captures, driver};
use crate::location::ChargeTo;
use crate::session_state::MAX_DEVICES;

/// A pool takes memory of its GPU in multiples of this (design F15).
const STEP: u64 = 32 << 20;
const HALF_STEP: u64 = STEP / 2;

/// How many times what is asked for the quota has room for, where that is plenty.
const AMPLE_FACTOR: u32 = 4;

/// What a pool is charged ahead, of which allocations take their parts.
const PREFETCH: Units = Units(8 * ONE_STEP.0);

/// What must be free for that: it is never more than an eighth.
const MIN_GRANTABLE_FOR_PREFETCH: Units = Units(8 * PREFETCH.0);

const ONE_STEP: Units = Units((STEP / UNIT) as u32);

/// The least that a small request takes of what was charged ahead.
const MIN_PART: u64 = 2 << 20;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const ATTR_RELEASE_THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const ATTR_RESERVED: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const ATTR_USED: c_int = 7;

/// Marks a pool that is being settled: no pool has reserved that much.
const RECONCILING: u32 = u32::MAX;

/// A pool of this process.
#[derive(Debug)]
pub(crate) struct Pool {
    /// The driver's handle; zero once it is destroyed, and the entry is free for another.
    handle: AtomicU64,
    charge_to: ChargeTo,
    /// The account, plus one; zero before it is known.
    account: AtomicU8,
    /// Units that the account is charged, with those ahead.
    accounted: AtomicU32,
    prefetched: PrefetchedCredit,
    /// Others can hold its memory, so nothing that it ever reserved is given back.
    exported: AtomicBool,
    /// The program destroyed it, and it still has memory: it is destroyed when that is free.
    destroyed: AtomicBool,
    /// The pool that was entered before; null for the first.
    next: *const Pool,
}

/// All pools that this process has used or made.
pub(crate) struct Pools {
    head: AtomicPtr<Pool>,
    /// The pool that each device allocates from; null where the driver has to be asked.
    current: [AtomicPtr<Pool>; MAX_DEVICES],
    /// Held by whoever settles or enters pools.
    lock: ForkLocal<()>,
}

/// The pools of this process.
pub(crate) static POOLS: Pools = Pools {
    head: AtomicPtr::new(std::ptr::null_mut()),
    current: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_DEVICES],
    lock: ForkLocal::new(),
};

impl Pools {
    /// In a forked child: it has none of its parent's pools.
    pub(crate) fn reset(&self) {
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

    /// The pool with a handle: a null one is no pool's.
    pub(crate) fn find(&self, handle: u64) -> Option<&'static Pool> {
        self.all()
            .find(|pool| pool.handle.load(Ordering::Acquire) == handle)
            .filter(|_| handle != 0)
    }

    /// The pool with a handle, entered where it is new.
    pub(crate) fn register(&self, handle: u64, charge_to: ChargeTo) -> &'static Pool {
        if let Some(known) = self.find(handle) {
            return known;
        }
        let _guard = self.lock.lock();
        if let Some(known) = self.find(handle) {
            return known;
        }
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

    /// Enters a pool that was just made. One that had its handle is gone, whoever destroyed it.
    pub(crate) fn created(&self, handle: u64, charge_to: ChargeTo) {
        if let Some(before) = self.find(handle) {
            before.unregister();
        }
        self.register(handle, charge_to);
    }

    /// The pool that a device allocates from, if it is known without asking the driver.
    #[inline]
    pub(crate) fn current_pool(&self, device: c_int) -> Option<&'static Pool> {
        let place = self.current.get(usize::try_from(device).ok()?)?;
        // SAFETY: null or a leaked entry.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    }

    /// Notes the pool that a device allocates from; with none, the driver is asked next time.
    pub(crate) fn set_current_pool(&self, device: c_int, pool: Option<&'static Pool>) {
        let place = usize::try_from(device)
            .ok()
            .and_then(|device| self.current.get(device));
        if let Some(place) = place {
            let pool = pool.map_or(std::ptr::null(), std::ptr::from_ref);
            place.store(pool.cast_mut(), Ordering::Release);
        }
    }

    /// Settles every pool: what they gave back at synchronises is no longer charged.
    pub(crate) fn reconcile(&self) {
        // First, for it synchronises.
        deferred_free::collect();
        if self.all().next().is_some() {
            let _guard = self.lock.lock();
            self.reconcile_all();
        }
    }

    /// Trims and settles every pool; whether that gave anything back.
    pub(crate) fn reclaim(&self) -> bool {
        let collected = deferred_free::collect();
        if self.all().next().is_none() {
            return collected;
        }
        let _guard = self.lock.lock();
        let before = self.accounted();
        self.trim_all();
        self.reconcile_all();
        collected || self.accounted() < before
    }

    /// As [`Pools::reclaim`], for graphs too, and where pools wait to see memory freed, waits for all work with them.
    /// Without the lock: graphs may take it too, and the work may be waiting for another thread of the program.
    fn reclaim_after_sync(&self) {
        crate::graphs::reclaim();
        self.reclaim();
        if (self.has_unused_memory() || deferred_free::has_pending()) && !captures::may_be_active()
        {
            let _ = driver!(cuCtxSynchronize());
            self.reclaim();
        }
    }

    /// Whether any pool waits to see memory freed.
    fn has_unused_memory(&self) -> bool {
        let _guard = self.lock.lock();
        self.all().any(Pool::has_unused_step)
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

    /// With the lock held.
    fn reconcile_all(&self) {
        for pool in self.all() {
            let _ = pool.reconcile(Units::ZERO);
            pool.destroy_if_empty();
        }
    }
}

impl Pool {
    /// Whether it was destroyed as far as the program knows.
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Whether some account pays for it.
    pub(crate) fn is_charged(&self) -> bool {
        self.charge_to != ChargeTo::Host
    }

    /// Allocates of what the pool was charged ahead; `None` where that is used up. `call` is the driver's
    /// allocation.
    #[inline]
    pub(crate) fn allocate_prefetched(
        &self,
        bytes: u64,
        call: impl FnOnce() -> Result<u64, CuResult>,
    ) -> Option<Result<u64, CuResult>> {
        let part = prefetch_part(bytes).filter(|part| self.prefetched.reserve(*part))?;
        let got = call();
        self.prefetched.finish(part);
        Some(got)
    }

    /// Allocates, charged for what the pool grows by. `call` is the driver's allocation.
    pub(crate) fn allocate(
        &self,
        bytes: u64,
        function: &str,
        call: impl Fn() -> Result<u64, CuResult>,
    ) -> Result<u64, CuResult> {
        let Some(account) = self.account() else {
            return Err(curesult::OUT_OF_MEMORY);
        };
        let Some(steps) = steps_for(bytes) else {
            accounting::report_denial(account, bytes, function);
            return Err(curesult::OUT_OF_MEMORY);
        };
        if self.prefetch(account, steps)
            && let Some(got) = self.allocate_prefetched(bytes, &call)
        {
            return got;
        }
        if !accounting::try_charge(account, steps) {
            return self.allocate_at_limit(account, bytes, steps, function, call);
        }
        let got = call();
        // What was charged ahead is nobody's from here on, or it could be used beside what is given back.
        // The driver's own locks are between its growth and the last load.
        let idle = self.prefetched.close() == Units::ZERO;
        if idle && self.reserved() == Some(self.accounted.load(Ordering::SeqCst)) {
            accounting::discharge_account(account, steps);
        } else {
            let _guard = POOLS.lock.lock();
            // What is more than was reserved here is of calls that are still under way, and is theirs.
            let _ = self.reconcile(steps);
        }
        got
    }

    /// Charges it ahead for a call that takes `steps` at most, and more of them, where the quota has plenty
    /// of room and nobody else could miss it.
    fn prefetch(&self, account: u8, steps: Units) -> bool {
        let has_room = accounting::grantable(account) >= MIN_GRANTABLE_FOR_PREFETCH;
        if steps >= PREFETCH || !has_room || !accounting::is_sole_process(account) {
            return false;
        }
        let _guard = POOLS.lock.lock();
        if self.exported.load(Ordering::Acquire) {
            return false;
        }
        let is_charged = self.reconcile_with_extra(Units::ZERO, PREFETCH).is_ok();
        if is_charged {
            self.prefetched.open(PREFETCH.saturating_sub(ONE_STEP));
        }
        is_charged
    }

    /// As above, where there is no idle credit for a step.
    #[cold]
    #[inline(never)]
    fn allocate_at_limit(
        &self,
        account: u8,
        bytes: u64,
        step: Units,
        function: &str,
        call: impl Fn() -> Result<u64, CuResult>,
    ) -> Result<u64, CuResult> {
        for last in [false, true] {
            let settling = POOLS.lock.lock();
            let _ = self.reconcile(Units::ZERO);
            let growth = self.growth(bytes).ok_or(curesult::OUT_OF_MEMORY)?;
            if let Some(charged) = charge_growth(account, growth, step) {
                match call() {
                    Ok(pointer) if self.reconcile(charged).is_ok() => return Ok(pointer),
                    Ok(pointer) => self.rollback(pointer),
                    Err(code) => {
                        let _ = self.reconcile(charged);
                        if code != curesult::OUT_OF_MEMORY || last {
                            return Err(code);
                        }
                    }
                }
            }
            drop(settling);
            if !last {
                POOLS.reclaim_after_sync();
            }
        }
        accounting::report_denial(account, bytes, function);
        Err(curesult::OUT_OF_MEMORY)
    }

    /// Gives back an allocation that made the pool grow further than it may. It was never handed out,
    /// so that nothing has to be waited for.
    fn rollback(&self, pointer: u64) {
        let _ = captures::with_relaxed_capture(|| driver!(cuMemFree_v2(pointer => u64)));
        self.trim();
        let _ = self.reconcile(Units::ZERO);
    }

    /// With the lock held: makes what is accounted what is reserved, using up `held` units that the
    /// account was charged before. `Err` if the pool has grown by more and that is denied; then all of
    /// `held` is accounted, and the next settling tries again.
    fn reconcile(&self, precharged: Units) -> Result<(), Denied> {
        self.reconcile_with_extra(precharged, Units::ZERO)
    }

    /// As above, but makes it what is reserved and `more`.
    fn reconcile_with_extra(&self, precharged: Units, extra: Units) -> Result<(), Denied> {
        let before = self.accounted.swap(RECONCILING, Ordering::SeqCst);
        // Before the driver is asked: what ends later has grown the pool by then, or is counted here.
        let under_way = match self.prefetched.close() {
            Units::ZERO => Units::ZERO,
            parts => parts.saturating_add(ONE_STEP),
        };
        let beyond = under_way.saturating_add(extra);
        let reserved = self.reserved().unwrap_or(before);
        let reserved = reserved.saturating_add(beyond.0);
        let target = if self.exported.load(Ordering::Acquire) {
            reserved.max(before)
        } else {
            reserved
        };
        let charged = before.saturating_add(precharged.0);
        let (after, settled) = match self.account() {
            _ if target == charged => (target, Ok(())),
            None => (before, Err(Denied)),
            Some(account) if target < charged => {
                accounting::discharge_account(account, Units(charged - target));
                (target, Ok(()))
            }
            Some(account) => match accounting::charge_account(account, Units(target - charged)) {
                Ok(()) => (target, Ok(())),
                Err(denied) => (charged, Err(denied)),
            },
        };
        if self.exported.load(Ordering::Acquire)
            && let Some(more) = after
                .checked_sub(before)
                .and_then(|more| self.exported_charge(more))
        {
            let _ = accounting::mark_exported(more);
        }
        self.accounted.store(after, Ordering::SeqCst);
        settled
    }

    /// Settles after a call that may have made it smaller.
    pub(crate) fn reconcile_now(&self) {
        let _guard = POOLS.lock.lock();
        let _ = self.reconcile(Units::ZERO);
    }

    /// Calls what lets others hold its memory, counted as exported before.
    pub(crate) fn with_export(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let _guard = POOLS.lock.lock();
        if !self.is_charged() || self.exported.load(Ordering::Acquire) {
            return call();
        }
        // What it was charged ahead, nobody can hold.
        let _ = self.reconcile(Units::ZERO);
        let Some(charge) = self.exported_charge(self.accounted.load(Ordering::Acquire)) else {
            return curesult::NOT_PERMITTED;
        };
        if accounting::mark_exported(charge).is_err() {
            return curesult::NOT_PERMITTED;
        }
        let answer = call();
        if answer == curesult::SUCCESS {
            self.exported.store(true, Ordering::Release);
        } else {
            accounting::unmark_exported(charge);
        }
        answer
    }

    /// Some of what it is charged, as the ledger counts exports.
    fn exported_charge(&self, units: u32) -> Option<Charge> {
        self.account().map(|slot| Charge {
            account: slot,
            units,
            context: 0,
            share: ShareState::Descriptor,
        })
    }

    /// Destroys it, or where it still has memory, as soon as that is free. `call` is the driver's.
    pub(crate) fn destroy(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let _guard = POOLS.lock.lock();
        self.trim();
        let _ = self.reconcile(Units::ZERO);
        let at_once = !self.is_charged() || self.exported.load(Ordering::Acquire);
        if at_once || self.reserved() == Some(0) {
            let answer = call();
            if answer == curesult::SUCCESS {
                self.unregister();
            }
            return answer;
        }
        // As the driver does at once: what is freed from here on is not cached.
        let mut nothing = 0_u64;
        let handle = self.handle.load(Ordering::Acquire);
        let _ = captures::with_relaxed_capture(|| {
            driver!(cuMemPoolSetAttribute(
                handle => u64, ATTR_RELEASE_THRESHOLD => c_int, (&raw mut nothing).cast() => *mut c_void,
            ))
        });
        self.destroyed.store(true, Ordering::Release);
        curesult::SUCCESS
    }

    /// With the lock held, and after settling.
    fn destroy_if_empty(&self) {
        if !self.is_destroyed() || self.reserved() != Some(0) {
            return;
        }
        let handle = self.handle.load(Ordering::Acquire);
        if captures::with_relaxed_capture(|| driver!(cuMemPoolDestroy(handle => u64)))
            == curesult::SUCCESS
        {
            self.unregister();
        }
    }

    /// The pool is gone. What was exported of it stays charged.
    fn unregister(&self) {
        self.prefetched.close();
        let kept = self.accounted.swap(0, Ordering::AcqRel);
        let exported = self.exported.swap(false, Ordering::AcqRel);
        if let (false, Some(account)) = (exported, self.account()) {
            accounting::discharge_account(account, Units(kept));
        }
        self.handle.store(0, Ordering::Release);
    }

    fn trim(&self) {
        let handle = self.handle.load(Ordering::Acquire);
        if handle != 0 && self.is_charged() {
            let _ = captures::with_relaxed_capture(
                || driver!(cuMemPoolTrimTo(handle => u64, 0 => usize)),
            );
        }
    }

    /// Whether it has a step or more that is neither used nor could be trimmed.
    fn has_unused_step(&self) -> bool {
        let sizes = self.attribute(ATTR_RESERVED).zip(self.attribute(ATTR_USED));
        sizes.is_some_and(|(reserved, used)| reserved >= used.saturating_add(STEP))
    }

    /// What the pool must grow by for a request, if it can use all that it has cached.
    fn growth(&self, bytes: u64) -> Option<Units> {
        let (reserved, used) = (self.attribute(ATTR_RESERVED)?, self.attribute(ATTR_USED)?);
        let needed = used.checked_add(bytes)?.checked_next_multiple_of(STEP)?;
        Units::holding(needed.saturating_sub(reserved))
    }

    fn reserved(&self) -> Option<u32> {
        Units::holding(self.attribute(ATTR_RESERVED)?).map(|units| units.0)
    }

    fn attribute(&self, attribute: c_int) -> Option<u64> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle == 0 || !self.is_charged() {
            return None;
        }
        let mut value = 0_u64;
        let code = captures::with_relaxed_capture(|| {
            driver!(cuMemPoolGetAttribute(
                handle => u64, attribute => c_int, (&raw mut value).cast() => *mut c_void,
            ))
        });
        (code == curesult::SUCCESS).then_some(value)
    }

    /// The account that pays, once there is a session.
    fn account(&self) -> Option<u8> {
        let known = self.account.load(Ordering::Acquire);
        if let Some(account) = known.checked_sub(1) {
            return Some(account);
        }
        let ChargeTo::Account(account) = self.charge_to else {
            return None;
        };
        let found = accounting::account_index(account)?;
        self.account.store(found + 1, Ordering::Release);
        Some(found)
    }
}

/// The most that a pool takes of its GPU for a request; `None` if that is more than can be counted.
#[inline]
fn steps_for(bytes: u64) -> Option<Units> {
    bytes
        .checked_next_multiple_of(STEP)
        .and_then(Units::holding)
}

/// The part of what was charged ahead that a request takes. Several requests make a pool grow by no more than
/// their parts and one step: a request takes unused memory if it takes none that was freed, a step is
/// added when no other has room for it, and so of two neighbouring steps one is half used at least.
#[inline]
fn prefetch_part(bytes: u64) -> Option<Units> {
    match bytes {
        0..=HALF_STEP => Units::holding((2 * bytes).max(MIN_PART)),
        _ => steps_for(bytes),
    }
}

/// Charges an account for what a pool must grow by; how much it was. Where the quota has plenty of room,
/// it is more, so that the next calls find idle credit; near the quota it would be in others' way.
fn charge_growth(account: u8, growth: Units, step: Units) -> Option<Units> {
    let more = growth.saturating_add(step);
    let plenty = Units(more.0.saturating_mul(AMPLE_FACTOR)).min(Units::MAX);
    if accounting::grantable(account) >= plenty && accounting::charge_account(account, more).is_ok()
    {
        return Some(more);
    }
    accounting::charge_account(account, growth)
        .is_ok()
        .then_some(growth)
}
