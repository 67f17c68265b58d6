//! Runs threads that get biases and revoke each other's, on the real machine.

use std::collections::BTreeSet;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

use super::*;

/// Serializes the tests, because one of them takes all slots.
fn serialize_tests() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock until the thread has its bias.
fn acquire_bias(lock: &BiasedLock<u64>) {
    register_membarrier();
    for _ in 0..100 * BIAS_THRESHOLD {
        drop(lock.lock());
        if SLOT.get() != NO_SLOT && owner(lock) == SLOT.get() {
            return;
        }
    }
    panic!("this kernel has the barrier, and nobody else comes so often");
}

fn owner<T>(lock: &BiasedLock<T>) -> usize {
    // SAFETY: the raw lock is only read.
    unsafe { lock.raw() }.owner.load(Ordering::Relaxed)
}

#[test]
fn bias_is_granted_after_the_threshold_and_revoked() {
    let _alone = serialize_tests();
    register_membarrier();
    let lock = BiasedLock::new(0);
    for _ in 0..BIAS_THRESHOLD {
        assert_eq!(owner(&lock), NO_OWNER);
        drop(lock.lock());
    }
    assert_eq!(owner(&lock), SLOT.get());
    assert_ne!(SLOT.get(), NO_SLOT, "this kernel has the barrier");
    std::thread::scope(|scope| {
        scope.spawn(|| *lock.lock() += 1);
    });
    assert_eq!(owner(&lock), NO_OWNER);
    assert_eq!(*lock.lock(), 1);
}

/// Returns whether both this and another thread fail to take the lock.
fn is_held(lock: &BiasedLock<u64>) -> bool {
    let by_another = || {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| lock.try_lock().is_none());
            other.join().expect("it ends")
        })
    };
    lock.try_lock().is_none() && by_another()
}

#[test]
fn lock_is_exclusive_by_spin_and_by_bias() {
    let _alone = serialize_tests();
    let lock = BiasedLock::new(0);
    let held = lock.lock();
    assert!(is_held(&lock), "by turn");
    drop(held);
    acquire_bias(&lock);
    let held = lock.lock();
    assert!(is_held(&lock), "by bias");
    assert_eq!(owner(&lock), SLOT.get(), "who only tried took no bias");
    drop(held);
    assert!(lock.try_lock().is_some());
}

#[test]
fn lock_is_not_reentrant_when_the_bias_is_granted() {
    let _alone = serialize_tests();
    register_membarrier();
    let lock = BiasedLock::new(0);
    for taken in 1..=2 * BIAS_THRESHOLD {
        let held = lock.lock();
        assert!(lock.try_lock().is_none(), "at the {taken}th time");
        drop(held);
    }
    assert_eq!(owner(&lock), SLOT.get());
}

#[test]
fn nested_locks_are_released_independently() {
    let _alone = serialize_tests();
    let locks = [BiasedLock::new(0), BiasedLock::new(0)];
    locks.iter().for_each(acquire_bias);
    let outer = locks[0].lock();
    let inner = locks[1].lock();
    assert!(holds_biased_lock(SLOT.get()));
    drop(inner);
    assert!(locks[1].try_lock().is_some() && locks[0].try_lock().is_none());
    // Either may be released first.
    let inner = locks[1].lock();
    drop(outer);
    assert!(locks[0].try_lock().is_some() && locks[1].try_lock().is_none());
    drop(inner);
    assert!(locks.iter().all(|lock| lock.try_lock().is_some()));
    assert!(!holds_biased_lock(SLOT.get()));
}

fn claimed_slots() -> usize {
    let slots = SLOTS.iter();
    slots
        .filter(|slot| slot.claimed.load(Ordering::Relaxed))
        .count()
}

#[test]
fn slot_passes_with_its_biases_to_another_thread() {
    let _alone = serialize_tests();
    let lock = BiasedLock::new(0);
    let mut slots = BTreeSet::new();
    for _ in 0..2 * SLOT_COUNT {
        let slot = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // The bias is that of an earlier thread, which may have had this thread's slot.
                *lock.lock() += 1;
                acquire_bias(&lock);
                SLOT.get()
            });
            thread.join().expect("it ends")
        });
        assert_ne!(slot, NO_SLOT);
        slots.insert(slot);
    }
    assert_eq!(*lock.lock(), 2 * SLOT_COUNT as u64);
    assert!(slots.len() < SLOT_COUNT / 2, "{slots:?}");
}

#[test]
fn threads_beyond_the_slots_get_no_bias() {
    let _alone = serialize_tests();
    register_membarrier();
    let (shared, gate) = (BiasedLock::new(0), Barrier::new(SLOT_COUNT + 8));
    let without = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..SLOT_COUNT + 8)
            .map(|_| {
                scope.spawn(|| {
                    let own = BiasedLock::new(0_u64);
                    (0..2 * BIAS_THRESHOLD).for_each(|_| *own.lock() += 1);
                    *shared.lock() += 1;
                    gate.wait();
                    assert_eq!(*own.lock(), u64::from(2 * BIAS_THRESHOLD));
                    SLOT.get() == NO_SLOT
                })
            })
            .collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().expect("it ends"));
        ended.filter(|&without| without).count()
    });
    assert!(without >= 9, "{without}");
    assert_eq!(*shared.lock(), SLOT_COUNT as u64 + 8);
    assert!(
        claimed_slots() < SLOT_COUNT / 2,
        "{} are taken",
        claimed_slots()
    );
}

/// The owner locks at full speed while another thread revokes. If the revoker missed a note, both
/// would enter, and an increment would be lost.
#[test]
fn revoker_never_enters_beside_the_owner() {
    let _alone = serialize_tests();
    const REVOCATIONS: u64 = 20_000;
    let lock = BiasedLock::new(0);
    let (rounds, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            acquire_bias(&lock);
            let me = SLOT.get();
            while !done.load(Ordering::Relaxed) {
                let mut held = lock.lock();
                *held += 1;
                // Restores the bias at once, so that each revocation finds one.
                if !holds_biased_lock(me) {
                    // SAFETY: this thread holds the spin lock and writes only the owner word.
                    unsafe { lock.raw() }.owner.store(me, Ordering::Relaxed);
                }
                drop(held);
                let one_more = rounds.load(Ordering::Relaxed) + 1;
                rounds.store(one_more, Ordering::Relaxed);
            }
        });
        for _ in 0..REVOCATIONS {
            *lock.lock() += 1;
            let rounds_before = rounds.load(Ordering::Relaxed);
            while rounds.load(Ordering::Relaxed) < rounds_before + 3 {
                std::hint::spin_loop();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(*lock.lock(), rounds.into_inner() + REVOCATIONS);
}
