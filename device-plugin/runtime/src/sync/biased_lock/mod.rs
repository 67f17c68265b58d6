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

use backoff::Patience;
use bias::{Memory, NOBODY, OUTSIDE};

/// A lock.
pub(crate) type Lock<T> = lock_api::Mutex<Biased, T>;
/// Its holder.
pub(crate) type Guard<'a, T> = lock_api::MutexGuard<'a, Biased, T>;

/// Who takes a lock as often in a row gets its bias: half a millisecond of a pool's work.
const ENOUGH: u32 = 1 << 14;
/// Slots: so many threads, less one, have biases at a time.
const COUNT: usize = 256;
/// The slot of threads that have none; they count as one thread.
const NONE: usize = 0;
/// How long a store may take to be seen by all where the kernel has no barrier.
const UNPROMISED: Duration = Duration::from_millis(1);

/// A thread's note, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    /// The lock that the thread holds by bias, or is about to look whether it has. What it takes inside of that, it takes
    /// by turn.
    inside: AtomicUsize,
    taken: AtomicBool,
}

static SLOTS: [Slot; COUNT] = [const {
    Slot {
        inside: AtomicUsize::new(OUTSIDE),
        taken: AtomicBool::new(false),
    }
}; COUNT];

/// Lets threads of this process have biases, if the kernel has the barrier for it. Where threads run that takes
/// milliseconds, so it is not done while a lock is held.
pub(crate) fn prepare() {
    BARRIER.get_or_init(register);
}

static BARRIER: OnceLock<bool> = OnceLock::new();

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// A thread's right to a slot.
struct Right(usize);

impl Right {
    /// To [`NONE`] where no slot is left, or nobody has prepared.
    fn find() -> Right {
        let mut vacant = NONE + 1..COUNT;
        // Biases go with the slot: whoever has it next sees all that was done by them.
        let takes = |slot: &usize| {
            let taken = &SLOTS[*slot].taken;
            !taken.load(Ordering::Relaxed) && !taken.swap(true, Ordering::Acquire)
        };
        let found = BARRIER.get() == Some(&true);
        let found = found.then(|| vacant.find(takes));
        Right(found.flatten().unwrap_or(NONE))
    }
}

impl Drop for Right {
    fn drop(&mut self) {
        // What is held by a note for ever keeps the slot.
        if self.0 == NONE || holds_any(self.0) {
            return;
        }
        // What the thread does after this, it does without.
        SLOT.set(NONE);
        SLOTS[self.0].taken.store(false, Ordering::Release);
    }
}

thread_local! {
    /// The calling thread's slot, once it has been looked for.
    static SLOT: Cell<usize> = const { Cell::new(NONE) };
    static RIGHT: Right = Right::find();
}

struct Machine;

impl Memory for Machine {
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
    fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    fn heavy() {
        // A filter of system calls may have come since, or memory run out. Stores are seen within microseconds then
        // too, though nobody promises it.
        if membarrier(MembarrierCommand::PrivateExpedited).is_err() {
            register();
            std::thread::sleep(UNPROMISED);
        }
    }
}

/// The lock, without what it guards.
#[derive(Debug)]
pub(crate) struct Biased {
    /// The slot of who has the bias, or [`NOBODY`]. Who has the turn changes it.
    owner: AtomicUsize,
    turn: SpinMutex<(), Patience>,
    /// How often in a row the same thread had the turn, and in the upper half which one: its slot. Who has the turn
    /// changes it.
    run: AtomicU64,
}

impl Biased {
    /// What its owner's note says inside.
    #[inline]
    fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Takes it by bias.
    #[inline]
    fn enter(&self) -> bool {
        let me = SLOT.get();
        // The bias is never that of `NONE`.
        self.owner.load(Ordering::Relaxed) == me
            && bias::enter::<Machine>(&self.owner, me, &SLOTS[me % COUNT].inside, self.name())
    }

    #[inline]
    fn take_turn(&self) {
        RawMutex::lock(&self.turn);
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != NOBODY {
            self.revoke(owner);
        }
        self.count();
    }

    #[inline]
    fn try_turn(&self) -> bool {
        if !RawMutex::try_lock(&self.turn) {
            return false;
        }
        let free = self.owner.load(Ordering::Relaxed) == NOBODY;
        if free {
            self.count();
        } else {
            // SAFETY: the turn was taken above.
            unsafe { RawMutex::unlock(&self.turn) };
        }
        free
    }

    #[cold]
    fn revoke(&self, owner: usize) {
        let inside = &SLOTS[owner % COUNT].inside;
        bias::revoke::<Machine>(&self.owner, inside, self.name(), Patience::relax);
    }

    /// Counts who has the turn.
    #[inline]
    fn count(&self) {
        let before = self.run.load(Ordering::Relaxed);
        let first = (SLOT.get() as u64) << u32::BITS;
        let run = if before >> u32::BITS == first >> u32::BITS {
            before + 1
        } else {
            first
        };
        self.run.store(run, Ordering::Relaxed);
        if run as u32 >= ENOUGH {
            self.earn();
        }
    }

    /// Gives the bias to who has the turn, which holds the lock by it from here on.
    #[cold]
    fn earn(&self) {
        self.run.store(0, Ordering::Relaxed);
        if SLOT.get() == NONE {
            // Nothing is found once the thread has begun to end.
            SLOT.set(RIGHT.try_with(|right| right.0).unwrap_or(NONE));
        }
        let me = SLOT.get();
        // Its note has room for one.
        if me != NONE && !holds_any(me) {
            let inside = &SLOTS[me % COUNT].inside;
            bias::earn::<Machine>(&self.owner, me, inside, self.name());
            // SAFETY: the caller has the turn, and does not hold the lock by it any more.
            unsafe { RawMutex::unlock(&self.turn) };
        }
    }
}

/// Whether the thread of a slot, which is the calling one, holds a lock by bias.
fn holds_any(slot: usize) -> bool {
    SLOTS[slot % COUNT].inside.load(Ordering::Relaxed) != OUTSIDE
}

// SAFETY: whoever is let in has the turn while nobody has the bias and no owner is inside, or has its note name the lock and
// the bias after that: `bias` says why these exclude each other. A thread whose note names the lock is not let in again.
// The guard stays in its thread, so the note that it clears is that thread's.
unsafe impl RawMutex for Biased {
    const INIT: Biased = Biased {
        owner: AtomicUsize::new(NOBODY),
        turn: SpinMutex::new(()),
        run: AtomicU64::new(0),
    };

    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.enter() {
            self.take_turn();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.enter() || self.try_turn()
    }

    #[inline]
    unsafe fn unlock(&self) {
        let inside = &SLOTS[SLOT.get() % COUNT].inside;
        if inside.load(Ordering::Relaxed) == self.name() {
            bias::leave::<Machine>(inside);
        } else {
            // SAFETY: the caller holds the lock, and not by bias.
            unsafe { RawMutex::unlock(&self.turn) };
        }
    }
}

#[cfg(test)]
mod tests;
