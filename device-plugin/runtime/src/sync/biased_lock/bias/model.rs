//! An owner and who revokes its bias, in every order that threads, and the memory model, allow.

use loom::sync::atomic::{AtomicUsize, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;

/// Loom has no barrier that one thread puts into another: both sides have a full one.
struct Model;

impl AtomicOps for Model {
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

/// A lock, the notes of two threads, and what it guards: who adds to it beside another, or does not see what was added
/// before, loses some.
struct Guarded {
    owner: AtomicUsize,
    notes: [AtomicUsize; 2],
    turn: Mutex<()>,
    value: AtomicUsize,
}

impl Guarded {
    fn new() -> Arc<Guarded> {
        Arc::new(Guarded {
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

    /// Adds one; by bias where the thread has it, and gets it where it `earns` it.
    fn work(&self, me: usize, earns: bool) {
        let note = self.note(me);
        if self.owner.load(Ordering::Relaxed) == me && enter::<Model>(&self.owner, me, note, LOCK) {
            self.add();
            return exit::<Model>(note);
        }
        let turn = self.turn.lock().expect("nobody panics");
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != NO_OWNER {
            revoke::<Model>(&self.owner, self.note(owner), LOCK, thread::yield_now);
        }
        if earns {
            grant::<Model>(&self.owner, me, note, LOCK);
            drop(turn);
            self.add();
            return exit::<Model>(note);
        }
        self.add();
    }
}

/// Two threads with two rounds each lose nothing of what they add.
fn two(earns: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let guarded = Guarded::new();
        let rounds = move |guarded: &Guarded, me| (0..2).for_each(|_| guarded.work(me, earns));
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
    two(false);
}

#[test]
fn successive_owners_exclude_each_other() {
    two(true);
}
