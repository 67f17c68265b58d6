//! Threads that get biases and take them from one another, on the machine itself.

use std::sync::Barrier;

use super::*;

/// Takes the lock until the thread has its bias.
fn earn(lock: &Lock<u64>) {
    for _ in 0..100 * ENOUGH {
        drop(lock.lock());
        if SLOT.get() != NONE && owner(lock) == SLOT.get() {
            return;
        }
    }
    panic!("this kernel has the barrier, and nobody else comes so often");
}

fn owner<T>(lock: &Lock<T>) -> usize {
    // SAFETY: the lock itself is only looked at.
    unsafe { lock.raw() }.owner.load(Ordering::Relaxed)
}

#[test]
fn who_takes_a_lock_again_and_again_gets_its_bias_and_loses_it_to_the_next() {
    let lock = Lock::new(0);
    for _ in 0..ENOUGH {
        assert_eq!(owner(&lock), NOBODY);
        drop(lock.lock());
    }
    assert_eq!(owner(&lock), SLOT.get());
    assert_ne!(SLOT.get(), NONE, "this kernel has the barrier");
    std::thread::scope(|scope| {
        scope.spawn(|| *lock.lock() += 1);
    });
    assert_eq!(owner(&lock), NOBODY);
    assert_eq!(*lock.lock(), 1);
}

#[test]
fn a_lock_is_taken_once_however_it_was_taken() {
    let lock = Lock::new(0);
    for _ in 0..2 {
        let held = lock.lock();
        assert!(lock.try_lock().is_none(), "by the same thread");
        std::thread::scope(|scope| {
            let other = scope.spawn(|| lock.try_lock().is_none());
            assert!(other.join().expect("it ends"), "by another");
        });
        drop(held);
        earn(&lock);
    }
    assert_eq!(owner(&lock), SLOT.get(), "who only tried took no bias");
}

#[test]
fn what_is_taken_inside_of_another_lock_is_given_back_alone() {
    let locks = [Lock::new(0), Lock::new(0)];
    locks.iter().for_each(earn);
    let outer = locks[0].lock();
    let inner = locks[1].lock();
    assert!(holds_any(SLOT.get()));
    drop(inner);
    assert!(locks[1].try_lock().is_some() && locks[0].try_lock().is_none());
    // Whichever goes first.
    let inner = locks[1].lock();
    drop(outer);
    assert!(locks[0].try_lock().is_some() && locks[1].try_lock().is_none());
    drop(inner);
    assert!(locks.iter().all(|lock| lock.try_lock().is_some()));
    assert!(!holds_any(SLOT.get()));
}

#[test]
fn a_slot_goes_to_another_thread_after_its_own() {
    let taken = || {
        let slots = SLOTS.iter();
        slots
            .filter(|slot| slot.taken.load(Ordering::Relaxed))
            .count()
    };
    let lock = Lock::new(0);
    for _ in 0..2 * COUNT {
        std::thread::scope(|scope| {
            scope.spawn(|| *lock.lock() += 1);
        });
    }
    assert_eq!(*lock.lock(), 2 * COUNT as u64);
    assert!(taken() < COUNT / 2, "{} are taken", taken());
}

#[test]
fn threads_beyond_the_slots_do_without_a_bias() {
    let (lock, gate) = (Lock::new(0), Barrier::new(COUNT + 8));
    std::thread::scope(|scope| {
        for _ in 0..COUNT + 8 {
            scope.spawn(|| {
                *lock.lock() += 1;
                gate.wait();
                *lock.lock() += 1;
            });
        }
    });
    assert_eq!(*lock.lock(), 2 * (COUNT as u64 + 8));
}

/// The owner goes in and out at full speed, and another breaks in while it runs: a note that came too late to be seen would
/// let in both, and what one of them adds would be lost.
#[test]
fn nobody_is_inside_together_with_an_owner() {
    const BREAKS: u64 = 20_000;
    let lock = Lock::new(0);
    let (rounds, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            earn(&lock);
            let me = SLOT.get();
            while !done.load(Ordering::Relaxed) {
                let mut held = lock.lock();
                *held += 1;
                // Has its bias again at once, so that it is there whenever the other one comes.
                if !holds_any(me) {
                    // SAFETY: the lock itself is only looked at, by who has its turn.
                    unsafe { lock.raw() }.owner.store(me, Ordering::Relaxed);
                }
                drop(held);
                let one_more = rounds.load(Ordering::Relaxed) + 1;
                rounds.store(one_more, Ordering::Relaxed);
            }
        });
        for _ in 0..BREAKS {
            *lock.lock() += 1;
            let seen = rounds.load(Ordering::Relaxed);
            while rounds.load(Ordering::Relaxed) < seen + 3 {
                std::hint::spin_loop();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(*lock.lock(), rounds.into_inner() + BREAKS);
}
