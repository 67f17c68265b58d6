//! The lock of what is held for tens of nanoseconds, mostly by one thread: that thread takes it by plain stores.
//!
//! A locked instruction waits for every store before it, which was a good part of what such a holder cost. So a thread that
//! took the lock [`ENOUGH`] times, nobody else between, has its *bias*: from then on it notes in a slot of its own that
//! it is inside, and looks whether the bias is still there ([`bias`]). Everybody else takes the *turn*, a spin lock, and
//! revokes the bias if it waits for the lock at all; who only tries leaves it. A revocation costs a system call of
//! microseconds, once in [`ENOUGH`] times at most.
//!
//! There is no bias in threads beyond [`COUNT`], nor where the kernel refuses `membarrier`.
#![allow(
    unsafe_code,
    reason = "implements `lock_api::RawMutex`, whose `unlock` is for the holder only"
)]

mod backoff;
mod bias;

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};
use std::time::Duration;

use lock_api::{GuardNoSend, RawMutex};
use rustix::thread::{MembarrierCommand, membarrier};
use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy as _;

use backoff::Backoff;
use bias::{AtomicOps, NO_LOCK, NO_OWNER};

/// A lock.
pub(crate) type BiasedLock<T> = lock_api::Mutex<RawBiasedLock, T>;
/// Its holder.
pub(crate) type BiasedGuard<'a, T> = lock_api::MutexGuard<'a, RawBiasedLock, T>;

/// Who takes a lock as often in a row gets its bias: half a millisecond of a pool's work.
const BIAS_THRESHOLD: u32 = 1 << 14;
/// Slots: so many threads, less one, have biases at a time.
const SLOT_COUNT: usize = 256;
/// The slot of threads that have none; they count as one thread.
const NO_SLOT: usize = 0;
/// How long a store may take to be seen by all where the kernel has no barrier.
const STORE_VISIBILITY_DELAY: Duration = Duration::from_millis(1);

/// A thread's note, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    /// The lock that the thread holds by bias, or is about to look whether it has. What it takes inside of that, it takes
    /// by turn.
    owner_note: AtomicUsize,
    claimed: AtomicBool,
}

static SLOTS: [Slot; SLOT_COUNT] = [const {
    Slot {
        owner_note: AtomicUsize::new(NO_LOCK),
        claimed: AtomicBool::new(false),
    }
}; SLOT_COUNT];

/// Lets threads of this process have biases, if the kernel has the barrier for it. Where threads run that takes
/// milliseconds, so it is not done while a lock is held.
pub(crate) fn register_membarrier() {
    MEMBARRIER.get_or_init(register);
}

static MEMBARRIER: OnceLock<bool> = OnceLock::new();

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// A thread's right to a slot.
struct SlotGuard(usize);

impl SlotGuard {
    /// To [`NONE`] where no slot is left, or nobody has prepared.
    fn acquire() -> SlotGuard {
        let mut vacant = NO_SLOT + 1..SLOT_COUNT;
        // Biases go with the slot: whoever has it next sees all that was done by them.
        let takes = |slot: &usize| {
            let taken = &SLOTS[*slot].claimed;
            !taken.load(Ordering::Relaxed) && !taken.swap(true, Ordering::Acquire)
        };
        let found = MEMBARRIER.get() == Some(&true);
        let found = found.then(|| vacant.find(takes));
        SlotGuard(found.flatten().unwrap_or(NO_SLOT))
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        // What is held by a note for ever keeps the slot.
        if self.0 == NO_SLOT || holds_biased_lock(self.0) {
            return;
        }
        // What the thread does after this, it does without.
        SLOT.set(NO_SLOT);
        SLOTS[self.0].claimed.store(false, Ordering::Release);
    }
}

thread_local! {
    /// The calling thread's slot, once it has been looked for.
    static SLOT: Cell<usize> = const { Cell::new(NO_SLOT) };
    static SLOT_GUARD: SlotGuard = SlotGuard::acquire();
}

struct Native;

impl AtomicOps for Native {
    type Word = AtomicUsize;

    #[inline]
    fn load(word: &AtomicUsize, order: Ordering) -> usize {
        word.load(order)
    }

    #[inline]
    fn store(word: &AtomicUsize, value: usize, order: Ordering) {
        word.store(value, order);
    }

    #[inline]
    fn light_fence() {
        compiler_fence(Ordering::SeqCst);
    }

    fn heavy_fence() {
        // A filter of system calls may have come since, or memory run out. Stores are seen within microseconds then
        // too, though nobody promises it.
        if membarrier(MembarrierCommand::PrivateExpedited).is_err() {
            register();
            std::thread::sleep(STORE_VISIBILITY_DELAY);
        }
    }
}

