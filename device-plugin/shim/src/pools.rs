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

mod ahead;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use ahead::Ahead;
use bursar_protocol::units::{UNIT, Units};

use crate::afresh::Afresh;
use crate::codes::{self, CuResult};
use crate::hooks::{captures, real};
use crate::leaving;
use crate::ledger::{self, Denied};
use crate::live::{Charge, Lent};
use crate::place::Payer;
use crate::state::MAX_DEVICES;

/// A pool takes memory of its GPU in multiples of this (design F15).
const STEP: u64 = 32 << 20;
const HALF_STEP: u64 = STEP / 2;

/// How many times what is asked for the quota has room for, where that is plenty.
const PLENTY: u32 = 4;

/// What a pool is charged ahead, of which allocations take their parts.
const AHEAD: Units = Units(8 * ONE_STEP.0);

/// What must be free for that: it is never more than an eighth.
const ROOM_FOR_AHEAD: Units = Units(8 * AHEAD.0);

const ONE_STEP: Units = Units((STEP / UNIT) as u32);

/// The least that a small request takes of what was charged ahead.
const SMALLEST_PART: u64 = 2 << 20;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const USED: c_int = 7;

/// Marks a pool that is being settled: no pool has reserved that much.
const SETTLING: u32 = u32::MAX;

/// A pool of this process.
#[derive(Debug)]
pub(crate) struct Pool {
    /// The driver's handle; zero once it is destroyed, and the entry is free for another.
    handle: AtomicU64,
    payer: Payer,
    /// The account, plus one; zero before it is known.
    account: AtomicU8,
    /// Units that the account is charged, with those ahead.
    accounted: AtomicU32,
    ahead: Ahead,
    /// Others can hold its memory, so nothing that it ever reserved is given back.
    exported: AtomicBool,
    /// The program destroyed it, and it still has memory: it is destroyed when that is free.
    ended: AtomicBool,
    /// The pool that was entered before; null for the first.
    next: *const Pool,
}

/// All pools that this process has used or made.
pub(crate) struct Pools {
    last: AtomicPtr<Pool>,
    /// The pool that each device allocates from; null where the driver has to be asked.
    present: [AtomicPtr<Pool>; MAX_DEVICES],
    /// Held by whoever settles or enters pools.
    settling: Afresh<()>,
}

/// The pools of this process.
pub(crate) static POOLS: Pools = Pools {
    last: AtomicPtr::new(std::ptr::null_mut()),
    present: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_DEVICES],
    settling: Afresh::new(),
};

impl Pools {
    /// In a forked child: it has none of its parent's pools.
    pub(crate) fn forget(&self) {
        self.last.store(std::ptr::null_mut(), Ordering::Release);
        for present in &self.present {
            present.store(std::ptr::null_mut(), Ordering::Release);
        }
        self.settling.forget();
    }

