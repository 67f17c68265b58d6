//! How one thread holds a lock by a note of its own, and how others take that right away.
//!
//! The owner writes its note and then reads who the owner is; who revokes writes that nobody is and then reads the note.
//! With a full barrier between the two on either side, one of them sees what the other wrote. Here the owner's is only
//! the compiler's, and who revokes has the kernel put one into every thread that runs.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

/// Nobody has the bias.
pub(super) const NOBODY: usize = usize::MAX;
/// A note that names no lock.
pub(super) const OUTSIDE: usize = 0;

/// The atomic operations of the machine, or of a model checker in tests.
pub(super) trait Memory {
    /// A word that several threads use.
    type Word;
    fn load(word: &Self::Word, order: Ordering) -> usize;
    fn store(word: &Self::Word, value: usize, order: Ordering);
    /// The owner's barrier: a full one for who uses [`Self::heavy`].
    fn light();
    /// A full barrier here, and in every other thread.
    fn heavy();
}

/// Takes `lock` by the bias of `me`, if that is still there and `inside`, its note, names nothing.
#[inline]
pub(super) fn enter<M: Memory>(owner: &M::Word, me: usize, inside: &M::Word, lock: usize) -> bool {
    if M::load(inside, Ordering::Relaxed) != OUTSIDE {
        return false;
    }
    M::store(inside, lock, Ordering::Relaxed);
    M::light();
    let mine = M::load(owner, Ordering::Relaxed) == me;
    if !mine {
        leave::<M>(inside);
    }
    mine
}

/// Gives back what [`enter`] took.
#[inline]
pub(super) fn leave<M: Memory>(inside: &M::Word) {
    M::store(inside, OUTSIDE, Ordering::Release);
}

/// Takes the bias from its owner and waits until that one's note does not name `lock`; no longer than `wait` says. Whether
/// it came to that: where not, the owner keeps the bias. For who has the turn.
pub(super) fn revoke<M: Memory>(
    owner: &M::Word,
    inside: &M::Word,
    lock: usize,
    mut wait: impl FnMut() -> bool,
) -> bool {
    let before = M::load(owner, Ordering::Relaxed);
    M::store(owner, NOBODY, Ordering::Relaxed);
    M::heavy();
    while M::load(inside, Ordering::Acquire) == lock {
        if !wait() {
            M::store(owner, before, Ordering::Relaxed);
            return false;
        }
    }
    true
}

#[cfg(test)]
mod model;
