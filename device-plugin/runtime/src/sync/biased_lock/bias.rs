//! How one thread holds a lock by a note of its own, and how others take that right away.
//!
//! The owner writes its note and then reads who the owner is; who revokes writes that nobody is and then reads the note.
//! With a full barrier between the two on either side, one of them sees what the other wrote. Here the owner's is only
//! the compiler's, and who revokes has the kernel put one into every thread that runs.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

/// Nobody has the bias.
pub(super) const NO_OWNER: usize = usize::MAX;
/// A note that names no lock.
pub(super) const NO_LOCK: usize = 0;

/// The atomic operations of the machine, or of a model checker in tests.
pub(super) trait AtomicOps {
    /// A word that several threads use.
    type Word;
    fn load(word: &Self::Word, order: Ordering) -> usize;
    fn store(word: &Self::Word, value: usize, order: Ordering);
    /// The owner's barrier: a full one for who uses [`Self::heavy`].
    fn light_fence();
    /// A full barrier here, and in every other thread.
    fn heavy_fence();
}

/// Takes `lock` by the bias of `me`, if that is still there and `inside`, its note, names nothing.
#[inline]
pub(super) fn enter<M: AtomicOps>(
    owner: &M::Word,
    me: usize,
    inside: &M::Word,
    lock: usize,
) -> bool {
    if M::load(inside, Ordering::Relaxed) != NO_LOCK {
        return false;
    }
    // Who waits for another lock to be left may read this, and sees with it what was done there.
    M::store(inside, lock, Ordering::Release);
    M::light_fence();
    let mine = M::load(owner, Ordering::Relaxed) == me;
    if !mine {
        exit::<M>(inside);
    }
    mine
}

/// Gives back what [`enter`] or [`earn`] took.
#[inline]
pub(super) fn exit<M: AtomicOps>(inside: &M::Word) {
    M::store(inside, NO_LOCK, Ordering::Release);
}

/// Gives `me` the bias of a lock that it holds by turn, and whose note names nothing: from here on it holds it by bias, and
/// has to give back the turn. Otherwise it could enter what it is in already.
pub(super) fn grant<M: AtomicOps>(owner: &M::Word, me: usize, inside: &M::Word, lock: usize) {
    M::store(inside, lock, Ordering::Release);
    M::store(owner, me, Ordering::Relaxed);
}

/// Takes the bias from its owner, and waits until that one's note does not name `lock`. For who has the turn.
pub(super) fn revoke<M: AtomicOps>(
    owner: &M::Word,
    inside: &M::Word,
    lock: usize,
    mut relax: impl FnMut(),
) {
    M::store(owner, NO_OWNER, Ordering::Relaxed);
    M::heavy_fence();
    while M::load(inside, Ordering::Acquire) == lock {
        relax();
    }
}

#[cfg(test)]
mod model;
