//! Charges stream-ordered pools for the memory that each has reserved of its GPU.
//!
//! A pool takes memory in steps and caches it, so its account is charged what the pool has reserved
//! (fact F15):
//!
//! ```text
//! reserved by the pool  <=  accounted + reservations of running calls
//! ```
//!
//! * *Prefetched*: where the quota has ample room and no other process uses it, a pool is charged
//!   several steps at once. Each allocation takes its part of them ([`prefetch_part`]), and looks
//!   at nothing else until they are used up.
//! * *Fast*: one compare-and-swap reserves credit for the request rounded up to the step; measured,
//!   a pool never took more. The driver allocates. Where the pool has reserved what is accounted, a
//!   second one returns the reservation.
//! * *Reconciled*: otherwise `accounted` becomes what the pool has reserved, under the lock. Only
//!   the holder of the lock changes `accounted`, and marks it while the driver is queried. So a
//!   thread that compared with the old value saw its own growth before the query.
//! * *At the limit*: without idle credit for a step, the call takes the lock and requests credit
//!   for what the pool must grow by. Growth beyond that, which is then denied, is rolled back.
//!   Every pool is then trimmed and reconciled, a second time after all work has ended. Only then
//!   the call fails.
//!
//! Pools shrink by themselves when the host synchronizes. The next reconciliation discharges that.

mod prefetch;
mod registry;

use std::ffi::{c_int, c_void};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::accounting::{self, Denied};
use crate::alloc_table::{Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, driver};
use crate::eviction;
use crate::location::ChargeTo;
use bursar_protocol::units::{UNIT, Units};
use prefetch::PrefetchedCredit;

pub(crate) use registry::{POOLS, reclaim, reset};

/// A pool takes memory of its GPU in multiples of this (fact F15).
const STEP: u64 = 32 << 20;
const HALF_STEP: u64 = STEP / 2;

/// The quota has ample room if it can grant this many times the request.
const AMPLE_FACTOR: u32 = 4;

/// The credit that a pool is charged ahead of its allocations.
const PREFETCH: Units = Units(8 * ONE_STEP.0);

/// The credit that the quota must be able to grant before a pool prefetches: at most an eighth is
/// prefetched.
const MIN_GRANTABLE_FOR_PREFETCH: Units = Units(8 * PREFETCH.0);

const ONE_STEP: Units = Units((STEP / UNIT) as u32);

/// The least that a small request takes of prefetched credit.
const MIN_PART: u64 = 2 << 20;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const ATTR_RELEASE_THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const ATTR_RESERVED: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const ATTR_USED: c_int = 7;

/// Marks a pool that is being reconciled. No pool reserves that much.
const RECONCILING: u32 = u32::MAX;

/// A pool of this process.
#[derive(Debug)]
pub(crate) struct Pool {
    /// The driver's handle; zero once the pool is destroyed, and the entry can be reused.
    handle: AtomicU64,
    charge_to: ChargeTo,
    /// The account's index plus one; zero before it is known.
    account: AtomicU8,
    /// Units that the account is charged, prefetched credit included.
    accounted: AtomicU32,
    prefetched: PrefetchedCredit,
    /// Other processes can hold the pool's memory, so nothing that the pool ever reserved is
    /// discharged.
    exported: AtomicBool,
    /// The program destroyed the pool while it had memory. The shim destroys it once that is free.
    destroyed: AtomicBool,
    /// The pool that was registered before; null for the first.
    next: *const Pool,
}

impl Pool {
    /// Returns whether the program has destroyed the pool.
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Returns whether an account pays for the pool.
    pub(crate) fn is_charged(&self) -> bool {
        self.charge_to != ChargeTo::Host
    }

    /// Allocates from prefetched credit, or returns `None` where that is used up. `call` is the
    /// driver's allocation.
    #[inline]
    pub(crate) fn allocate_prefetched(
        &self,
        bytes: u64,
        function: &str,
        call: impl Fn() -> Result<u64, CuResult>,
    ) -> Option<Result<u64, CuResult>> {
        let part = prefetch_part(bytes).filter(|part| self.prefetched.reserve(*part))?;
        let result = match call() {
            Err(curesult::OUT_OF_MEMORY) => self.retry(bytes, function, call),
            result => result,
        };
        self.prefetched.finish(part);
        Some(result)
    }

