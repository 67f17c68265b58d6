//! Holds values behind a lock that a forked child starts anew.
//!
//! A child has none of its parent's device memory, and the thread that held the lock does not exist
//! in the child.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A value that each process creates at its first use and never drops.
#[derive(Debug)]
pub(crate) struct ForkLocal<T>(AtomicPtr<Mutex<T>>);

impl<T: Default + 'static> ForkLocal<T> {
    /// Creates a cell without a value.
    pub(crate) const fn new() -> ForkLocal<T> {
        ForkLocal(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// Locks the value. A panic of another thread leaves the value usable.
    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        self.mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value unless another thread holds the lock.
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

    /// Forgets the parent's value, in a forked child.
    pub(crate) fn reset(&self) {
        self.0.store(std::ptr::null_mut(), Ordering::Release);
    }

    fn init(&self) -> &'static Mutex<T> {
        let value = Box::into_raw(Box::<Mutex<T>>::default());
        let first = self.0.compare_exchange(
            std::ptr::null_mut(),
            value,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match first {
            // SAFETY: made above, and never freed.
            Ok(_) => unsafe { &*value },
            Err(other) => {
                // SAFETY: made above, and no other thread has a pointer to it; the other value is
                // leaked.
                unsafe {
                    drop(Box::from_raw(value));
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
