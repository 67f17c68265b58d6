//! Values behind a lock that a forked child starts afresh.
//!
//! A child has none of its parent's device memory, and a thread that held the lock does not live there.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A value that is made at its first use in each process, and never dropped.
#[derive(Debug)]
pub(crate) struct ForkLocal<T>(AtomicPtr<Mutex<T>>);

impl<T: Default + 'static> ForkLocal<T> {
    /// A value that is not made yet.
    pub(crate) const fn new() -> ForkLocal<T> {
        ForkLocal(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// Locks the value. A panic of another thread leaves it usable.
    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        self.mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value unless it is locked.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'static, T>> {
        match self.mutex().try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn mutex(&self) -> &'static Mutex<T> {
        // SAFETY: the pointer is null or a leaked value.
        match unsafe { self.0.load(Ordering::Acquire).as_ref() } {
            Some(mutex) => mutex,
            None => self.init(),
        }
    }

    /// In a forked child: forgets the parent's value.
    pub(crate) fn reset(&self) {
        self.0.store(std::ptr::null_mut(), Ordering::Release);
    }

    fn init(&self) -> &'static Mutex<T> {
        let made = Box::into_raw(Box::<Mutex<T>>::default());
        let first = self.0.compare_exchange(
            std::ptr::null_mut(),
            made,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match first {
            // SAFETY: made above, and never freed.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: made above, and nobody else has it; the other is leaked.
                unsafe {
                    drop(Box::from_raw(made));
                    &*other
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_reset_even_while_its_lock_is_held() {
        let value = ForkLocal::<u32>::new();
        *value.lock() = 7;
        assert_eq!(*value.lock(), 7);
        let guard = value.lock();
        value.reset();
        assert_eq!(*value.lock(), 0);
        drop(guard);
    }
}
