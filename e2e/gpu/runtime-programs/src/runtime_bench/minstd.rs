//! Generates the random numbers of RMM's benchmark with libstdc++, number for number.
//!
//! These are `std::default_random_engine` and `std::uniform_int_distribution`, so that both
//! programs request the same sizes in the same order.

/// `std::minstd_rand0`: x' = 16807 x mod 2^31 - 1.
pub(crate) struct Minstd(u64);

const MODULUS: u64 = (1 << 31) - 1;

impl Minstd {
    /// Creates a generator; C++'s default seed is 1.
    pub(crate) fn new(seed: u64) -> Minstd {
        Minstd(seed)
    }

    /// Returns an integer from `low` to `high`, both inclusive.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        // The engine returns 1 to MODULUS - 1. Values beyond the largest multiple of the range are
        // drawn again.
        let engine_range = MODULUS - 2;
        let values = high - low + 1;
        let scaling = engine_range / values;
        loop {
            self.0 = self.0 * 16807 % MODULUS;
            let drawn = self.0 - 1;
            if drawn < values * scaling {
                return drawn / scaling + low;
            }
        }
    }
}