/// The lock, without what it guards.
#[derive(Debug)]
pub(crate) struct RawBiasedLock {
    /// The slot of who has the bias, or [`NOBODY`]. Who has the turn changes it.
    owner: AtomicUsize,
    spin_lock: SpinMutex<(), Backoff>,
    /// How often in a row the same thread had the turn, and in the upper half which one: its slot. Who has the turn
    /// changes it.
    acquire_streak: AtomicU64,
}

impl RawBiasedLock {
    /// What its owner's note says inside.
    #[inline]
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Takes it by bias.
    #[inline]
    fn enter_biased(&self) -> bool {
        let me = SLOT.get();
        // The bias is never that of `NONE`.
        self.owner.load(Ordering::Relaxed) == me
            && bias::enter::<Native>(
                &self.owner,
                me,
                &SLOTS[me % SLOT_COUNT].owner_note,
                self.address(),
            )
    }

    #[inline]
    fn lock_slow(&self) {
        RawMutex::lock(&self.spin_lock);
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != NO_OWNER {
            self.revoke(owner);
        }
        self.count_acquire();
    }

    #[inline]
    fn try_lock_slow(&self) -> bool {
        if !RawMutex::try_lock(&self.spin_lock) {
            return false;
        }
        let free = self.owner.load(Ordering::Relaxed) == NO_OWNER;
        if free {
            self.count_acquire();
        } else {
            // SAFETY: the turn was taken above.
            unsafe { RawMutex::unlock(&self.spin_lock) };
        }
        free
    }

    #[cold]
    fn revoke(&self, owner: usize) {
        let inside = &SLOTS[owner % SLOT_COUNT].owner_note;
        bias::revoke::<Native>(&self.owner, inside, self.address(), Backoff::relax);
    }

    /// Counts who has the turn.
    #[inline]
    fn count_acquire(&self) {
        let before = self.acquire_streak.load(Ordering::Relaxed);
        let first = (SLOT.get() as u64) << u32::BITS;
        let run = if before >> u32::BITS == first >> u32::BITS {
            before + 1
        } else {
            first
        };
        self.acquire_streak.store(run, Ordering::Relaxed);
        if run as u32 >= BIAS_THRESHOLD {
            self.grant_bias();
        }
    }

    /// Gives the bias to who has the turn, which holds the lock by it from here on.
    #[cold]
    fn grant_bias(&self) {
        self.acquire_streak.store(0, Ordering::Relaxed);
        if SLOT.get() == NO_SLOT {
            // Nothing is found once the thread has begun to end.
            SLOT.set(SLOT_GUARD.try_with(|right| right.0).unwrap_or(NO_SLOT));
        }
        let me = SLOT.get();
        // Its note has room for one.
        if me != NO_SLOT && !holds_biased_lock(me) {
            let inside = &SLOTS[me % SLOT_COUNT].owner_note;
            bias::grant::<Native>(&self.owner, me, inside, self.address());
            // SAFETY: the caller has the turn, and does not hold the lock by it any more.
            unsafe { RawMutex::unlock(&self.spin_lock) };
        }
    }
}

/// Whether the thread of a slot, which is the calling one, holds a lock by bias.
fn holds_biased_lock(slot: usize) -> bool {
    SLOTS[slot % SLOT_COUNT].owner_note.load(Ordering::Relaxed) != NO_LOCK
}

// SAFETY: whoever is let in has the turn while nobody has the bias and no owner is inside, or has its note name the lock and
// the bias after that: `bias` says why these exclude each other. A thread whose note names the lock is not let in again.
// The guard stays in its thread, so the note that it clears is that thread's.
unsafe impl RawMutex for RawBiasedLock {
    const INIT: RawBiasedLock = RawBiasedLock {
        owner: AtomicUsize::new(NO_OWNER),
        spin_lock: SpinMutex::new(()),
        acquire_streak: AtomicU64::new(0),
    };

    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.enter_biased() {
            self.lock_slow();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.enter_biased() || self.try_lock_slow()
    }

    #[inline]
    unsafe fn unlock(&self) {
        let inside = &SLOTS[SLOT.get() % SLOT_COUNT].owner_note;
        if inside.load(Ordering::Relaxed) == self.address() {
            bias::exit::<Native>(inside);
        } else {
            // SAFETY: the caller holds the lock, and not by bias.
            unsafe { RawMutex::unlock(&self.spin_lock) };
        }
    }
}

#[cfg(test)]
mod tests;
