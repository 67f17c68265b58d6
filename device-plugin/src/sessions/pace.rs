//! How fast a peer's messages are taken: a few at once, then one at a time.

use std::time::{Duration, Instant};

/// The time that a message takes of a budget, once its burst is used up.
const EVERY: Duration = Duration::from_millis(1);

/// A budget of messages: so many at once, and one every millisecond in the long run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    burst: u32,
    /// When everything that was taken so far is paid for; later than now while there is a debt.
    paid: Option<Instant>,
}

impl Pace {
    /// A budget that nothing was taken of.
    pub(super) const fn new(burst: u32) -> Pace {
        Pace { burst, paid: None }
    }

    /// Takes one message of the budget; how long to wait before it is dealt with.
    pub(super) fn take(&mut self, now: Instant) -> Duration {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + EVERY;
        self.paid = Some(paid);
        (paid - now).saturating_sub(EVERY * self.burst)
    }
}

/// Waits so long; not at all where there is nothing to wait for, while a sleep of zero takes a
/// tick of the timer.
pub(super) async fn wait(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_waits_for_nothing_and_what_follows_is_taken_one_a_millisecond() {
        let (mut pace, now) = (Pace::new(3), Instant::now());
        let waits: Vec<u128> = (0..6).map(|_| pace.take(now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 1, 2, 3]);
        let later = now + Duration::from_secs(1);
        assert_eq!(pace.take(later), Duration::ZERO, "the debt is paid");
    }

    #[test]
    fn a_peer_that_keeps_to_the_pace_never_waits() {
        let (mut pace, begun) = (Pace::new(1), Instant::now());
        for number in 0..1000 {
            assert_eq!(pace.take(begun + EVERY * number), Duration::ZERO);
        }
    }
}