    fn all(&self) -> impl Iterator<Item = &'static Pool> {
        let last = self.last.load(Ordering::Acquire).cast_const();
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
    pub(crate) fn enter(&self, handle: u64, payer: Payer) -> &'static Pool {
        if let Some(known) = self.find(handle) {
            return known;
        }
        let _held = self.settling.lock();
        if let Some(known) = self.find(handle) {
            return known;
        }
        let is_free =
            |pool: &&Pool| pool.handle.load(Ordering::Acquire) == 0 && pool.payer == payer;
        if let Some(free) = self.all().find(is_free) {
            free.ended.store(false, Ordering::Release);
            free.handle.store(handle, Ordering::Release);
            return free;
        }
        let entry = Box::leak(Box::new(Pool {
            handle: AtomicU64::new(handle),
            payer,
            account: AtomicU8::new(0),
            accounted: AtomicU32::new(0),
            ahead: Ahead::default(),
            exported: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            next: self.last.load(Ordering::Acquire),
        }));
        self.last.store(entry, Ordering::Release);
        entry
    }

    /// Enters a pool that was just made. One that had its handle is gone, whoever destroyed it.
    pub(crate) fn made(&self, handle: u64, payer: Payer) {
        if let Some(before) = self.find(handle) {
            before.forget();
        }
        self.enter(handle, payer);
    }

    /// The pool that a device allocates from, if it is known without asking the driver.
    #[inline]
    pub(crate) fn present(&self, device: c_int) -> Option<&'static Pool> {
        let place = self.present.get(usize::try_from(device).ok()?)?;
        // SAFETY: null or a leaked entry.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    }

    /// Notes the pool that a device allocates from; with none, the driver is asked next time.
    pub(crate) fn set_present(&self, device: c_int, pool: Option<&'static Pool>) {
        let place = usize::try_from(device)
            .ok()
            .and_then(|device| self.present.get(device));
        if let Some(place) = place {
            let pool = pool.map_or(std::ptr::null(), std::ptr::from_ref);
            place.store(pool.cast_mut(), Ordering::Release);
        }
    }

    /// Settles every pool: what they gave back at synchronises is no longer charged.
    pub(crate) fn settle(&self) {
        // First, for it synchronises.
        leaving::collect();
        if self.all().next().is_some() {
            let _held = self.settling.lock();
            self.settle_all();
        }
    }

    /// Trims and settles every pool; whether that gave anything back.
    pub(crate) fn reclaim(&self) -> bool {
        let collected = leaving::collect();
        if self.all().next().is_none() {
            return collected;
        }
        let _held = self.settling.lock();
        let before = self.accounted();
        self.trim_all();
        self.settle_all();
        collected || self.accounted() < before
    }

    /// As [`Pools::reclaim`], for graphs too, and where pools wait to see memory freed, waits for all work with them.
    /// Without the lock: graphs may take it too, and the work may be waiting for another thread of the program.
    fn reclaim_waiting(&self) {
        crate::graphs::reclaim();
        self.reclaim();
        if (self.is_waiting() || leaving::any()) && !captures::any() {
            let _ = real!(cuCtxSynchronize());
            self.reclaim();
        }
    }

    /// Whether any pool waits to see memory freed.
    fn is_waiting(&self) -> bool {
        let _held = self.settling.lock();
        self.all().any(Pool::is_waiting)
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
    fn settle_all(&self) {
        for pool in self.all() {
            let _ = pool.settle(Units::ZERO);
            pool.end_if_empty();
        }
    }
}

impl Pool {
    /// Whether it was destroyed as far as the program knows.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether some account pays for it.
    pub(crate) fn is_charged(&self) -> bool {
        self.payer != Payer::Nobody
    }

