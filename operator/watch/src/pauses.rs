//! Computes the pauses between attempts of a watch.

use std::time::Duration;

/// Pauses that double up to a bound. Jitter adds up to as much, which spreads the clients of a
/// large cluster over time.
#[derive(Clone, Debug)]
pub struct Pauses {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Pauses {
    /// Pauses from `first` to `longest`, before jitter.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            failures: 0,
        }
    }

    /// The pause after one more failure.
    pub(crate) fn next(&mut self) -> Duration {
        let doubled = 2_u32.saturating_pow(self.failures);
        self.failures = self.failures.saturating_add(1);
        let pause = self.first.saturating_mul(doubled).min(self.longest);
        pause.mul_f64(rand::random_range(1.0..2.0))
    }

    /// The next failure counts as the first.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_doubles_up_to_the_longest() {
        let (first, longest) = (Duration::from_millis(500), Duration::from_secs(5));
        let mut pauses = Pauses::new(first, longest);
        for full in [0.5, 1.0, 2.0, 4.0, 5.0, 5.0].map(Duration::from_secs_f64) {
            let pause = pauses.next();
            assert!((full..2 * full).contains(&pause), "{pause:?} for {full:?}");
        }
        for _ in 0..100 {
            assert!(pauses.next() < 2 * longest);
        }
        pauses.reset();
        assert!(pauses.next() < 2 * first);
    }
}
