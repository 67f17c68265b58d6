//! Checks owner and revoker in every interleaving that the memory model permits.

use loom::sync::atomic::{AtomicUsize, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;

/// Loom has no asymmetric fence, so both sides use a full one.
struct LoomAtomics;

impl AtomicOps for LoomAtomics {
    type Word = AtomicUsize;

    fn load(word: &AtomicUsize, order: Ordering) -> usize {
        word.load(order)
    }

    fn store(word: &AtomicUsize, value: usize, order: Ordering) {
        word.store(value, order);
    }

    fn light_fence() {
        fence(Ordering::SeqCst);
    }

    fn heavy_fence() {
        fence(Ordering::SeqCst);
    }
}

const LOCK: usize = 64;
const OWNER: usize = 1;

/// Lock, notes of two threads, and a counter. A lost increment shows a violated exclusion.
struct GuardedCounter {
    owner: AtomicUsize,
    notes: [AtomicUsize; 2],
    turn: Mutex<()>,
    value: AtomicUsize,
}

impl GuardedCounter {
    fn new() -> Arc<GuardedCounter> {
        Arc::new(GuardedCounter {
            owner: AtomicUsize::new(OWNER),
            notes: std::array::from_fn(|_| AtomicUsize::new(NO_LOCK)),
            turn: Mutex::new(()),
            value: AtomicUsize::new(0),
        })
    }

    fn add(&self) {
        let value = self.value.load(Ordering::Relaxed);
        self.value.store(value + 1, Ordering::Relaxed);
    }

    fn note(&self, slot: usize) -> &AtomicUsize {
        &self.notes[slot - 1]
    }

    /// Increments the counter under the lock, by bias if the thread has it; `earns` grants the
    /// bias.
    fn increment(&self, me: usize, earns: bool) {
        let note = self.note(me);
        if self.owner.load(Ordering::Relaxed) == me
            && enter::<LoomAtomics>(&self.owner, me, note, LOCK)
        {
            self.add();
            return exit::<LoomAtomics>(note);
        }
        let turn = self.turn.lock().expect("nobody panics");
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != NO_OWNER {
            revoke::<LoomAtomics>(&self.owner, self.note(owner), LOCK, thread::yield_now);
        }
        if earns {
            grant::<LoomAtomics>(&self.owner, me, note, LOCK);
            drop(turn);
            self.add();
            return exit::<LoomAtomics>(note);
        }
        self.add();
    }
}

/// Runs two threads with two increments each.
fn check_two_threads(earns: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let guarded = GuardedCounter::new();
        let rounds =
            move |guarded: &GuardedCounter, me| (0..2).for_each(|_| guarded.increment(me, earns));
        let other = {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || rounds(&guarded, OWNER + 1))
        };
        rounds(&guarded, OWNER);
        other.join().expect("it ends");
        assert_eq!(guarded.value.load(Ordering::Relaxed), 4);
    });
}

#[test]
fn owner_and_revoker_exclude_each_other() {
    check_two_threads(false);
}

#[test]
fn successive_owners_exclude_each_other() {
    check_two_threads(true);
}
