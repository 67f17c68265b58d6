//! Holds values behind a lock that a forked child starts anew.
//!
//! A child has none of its parent's device memory, and the thread that held the lock does not exist
//! in the child.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A value behind a lock, which each process creates at its first use and never drops.
#[derive(Debug)]
pub(crate) struct ForkLocal<T, L = Mutex<T>>(AtomicPtr<L>, PhantomData<fn() -> T>);

impl<T, L: Default + 'static> ForkLocal<T, L> {
    /// Creates a cell without a value.
    pub(crate) const fn new() -> ForkLocal<T, L> {
        ForkLocal(AtomicPtr::new(std::ptr::null_mut()), PhantomData)
    }

    /// Returns the lock.
    pub(crate) fn inner(&self) -> &'static L {
        // SAFETY: the pointer is null or a leaked value.
        match unsafe { self.0.load(Ordering::Acquire).as_ref() } {
            Some(lock) => lock,
            None => self.init(),
        }
    }

    /// Forgets the parent's value, in a forked child.
    pub(crate) fn reset(&self) {
        self.0.store(std::ptr::null_mut(), Ordering::Release);
    }

    fn init(&self) -> &'static L {
        let value = Box::into_raw(Box::<L>::default());
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

impl<T: Default + 'static> ForkLocal<T> {
    /// Locks the value. A panic of another thread leaves the value usable.
    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        self.inner().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value unless another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'static, T>> {
        match self.inner().try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
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