    /// Allocates and charges what the pool grows by. `call` is the driver's allocation.
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
            && let Some(result) = self.allocate_prefetched(bytes, function, &call)
        {
            return result;
        }
        if !accounting::try_charge(account, steps) {
            return self.allocate_at_limit(account, bytes, steps, function, call);
        }
        let result = match call() {
            Err(curesult::OUT_OF_MEMORY) => self.retry(bytes, function, call),
            result => result,
        };
        // Closed before the comparison, because prefetched credit must not be used beside the
        // reservation that is returned. The driver's own locks order its growth before the last
        // load.
        let idle = self.prefetched.close() == Units::ZERO;
        let reserved = || captures::with_relaxed_capture_if_active(|| self.query(ATTR_RESERVED));
        if idle && reserved().and_then(units) == Some(self.accounted.load(Ordering::SeqCst)) {
            accounting::discharge_account(account, steps);
        } else {
            let _guard = POOLS.lock.lock();
            // Memory that the driver reserved beyond this call belongs to other running calls.
            let _ = self.reconcile(steps);
        }
        result
    }

    /// Tries an allocation again that the driver refused. The caller does not hold the lock.
    fn retry<T>(
        &self,
        bytes: u64,
        function: &str,
        call: impl Fn() -> Result<T, CuResult>,
    ) -> Result<T, CuResult> {
        match self.charge_to {
            ChargeTo::Account(account) => {
                let missing = self.growth(bytes).map_or(bytes, Units::bytes);
                eviction::retry(account, bytes, missing, function, call)
            }
            ChargeTo::Host => Err(curesult::OUT_OF_MEMORY),
        }
    }

    /// Charges the pool ahead for a call that takes at most `steps`, where the quota has ample room
    /// and this is the container's only process.
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

    /// Allocates where there is no idle credit for a step.
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
        let attempt = || self.allocate_growth(account, bytes, step, &call);
        let mut result = attempt();
        if matches!(result, Ok(None) | Err(curesult::OUT_OF_MEMORY)) {
            POOLS.reclaim_after_sync();
            result = attempt();
        }
        if result == Err(curesult::OUT_OF_MEMORY) {
            result = self.retry(bytes, function, attempt);
        }
        result?.ok_or_else(|| {
            accounting::report_denial(account, bytes, function);
            curesult::OUT_OF_MEMORY
        })
    }

    /// Charges what the pool must grow by, and allocates, under the lock. Returns `None` where the
    /// charge is denied.
    fn allocate_growth(
        &self,
        account: u8,
        bytes: u64,
        step: Units,
        call: impl Fn() -> Result<u64, CuResult>,
    ) -> Result<Option<u64>, CuResult> {
        let guard = POOLS.lock.lock();
        let allocate = || self.allocate_growth_locked(account, bytes, step, call, &guard);
        // The program's own call has the program's capture mode if the program captures. Else all
        // calls have the relaxed one, because each change of the mode is a call too.
        if captures::may_be_active() {
            allocate()
        } else {
            captures::with_relaxed_capture(allocate)
        }
    }

    fn allocate_growth_locked(
        &self,
        account: u8,
        bytes: u64,
        step: Units,
        call: impl Fn() -> Result<u64, CuResult>,
        _lock: &MutexGuard<'_, ()>,
    ) -> Result<Option<u64>, CuResult> {
        let growth = captures::with_relaxed_capture(|| {
            let (reserved, _) = self.reconcile_and_read(Units::ZERO, Units::ZERO);
            growth(reserved?, self.attribute(ATTR_USED)?, bytes)
        });
        let growth = growth.ok_or(curesult::OUT_OF_MEMORY)?;
        let Some(charged) = charge_growth(account, growth, step) else {
            return Ok(None);
        };
        match call() {
            Ok(pointer) if self.reconcile(charged).is_ok() => Ok(Some(pointer)),
            Ok(pointer) => {
                self.rollback(pointer);
                Ok(None)
            }
            Err(code) => {
                let _ = self.reconcile(charged);
                Err(code)
            }
        }
    }

    /// Frees an allocation that made the pool grow more than the quota allows. The program never
    /// got the pointer, so no work uses it.
    fn rollback(&self, pointer: u64) {
        let _ = captures::with_relaxed_capture(|| driver!(cuMemFree_v2(pointer => u64)));
        self.trim();
        let _ = self.reconcile(Units::ZERO);
    }

    /// Makes `accounted` what the pool has reserved, using up `precharged` units charged before.
    /// The caller holds the lock. Where the pool grew by more and that is denied, `accounted`
    /// includes all of `precharged`, and the next reconciliation tries again.
    fn reconcile(&self, precharged: Units) -> Result<(), Denied> {
        self.reconcile_with_extra(precharged, Units::ZERO)
    }

    /// Makes `accounted` what the pool has reserved and `extra`. See [`Pool::reconcile`].
    fn reconcile_with_extra(&self, precharged: Units, extra: Units) -> Result<(), Denied> {
        self.reconcile_and_read(precharged, extra).1
    }

    /// Reconciles, and returns the bytes that the pool has reserved too.
    fn reconcile_and_read(
        &self,
        precharged: Units,
        extra: Units,
    ) -> (Option<u64>, Result<(), Denied>) {
        let before = self.accounted.swap(RECONCILING, Ordering::SeqCst);
        // Closed before the driver is queried: calls that end later have grown the pool by then, or
        // are counted here.
        let under_way = match self.prefetched.close() {
            Units::ZERO => Units::ZERO,
            parts => parts.saturating_add(ONE_STEP),
        };
        let beyond = under_way.saturating_add(extra);
        let read = self.attribute(ATTR_RESERVED);
        let reserved = read.and_then(units).unwrap_or(before);
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
        (read, settled)
    }

    /// Reconciles after a call that may have shrunk the pool.
    pub(crate) fn reconcile_now(&self) {
        let _guard = POOLS.lock.lock();
        let _ = self.reconcile(Units::ZERO);
    }

    /// Makes a call that lets other processes hold the pool's memory, and marks it as exported
    /// before.
    pub(crate) fn with_export(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let _guard = POOLS.lock.lock();
        if !self.is_charged() || self.exported.load(Ordering::Acquire) {
            return call();
        }
        // Returns prefetched credit, which no other process can hold.
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

    /// Returns some of the pool's charge as an exported one.
    fn exported_charge(&self, units: u32) -> Option<Charge> {
        self.account().map(|slot| Charge {
            account: slot,
            units,
            context: 0,
            share: ShareState::Descriptor,
        })
    }

    /// Destroys the pool, or lets it be destroyed once its memory is free. `call` is the driver's.
    pub(crate) fn destroy(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let guard = POOLS.lock.lock();
        self.trim();
        let _ = self.reconcile(Units::ZERO);
        let at_once = !self.is_charged() || self.exported.load(Ordering::Acquire);
        if at_once || self.reserved() == Some(0) {
            let answer = call();
            if answer == curesult::SUCCESS {
                self.unregister(&guard);
            }
            return answer;
        }
        // Memory that is freed from here on is not cached, as for a pool that the driver has
        // destroyed.
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

    /// Destroys a pool that the program destroyed, once it is empty. The caller has reconciled the
    /// pool.
    fn destroy_if_empty(&self, lock: &MutexGuard<'_, ()>) {
        if !self.is_destroyed() || self.reserved() != Some(0) {
            return;
        }
        let handle = self.handle.load(Ordering::Acquire);
        if captures::with_relaxed_capture(|| driver!(cuMemPoolDestroy(handle => u64)))
            == curesult::SUCCESS
        {
            self.unregister(lock);
        }
    }

    /// Discharges a destroyed pool. What was exported stays charged. Under the lock, because
    /// `accounted` is no amount while another thread reconciles the pool.
    fn unregister(&self, _lock: &MutexGuard<'_, ()>) {
        self.prefetched.close();
        let accounted = self.accounted.swap(0, Ordering::AcqRel);
        let exported = self.exported.swap(false, Ordering::AcqRel);
        if let (false, Some(account)) = (exported, self.account()) {
            accounting::discharge_account(account, Units(accounted));
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

    /// Returns whether the pool has a step or more that is unused and could not be trimmed.
    fn has_unused_step(&self) -> bool {
        let sizes = self.attribute(ATTR_RESERVED).zip(self.attribute(ATTR_USED));
        sizes.is_some_and(|(reserved, used)| reserved >= used.saturating_add(STEP))
    }

    /// Returns what the pool must grow by for a request.
    fn growth(&self, bytes: u64) -> Option<Units> {
        growth(
            self.attribute(ATTR_RESERVED)?,
            self.attribute(ATTR_USED)?,
            bytes,
        )
    }

    fn reserved(&self) -> Option<u32> {
        self.attribute(ATTR_RESERVED).and_then(units)
    }

    fn attribute(&self, attribute: c_int) -> Option<u64> {
        captures::with_relaxed_capture(|| self.query(attribute))
    }

    /// Queries an attribute in the calling thread's capture mode.
    fn query(&self, attribute: c_int) -> Option<u64> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle == 0 || !self.is_charged() {
            return None;
        }
        let mut value = 0_u64;
        let code = driver!(cuMemPoolGetAttribute(
            handle => u64, attribute => c_int, (&raw mut value).cast() => *mut c_void,
        ));
        (code == curesult::SUCCESS).then_some(value)
    }

    /// Returns the account's index, once there is a session.
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

fn units(bytes: u64) -> Option<u32> {
    Units::holding(bytes).map(|units| units.0)
}

/// Returns what a pool must grow by for a request, if the request can use all that is cached.
fn growth(reserved: u64, used: u64, bytes: u64) -> Option<Units> {
    let needed = used.checked_add(bytes)?.checked_next_multiple_of(STEP)?;
    Units::holding(needed.saturating_sub(reserved))
}

/// Returns the most that a pool takes of its GPU for a request, or `None` beyond what units can
/// count.
#[inline]
fn steps_for(bytes: u64) -> Option<Units> {
    bytes
        .checked_next_multiple_of(STEP)
        .and_then(Units::holding)
}

/// Returns the part of prefetched credit that a request takes. Requests make a pool grow by no more
/// than their parts and one step. The driver adds a step only when no other has room, so one of two
/// neighbouring steps is at least half used.
#[inline]
fn prefetch_part(bytes: u64) -> Option<Units> {
    match bytes {
        0..=HALF_STEP => Units::holding((2 * bytes).max(MIN_PART)),
        _ => steps_for(bytes),
    }
}

/// Charges an account for a pool's growth and returns the charged amount. With ample room it
/// charges a step more, so that the next calls find idle credit. Near the quota that step would be
/// missing elsewhere.
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
