//! Provides a lock for critical sections of tens of nanoseconds that one thread mostly takes.
//!
//! A locked instruction waits for all earlier stores, which was a large part of the section's cost.
//! A thread that takes the lock [`BIAS_THRESHOLD`] times in a row therefore gets its *bias*. With
//! the bias the thread writes a note in its own slot and checks that it still has the bias
//! ([`bias`]). Any other thread takes a spin lock and revokes the bias; `try_lock` leaves the bias
//! in place. A revocation costs a system call of microseconds, at most once in [`BIAS_THRESHOLD`]
//! acquisitions.
//!
//! Threads beyond [`SLOT_COUNT`] get no bias, and no thread does if the kernel refuses
//! `membarrier`.
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

/// Lock with a bias towards one thread.
pub type BiasedLock<T> = lock_api::Mutex<RawBiasedLock, T>;
/// Guard of a [`BiasedLock`].
pub type BiasedGuard<'a, T> = lock_api::MutexGuard<'a, RawBiasedLock, T>;

/// Acquisitions in a row after which a thread gets the bias: half a millisecond of a pool's work.
const BIAS_THRESHOLD: u32 = 1 << 14;
/// Number of slots. One less is the number of threads that can have a bias at a time.
const SLOT_COUNT: usize = 256;
/// Slot of all threads without one, which count as one thread.
const NO_SLOT: usize = 0;
/// Time after which all threads see a store if the kernel refuses the barrier.
const STORE_VISIBILITY_DELAY: Duration = Duration::from_millis(1);

/// Slot of a thread, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    /// Address of the lock that the thread holds, or is about to take, by bias. Nested locks are
    /// taken by the spin lock.
    owner_note: AtomicUsize,
    claimed: AtomicBool,
}

static SLOTS: [Slot; SLOT_COUNT] = [const {
    Slot {
        owner_note: AtomicUsize::new(NO_LOCK),
        claimed: AtomicBool::new(false),
    }
}; SLOT_COUNT];

/// Registers the process for `membarrier`, without which no thread gets a bias.
///
/// The registration takes milliseconds in a process with threads, so it must not run under a lock.
pub fn register_membarrier() {
    MEMBARRIER.get_or_init(register);
}

static MEMBARRIER: OnceLock<bool> = OnceLock::new();

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Claim of a thread to a slot.
struct SlotGuard(usize);

impl SlotGuard {
    /// Claims a slot, or [`NO_SLOT`] if none is left or the process is not registered.
    fn acquire() -> SlotGuard {
        let mut vacant = NO_SLOT + 1..SLOT_COUNT;
        // Biases pass with the slot. Acquire makes the previous thread's critical sections visible.
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
        // A lock that is leaked while held by bias also leaks its slot.
        if self.0 == NO_SLOT || holds_biased_lock(self.0) {
            return;
        }
        // The thread takes its further locks without a bias.
        SLOT.set(NO_SLOT);
        SLOTS[self.0].claimed.store(false, Ordering::Release);
    }
}

thread_local! {
    /// Slot of the calling thread, once it has claimed one.
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
        // A seccomp filter may forbid the call by now, or the kernel may lack memory. In practice
        // stores are visible within microseconds.
        if membarrier(MembarrierCommand::PrivateExpedited).is_err() {
            register();
            std::thread::sleep(STORE_VISIBILITY_DELAY);
        }
    }
}

/// Raw lock, without the guarded value.
#[derive(Debug)]
pub struct RawBiasedLock {
    /// Slot of the thread with the bias, or [`NO_OWNER`]. Only the holder of the spin lock writes
    /// it.
    owner: AtomicUsize,
    spin_lock: SpinMutex<(), Backoff>,
    /// Acquisitions in a row by one thread, with that thread's slot in the upper half. Only the
    /// holder of the spin lock writes it.
    acquire_streak: AtomicU64,
}

impl RawBiasedLock {
    /// Returns the value of a note that names this lock.
    #[inline]
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Takes the lock by bias.
    #[inline]
    fn enter_biased(&self) -> bool {
        let me = SLOT.get();
        // [`NO_SLOT`] never has the bias.
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
            // SAFETY: this thread took the spin lock above.
            unsafe { RawMutex::unlock(&self.spin_lock) };
        }
        free
    }

    #[cold]
    fn revoke(&self, owner: usize) {
        let inside = &SLOTS[owner % SLOT_COUNT].owner_note;
        bias::revoke::<Native>(&self.owner, inside, self.address(), Backoff::relax);
    }

    /// Counts an acquisition by the holder of the spin lock.
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

    /// Grants the bias to the holder of the spin lock, which then holds the lock by bias.
    #[cold]
    fn grant_bias(&self) {
        self.acquire_streak.store(0, Ordering::Relaxed);
        if SLOT.get() == NO_SLOT {
            // A thread whose locals are being destroyed gets no slot.
            SLOT.set(SLOT_GUARD.try_with(|right| right.0).unwrap_or(NO_SLOT));
        }
        let me = SLOT.get();
        // A note has room for one lock.
        if me != NO_SLOT && !holds_biased_lock(me) {
            let inside = &SLOTS[me % SLOT_COUNT].owner_note;
            bias::grant::<Native>(&self.owner, me, inside, self.address());
            // SAFETY: the caller holds the spin lock, and from here on holds the lock by bias
            // instead.
            unsafe { RawMutex::unlock(&self.spin_lock) };
        }
    }
}

/// Returns whether the calling thread, whose slot this is, holds a lock by bias.
fn holds_biased_lock(slot: usize) -> bool {
    SLOTS[slot % SLOT_COUNT].owner_note.load(Ordering::Relaxed) != NO_LOCK
}

// SAFETY: a holder either has the spin lock, while no thread has the bias and no note names the
// lock, or has the bias, with its note. `bias` explains why these exclude each other. A thread
// whose note names the lock cannot enter again. The guard is not `Send`, so a thread clears only
// its own note.
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
