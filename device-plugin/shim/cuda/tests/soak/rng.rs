//! Makes random choices that a seed repeats, for the soak and its programs.

#![allow(dead_code, reason = "each uses a part of it")]

use std::time::Duration;

/// A small random number generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Creates a generator from a seed.
    pub(crate) fn seeded(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Creates a generator for one purpose of a run.
    pub(crate) fn of(seed: u64, purpose: u64) -> Rng {
        let mut rng = Rng::seeded(seed ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        rng.below(2);
        rng
    }

    /// Returns a number below `sides`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// Returns a time below `most`, to the microsecond.
    pub(crate) fn time(&mut self, most: Duration) -> Duration {
        Duration::from_micros(self.below(most.as_micros() as u64))
    }
}
