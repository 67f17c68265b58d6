//! How fast what containers ask for is done: for a time at once, then as fast as it is paid for.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The least time that a message takes of a budget.
const EVERY: Duration = Duration::from_millis(1);

/// What a message takes of its container's budget for each time that it took of a processor: one container keeps a
/// processor busy for an eighth of the time at most.
const SHARE: u32 = 8;

/// A budget of time: so much of it at once, and as much as passes in the long run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    allowance: Duration,
    /// When everything that was taken so far is paid for; later than now while there is a debt.
    paid: Option<Instant>,
}

impl Pace {
    /// A budget that nothing was taken of.
    pub(super) const fn new(allowance: Duration) -> Pace {
        Pace {
            allowance,
            paid: None,
        }
    }

    /// One of so many messages at once, and one every millisecond in the long run.
    pub(super) fn of_messages(burst: u32) -> Pace {
        Pace::new(EVERY * burst)
    }

    /// Takes one message of the budget; how long to wait before it is dealt with.
    pub(super) fn take(&mut self, now: Instant) -> Duration {
        self.charge(EVERY, now);
        self.debt(now)
    }

    /// Takes what a message cost beyond the least, once that is known.
    pub(super) fn settle(&mut self, processor: Duration, now: Instant) {
        let cost = processor.saturating_mul(SHARE);
        self.charge(cost.saturating_sub(EVERY), now);
    }

    /// Takes so much time of the budget.
    pub(super) fn charge(&mut self, cost: Duration, now: Instant) {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + cost;
        self.paid = Some(paid);
    }

    /// The same, where the budget has it.
    pub(super) fn try_charge(&mut self, cost: Duration, now: Instant) -> bool {
        let before = *self;
        self.charge(cost, now);
        let has = self.debt(now).is_zero();
        if !has {
            *self = before;
        }
        has
    }

    /// How long to wait until no more than the allowance is owed.
    pub(super) fn debt(&self, now: Instant) -> Duration {
        let owed = self.paid.map(|paid| paid.saturating_duration_since(now));
        owed.unwrap_or_default().saturating_sub(self.allowance)
    }
}

/// What `work` takes of a processor: a machine that is busy with others is not its doing.
pub(super) fn measured<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = processor_time();
    let came_to = work();
    (came_to, processor_time().saturating_sub(before))
}

/// What this thread had of a processor.
fn processor_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime)
        .try_into()
        .unwrap_or_default()
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
        let (mut pace, now) = (Pace::of_messages(3), Instant::now());
        let waits: Vec<u128> = (0..6).map(|_| pace.take(now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 1, 2, 3]);
        let later = now + Duration::from_secs(1);
        assert_eq!(pace.take(later), Duration::ZERO, "the debt is paid");
    }

    #[test]
    fn a_peer_that_keeps_to_the_pace_never_waits() {
        let (mut pace, begun) = (Pace::of_messages(1), Instant::now());
        for number in 0..1000 {
            assert_eq!(pace.take(begun + EVERY * number), Duration::ZERO);
        }
    }

    #[test]
    fn message_pays_for_the_processor_that_it_took() {
        let (mut pace, now) = (Pace::of_messages(1), Instant::now());
        assert_eq!(pace.take(now), Duration::ZERO);
        pace.settle(EVERY / SHARE, now);
        assert_eq!(pace.debt(now), Duration::ZERO, "a cheap one is paid for");
        pace.settle(Duration::from_millis(2), now);
        assert_eq!(pace.debt(now), Duration::from_millis(15));
        assert_eq!(pace.take(now), Duration::from_millis(16));
    }

    #[test]
    fn budget_is_left_alone_when_it_has_too_little() {
        let (mut pace, now) = (Pace::new(Duration::from_secs(3)), Instant::now());
        let second = Duration::from_secs(1);
        let had = [(); 5].map(|()| pace.try_charge(second, now));
        assert_eq!(had, [true, true, true, false, false]);
        assert!(pace.try_charge(second, now + second));
        assert!(!pace.try_charge(second, now + second));
    }

    #[test]
    fn processor_time_is_of_work_and_not_of_sleep() {
        let (_, slept) = measured(|| std::thread::sleep(Duration::from_millis(30)));
        let begun = Instant::now();
        let spin =
            || while processor_time().is_zero() || begun.elapsed() < Duration::from_millis(30) {};
        let (_, spun) = measured(spin);
        assert!(slept < Duration::from_millis(15), "{slept:?}");
        assert!(spun > slept, "{spun:?}, {slept:?}");
    }
}