    /// Allocates of what the pool was charged ahead; `None` where that is used up. `call` is the driver's
    /// allocation.
    #[inline]
    pub(crate) fn allocate_ahead(
        &self,
        bytes: u64,
        call: impl FnOnce() -> Result<u64, CuResult>,
    ) -> Option<Result<u64, CuResult>> {
        let part = part_of(bytes).filter(|part| self.ahead.begin(*part))?;
        let got = call();
        self.ahead.end(part);
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
            return Err(codes::OUT_OF_MEMORY);
        };
        let Some(steps) = steps_for(bytes) else {
            ledger::report(account, bytes, function);
            return Err(codes::OUT_OF_MEMORY);
        };
        if self.advance(account, steps)
            && let Some(got) = self.allocate_ahead(bytes, &call)
        {
            return got;
        }
        if !ledger::take_idle(account, steps) {
            return self.allocate_tight(account, bytes, steps, function, call);
        }
        let got = call();
        // What was charged ahead is nobody's from here on, or it could be used beside what is given back.
        // The driver's own locks are between its growth and the last load.
        let idle = self.ahead.close() == Units::ZERO;
        if idle && self.reserved() == Some(self.accounted.load(Ordering::SeqCst)) {
            ledger::give_back(account, steps);
        } else {
            let _held = POOLS.settling.lock();
            // What is more than was reserved here is of calls that are still under way, and is theirs.
            let _ = self.settle(steps);
        }
        got
    }

    /// Charges it ahead for a call that takes `steps` at most, and more of them, where the quota has plenty
    /// of room and nobody else could miss it.
    fn advance(&self, account: u8, steps: Units) -> bool {
        let has_room = ledger::room_ahead(account) >= ROOM_FOR_AHEAD;
        if steps >= AHEAD || !has_room || !ledger::is_alone(account) {
            return false;
        }
        let _held = POOLS.settling.lock();
        if self.exported.load(Ordering::Acquire) {
            return false;
        }
        let is_charged = self.settle_with(Units::ZERO, AHEAD).is_ok();
        if is_charged {
            self.ahead.open(AHEAD.saturating_sub(ONE_STEP));
        }
        is_charged
    }

    /// As above, where there is no idle credit for a step.
    #[cold]
    #[inline(never)]
    fn allocate_tight(
        &self,
        account: u8,
        bytes: u64,
        step: Units,
        function: &str,
        call: impl Fn() -> Result<u64, CuResult>,
    ) -> Result<u64, CuResult> {
        for last in [false, true] {
            let settling = POOLS.settling.lock();
            let _ = self.settle(Units::ZERO);
            let growth = self.growth(bytes).ok_or(codes::OUT_OF_MEMORY)?;
            if let Some(held) = take_with(account, growth, step) {
                match call() {
                    Ok(pointer) if self.settle(held).is_ok() => return Ok(pointer),
                    Ok(pointer) => self.undo(pointer),
                    Err(code) => {
                        let _ = self.settle(held);
                        if code != codes::OUT_OF_MEMORY || last {
                            return Err(code);
                        }
                    }
                }
            }
            drop(settling);
            if !last {
                POOLS.reclaim_waiting();
            }
        }
        ledger::report(account, bytes, function);
        Err(codes::OUT_OF_MEMORY)
    }

    /// Gives back an allocation that made the pool grow further than it may. It was never handed out,
    /// so that nothing has to be waited for.
    fn undo(&self, pointer: u64) {
        let _ = captures::apart(|| real!(cuMemFree_v2(pointer => u64)));
        self.trim();
        let _ = self.settle(Units::ZERO);
    }

    /// With the lock held: makes what is accounted what is reserved, using up `held` units that the
    /// account was charged before. `Err` if the pool has grown by more and that is denied; then all of
    /// `held` is accounted, and the next settling tries again.
    fn settle(&self, held: Units) -> Result<(), Denied> {
        self.settle_with(held, Units::ZERO)
    }

    /// As above, but makes it what is reserved and `more`.
    fn settle_with(&self, held: Units, more: Units) -> Result<(), Denied> {
        let before = self.accounted.swap(SETTLING, Ordering::SeqCst);
        // Before the driver is asked: what ends later has grown the pool by then, or is counted here.
        let under_way = match self.ahead.close() {
            Units::ZERO => Units::ZERO,
            parts => parts.saturating_add(ONE_STEP),
        };
        let beyond = under_way.saturating_add(more);
        let reserved = self.reserved().unwrap_or(before);
        let reserved = reserved.saturating_add(beyond.0);
        let target = if self.exported.load(Ordering::Acquire) {
            reserved.max(before)
        } else {
            reserved
        };
        let charged = before.saturating_add(held.0);
        let (after, settled) = match self.account() {
            _ if target == charged => (target, Ok(())),
            None => (before, Err(Denied)),
            Some(account) if target < charged => {
                ledger::give_back(account, Units(charged - target));
                (target, Ok(()))
            }
            Some(account) => match ledger::take(account, Units(target - charged)) {
                Ok(()) => (target, Ok(())),
                Err(denied) => (charged, Err(denied)),
            },
        };
        if self.exported.load(Ordering::Acquire)
            && let Some(more) = after
                .checked_sub(before)
                .and_then(|more| self.charge_of(more))
        {
            let _ = ledger::export(more);
        }
        self.accounted.store(after, Ordering::SeqCst);
        settled
    }

    /// Settles after a call that may have made it smaller.
    pub(crate) fn settle_now(&self) {
        let _held = POOLS.settling.lock();
        let _ = self.settle(Units::ZERO);
    }

    /// Calls what lets others hold its memory, counted as exported before.
    pub(crate) fn exporting(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let _held = POOLS.settling.lock();
        if !self.is_charged() || self.exported.load(Ordering::Acquire) {
            return call();
        }
        // What it was charged ahead, nobody can hold.
        let _ = self.settle(Units::ZERO);
        let Some(charge) = self.charge_of(self.accounted.load(Ordering::Acquire)) else {
            return codes::NOT_PERMITTED;
        };
        if ledger::export(charge).is_err() {
            return codes::NOT_PERMITTED;
        }
        let answer = call();
        if answer == codes::SUCCESS {
            self.exported.store(true, Ordering::Release);
        } else {
            ledger::unexport(charge);
        }
        answer
    }

    /// Some of what it is charged, as the ledger counts exports.
    fn charge_of(&self, units: u32) -> Option<Charge> {
        self.account().map(|slot| Charge {
            slot,
            units,
            context: 0,
            lent: Lent::Descriptor,
        })
    }

    /// Destroys it, or where it still has memory, as soon as that is free. `call` is the driver's.
    pub(crate) fn destroy(&self, call: impl FnOnce() -> CuResult) -> CuResult {
        let _held = POOLS.settling.lock();
        self.trim();
        let _ = self.settle(Units::ZERO);
        let at_once = !self.is_charged() || self.exported.load(Ordering::Acquire);
        if at_once || self.reserved() == Some(0) {
            let answer = call();
            if answer == codes::SUCCESS {
                self.forget();
            }
            return answer;
        }
        // As the driver does at once: what is freed from here on is not cached.
        let mut nothing = 0_u64;
        let handle = self.handle.load(Ordering::Acquire);
        let _ = captures::apart(|| {
            real!(cuMemPoolSetAttribute(
                handle => u64, THRESHOLD => c_int, (&raw mut nothing).cast() => *mut c_void,
            ))
        });
        self.ended.store(true, Ordering::Release);
        codes::SUCCESS
    }

    /// With the lock held, and after settling.
    fn end_if_empty(&self) {
        if !self.has_ended() || self.reserved() != Some(0) {
            return;
        }
        let handle = self.handle.load(Ordering::Acquire);
        if captures::apart(|| real!(cuMemPoolDestroy(handle => u64))) == codes::SUCCESS {
            self.forget();
        }
    }

    /// The pool is gone. What was exported of it stays charged.
    fn forget(&self) {
        self.ahead.close();
        let kept = self.accounted.swap(0, Ordering::AcqRel);
        let exported = self.exported.swap(false, Ordering::AcqRel);
        if let (false, Some(account)) = (exported, self.account()) {
            ledger::give_back(account, Units(kept));
        }
        self.handle.store(0, Ordering::Release);
    }

    fn trim(&self) {
        let handle = self.handle.load(Ordering::Acquire);
        if handle != 0 && self.is_charged() {
            let _ = captures::apart(|| real!(cuMemPoolTrimTo(handle => u64, 0 => usize)));
        }
    }

    /// Whether it has a step or more that is neither used nor could be trimmed.
    fn is_waiting(&self) -> bool {
        let sizes = self.attribute(RESERVED).zip(self.attribute(USED));
        sizes.is_some_and(|(reserved, used)| reserved >= used.saturating_add(STEP))
    }

    /// What the pool must grow by for a request, if it can use all that it has cached.
    fn growth(&self, bytes: u64) -> Option<Units> {
        let (reserved, used) = (self.attribute(RESERVED)?, self.attribute(USED)?);
        let needed = used.checked_add(bytes)?.checked_next_multiple_of(STEP)?;
        Units::holding(needed.saturating_sub(reserved))
    }

    fn reserved(&self) -> Option<u32> {
        Units::holding(self.attribute(RESERVED)?).map(|units| units.0)
    }

    fn attribute(&self, attribute: c_int) -> Option<u64> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle == 0 || !self.is_charged() {
            return None;
        }
        let mut value = 0_u64;
        let code = captures::apart(|| {
            real!(cuMemPoolGetAttribute(
                handle => u64, attribute => c_int, (&raw mut value).cast() => *mut c_void,
            ))
        });
        (code == codes::SUCCESS).then_some(value)
    }

    /// The account that pays, once there is a session.
    fn account(&self) -> Option<u8> {
        let known = self.account.load(Ordering::Acquire);
        if let Some(account) = known.checked_sub(1) {
            return Some(account);
        }
        let Payer::Account(kind) = self.payer else {
            return None;
        };
        let found = ledger::account(kind)?;
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
fn part_of(bytes: u64) -> Option<Units> {
    match bytes {
        0..=HALF_STEP => Units::holding((2 * bytes).max(SMALLEST_PART)),
        _ => steps_for(bytes),
    }
}

/// Charges an account for what a pool must grow by; how much it was. Where the quota has plenty of room,
/// it is more, so that the next calls find idle credit; near the quota it would be in others' way.
fn take_with(account: u8, growth: Units, step: Units) -> Option<Units> {
    let more = growth.saturating_add(step);
    let plenty = Units(more.0.saturating_mul(PLENTY)).min(Units::MAX);
    if ledger::room_ahead(account) >= plenty && ledger::take(account, more).is_ok() {
        return Some(more);
    }
    ledger::take(account, growth).is_ok().then_some(growth)
}
