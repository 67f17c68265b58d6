//! How fast what containers ask for is done: for a time at once, then as fast as it is paid for.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The least time that a message takes of a budget.
const MESSAGE_COST: Duration = Duration::from_millis(1);

/// What a message takes of its container's budget for each time that it took of a processor: one container keeps a
/// processor busy for an eighth of the time at most.
const CPU_COST_FACTOR: u32 = 8;

/// A budget of time: so much of it at once, and as much as passes in the long run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimiter {
    burst: Duration,
    /// When everything that was taken so far is paid for; later than now while there is a debt.
    paid_until: Option<Instant>,
}

impl RateLimiter {
    /// A budget that nothing was taken of.
    pub(super) const fn new(allowance: Duration) -> RateLimiter {
        RateLimiter {
            burst: allowance,
            paid_until: None,
        }
    }

    /// One of so many messages at once, and one every millisecond in the long run.
    pub(super) fn for_messages(burst: u32) -> RateLimiter {
        RateLimiter::new(MESSAGE_COST * burst)
    }

    /// Takes one message of the budget; how long to wait before it is dealt with.
    pub(super) fn charge_message(&mut self, now: Instant) -> Duration {
        self.charge(MESSAGE_COST, now);
        self.wait_time(now)
    }

    /// Takes what a message cost beyond the least, once that is known.
    pub(super) fn charge_cpu_time(&mut self, processor: Duration, now: Instant) {
        let cost = processor.saturating_mul(CPU_COST_FACTOR);
        self.charge(cost.saturating_sub(MESSAGE_COST), now);
    }

    /// Takes so much time of the budget.
    pub(super) fn charge(&mut self, cost: Duration, now: Instant) {
        let paid = self.paid_until.map_or(now, |paid| paid.max(now)) + cost;
        self.paid_until = Some(paid);
    }

    /// The same, where the budget has it.
    pub(super) fn try_charge(&mut self, cost: Duration, now: Instant) -> bool {
        let before = *self;
        self.charge(cost, now);
        let has = self.wait_time(now).is_zero();
        if !has {
            *self = before;
        }
        has
    }

    /// How long to wait until no more than the allowance is owed.
    pub(super) fn wait_time(&self, now: Instant) -> Duration {
        let owed = self
            .paid_until
            .map(|paid| paid.saturating_duration_since(now));
        owed.unwrap_or_default().saturating_sub(self.burst)
    }
}

/// What `work` takes of a processor: a machine that is busy with others is not its doing.
pub(super) fn measure_cpu_time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_cpu_time();
    let came_to = work();
    (came_to, thread_cpu_time().saturating_sub(before))
}

/// What this thread had of a processor.
fn thread_cpu_time() -> Duration {
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
    fn messages_are_paced_at_one_a_millisecond_after_a_burst() {
        let (mut pace, now) = (RateLimiter::for_messages(3), Instant::now());
        let waits: Vec<u128> = (0..6)
            .map(|_| pace.charge_message(now).as_millis())
            .collect();
        assert_eq!(waits, [0, 0, 0, 1, 2, 3]);
        let later = now + Duration::from_secs(1);
        assert_eq!(
            pace.charge_message(later),
            Duration::ZERO,
            "the debt is paid"
        );
    }

    #[test]
    fn message_never_waits_when_the_peer_stays_below_the_rate() {
        let (mut pace, begun) = (RateLimiter::for_messages(1), Instant::now());
        for number in 0..1000 {
            assert_eq!(
                pace.charge_message(begun + MESSAGE_COST * number),
                Duration::ZERO
            );
        }
    }

    #[test]
    fn message_is_charged_for_its_cpu_time() {
        let (mut pace, now) = (RateLimiter::for_messages(1), Instant::now());
        assert_eq!(pace.charge_message(now), Duration::ZERO);
        pace.charge_cpu_time(MESSAGE_COST / CPU_COST_FACTOR, now);
        assert_eq!(
            pace.wait_time(now),
            Duration::ZERO,
            "a cheap one is paid for"
        );
        pace.charge_cpu_time(Duration::from_millis(2), now);
        assert_eq!(pace.wait_time(now), Duration::from_millis(15));
        assert_eq!(pace.charge_message(now), Duration::from_millis(16));
    }

    #[test]
    fn budget_is_unchanged_when_it_has_too_little() {
        let (mut pace, now) = (RateLimiter::new(Duration::from_secs(3)), Instant::now());
        let second = Duration::from_secs(1);
        let had = [(); 5].map(|()| pace.try_charge(second, now));
        assert_eq!(had, [true, true, true, false, false]);
        assert!(pace.try_charge(second, now + second));
        assert!(!pace.try_charge(second, now + second));
    }

    #[test]
    fn cpu_time_counts_work_and_not_sleep() {
        let (_, slept) = measure_cpu_time(|| std::thread::sleep(Duration::from_millis(30)));
        let begun = Instant::now();
        let spin =
            || while thread_cpu_time().is_zero() || begun.elapsed() < Duration::from_millis(30) {};
        let (_, spun) = measure_cpu_time(spin);
        assert!(slept < Duration::from_millis(15), "{slept:?}");
        assert!(spun > slept, "{spun:?}, {slept:?}");
    }
}
