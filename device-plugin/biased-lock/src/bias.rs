//! Implements the bias: the owner locks by a store to its own note, and a revoker takes the bias
//! away.
//!
//! The owner writes its note and then reads the owner word. A revoker clears the owner word and
//! then reads the note. With a full barrier between both steps on either side, at least one of them
//! sees the other's write. The owner's barrier is only the compiler's; the revoker makes the kernel
//! run a barrier on every running thread (`membarrier`).
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

/// No thread has the bias.
pub(super) const NO_OWNER: usize = usize::MAX;
/// The note names no lock.
pub(super) const NO_LOCK: usize = 0;

/// Atomic operations of the machine, or of a model checker in tests.
pub(super) trait AtomicOps {
    /// Word that several threads share.
    type Word;
    fn load(word: &Self::Word, order: Ordering) -> usize;
    fn store(word: &Self::Word, value: usize, order: Ordering);
    /// Owner's side of an asymmetric fence.
    fn light_fence();
    /// Revoker's side of an asymmetric fence: a full barrier in this and every other thread.
    fn heavy_fence();
}

/// Locks `lock` by the bias of `me`, if `me` still has the bias and its note names no lock.
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
    // A revoker that waits for another lock may read this store, and must see the earlier critical
    // section.
    M::store(inside, lock, Ordering::Release);
    M::light_fence();
    let is_owner = M::load(owner, Ordering::Relaxed) == me;
    if !is_owner {
        exit::<M>(inside);
    }
    is_owner
}

/// Releases a lock that [`enter`] or [`grant`] took.
#[inline]
pub(super) fn exit<M: AtomicOps>(inside: &M::Word) {
    M::store(inside, NO_LOCK, Ordering::Release);
}

/// Gives the bias to `me`, which holds the spin lock and whose note names no lock.
///
/// From here on `me` holds the lock by its bias and must release the spin lock. Without the note,
/// `me` could enter the lock a second time.
pub(super) fn grant<M: AtomicOps>(owner: &M::Word, me: usize, inside: &M::Word, lock: usize) {
    M::store(inside, lock, Ordering::Release);
    M::store(owner, me, Ordering::Relaxed);
}

/// Revokes the bias and waits until the owner's note does not name `lock`. The caller holds the
/// spin lock.
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
