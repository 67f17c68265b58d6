//! Changes one credit word in shared memory, from the process and the agent at the same time.
//!
//! Every step replaces the whole word by one compare-and-swap. So a process that is killed or
//! stopped at any point leaves a valid word, and no side ever waits. [`model`] runs the steps in
//! every order.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::credit::{CreditError, CreditWord};

/// The atomic operations of a word. The page uses the standard library's, tests those of a model
/// checker.
pub(crate) trait AtomicU64Like {
    /// Returns the current bits.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces all bits.
    fn store(&self, bits: u64, order: Ordering);
    /// Replaces all bits and returns the old ones.
    fn swap(&self, bits: u64, order: Ordering) -> u64;
    /// Replaces `from` by `to`, or returns the current bits. May fail spuriously.
    fn replace(&self, from: u64, to: u64) -> Result<u64, u64>;
}

/// Implements the trait for the standard library's type, or for the model checker's.
macro_rules! atomic_u64_like {
    ($atomic:ty) => {
        impl AtomicU64Like for $atomic {
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            fn store(&self, bits: u64, order: Ordering) {
                self.store(bits, order);
            }

            fn swap(&self, bits: u64, order: Ordering) -> u64 {
                self.swap(bits, order)
            }

            fn replace(&self, from: u64, to: u64) -> Result<u64, u64> {
                self.compare_exchange_weak(from, to, Ordering::AcqRel, Ordering::Relaxed)
            }
        }
    };
}
atomic_u64_like!(AtomicU64);

/// How often the agent tries to change a word, because threads of a tenant process may write it
/// without pause.
const MAX_ATTEMPTS: u32 = 1000;

/// A credit word in memory.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct AtomicCredit<A>(A);

impl<A: AtomicU64Like> AtomicCredit<A> {
    /// Returns the current word.
    pub(crate) fn word(&self) -> CreditWord {
        CreditWord::unpack(self.0.load(Ordering::Acquire))
    }

    /// See [`crate::credit_page::AccountSlot::charge`].
    pub(crate) fn charge(&self, n: u32) -> Result<(), CreditError> {
        self.update(|word| word.charge(n)).map(drop)
    }

    /// See [`crate::credit_page::AccountSlot::discharge`].
    pub(crate) fn discharge(&self, n: u32) -> bool {
        self.update(|word| word.discharge(n).ok_or(())).is_ok()
    }

    /// See [`crate::credit_page::AccountSlot::grant`].
    pub(crate) fn grant(&self, n: u32) -> bool {
        self.update_within(MAX_ATTEMPTS, |word| word.grant(n).ok_or(()))
            .is_some_and(|granted| granted.is_ok())
    }

    /// See [`crate::credit_page::AccountSlot::reclaim`].
    pub(crate) fn reclaim(&self, at_most: u32) -> u32 {
        let step = |word: CreditWord| match word.reclaim(at_most) {
            (_, 0) => Err(()),
            (after, _) => Ok(after),
        };
        let before = self.update_within(MAX_ATTEMPTS, step).and_then(Result::ok);
        before.map_or(0, |before| before.reclaim(at_most).1)
    }

    /// See [`crate::credit_page::AccountSlot::set`].
    pub(crate) fn set(&self, word: CreditWord) {
        self.0.store(word.pack(), Ordering::Release);
    }

    /// See [`crate::credit_page::AccountSlot::freeze`].
    pub(crate) fn freeze(&self) -> CreditWord {
        CreditWord::unpack(
            self.0
                .swap(CreditWord::<u32>::FROZEN.pack(), Ordering::AcqRel),
        )
    }

    /// Replaces the word by the result of `step`. Returns the old word, or the error of `step`.
    fn update<E>(
        &self,
        step: impl Fn(CreditWord) -> Result<CreditWord, E>,
    ) -> Result<CreditWord, E> {
        let mut bits = self.0.load(Ordering::Relaxed);
        loop {
            let after = step(CreditWord::unpack(bits))?.pack();
            match self.0.replace(bits, after) {
                Ok(before) => return Ok(CreditWord::unpack(before)),
                Err(now) => bits = now,
            }
        }
    }

    /// Replaces the word by the result of `step`, in at most `tries` attempts. Returns `None` where
    /// each failed.
    fn update_within<E>(
        &self,
        tries: u32,
        step: impl Fn(CreditWord) -> Result<CreditWord, E>,
    ) -> Option<Result<CreditWord, E>> {
        let mut bits = self.0.load(Ordering::Relaxed);
        for _ in 0..tries {
            let after = match step(CreditWord::unpack(bits)) {
                Ok(after) => after.pack(),
                Err(error) => return Some(Err(error)),
            };
            match self.0.replace(bits, after) {
                Ok(before) => return Some(Ok(CreditWord::unpack(before))),
                Err(now) => bits = now,
            }
        }
        None
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Another thread always wins the race.
    #[derive(Default)]
    struct Contended(AtomicU32);

    impl AtomicU64Like for Contended {
        fn load(&self, _order: Ordering) -> u64 {
            let word: CreditWord = CreditWord {
                granted: 5,
                used: 2,
            };
            word.pack()
        }

        fn store(&self, _bits: u64, _order: Ordering) {}

        fn swap(&self, bits: u64, _order: Ordering) -> u64 {
            bits
        }

        fn replace(&self, from: u64, _to: u64) -> Result<u64, u64> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(from)
        }
    }

    #[test]
    fn agent_gives_up_when_a_word_is_written_without_pause() {
        let cell = AtomicCredit(Contended::default());
        assert!(!cell.grant(1));
        assert_eq!(cell.reclaim(1), 0);
        assert_eq!(cell.0.0.load(Ordering::Relaxed), 2 * MAX_ATTEMPTS);
    }
}
