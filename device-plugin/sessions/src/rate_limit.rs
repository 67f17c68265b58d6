//! Limits the rate of messages by processor time: a burst at once, then no faster than time passes.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The least cost of a message.
const MESSAGE_COST: Duration = Duration::from_millis(1);

/// The cost of a message for each unit of processor time: one container keeps a processor busy for
/// an eighth of the time at most.
const CPU_COST_FACTOR: u32 = 8;

/// A budget of time, as in the generic cell rate algorithm (GCRA): a burst at once, and real time
/// in the long run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimiter {
    burst: Duration,
    /// The time at which all charges are paid; a time in the future is a debt.
    paid_until: Option<Instant>,
}

impl RateLimiter {
    /// Creates a full budget.
    pub(super) const fn new(allowance: Duration) -> RateLimiter {
        RateLimiter {
            burst: allowance,
            paid_until: None,
        }
    }

    /// Allows `burst` messages at once, and one each millisecond in the long run.
    pub(super) fn for_messages(burst: u32) -> RateLimiter {
        RateLimiter::new(MESSAGE_COST * burst)
    }

    /// Charges one message, and returns the time to wait before it is handled.
    pub(super) fn charge_message(&mut self, now: Instant) -> Duration {
        self.charge(MESSAGE_COST, now);
        self.wait_time(now)
    }

    /// Charges the processor time of a message beyond the least cost, once the time is known.
    pub(super) fn charge_cpu_time(&mut self, cpu_time: Duration, now: Instant) {
        let cost = cpu_time.saturating_mul(CPU_COST_FACTOR);
        self.charge(cost.saturating_sub(MESSAGE_COST), now);
    }

    /// Charges a cost, whether or not the budget has it.
    pub(super) fn charge(&mut self, cost: Duration, now: Instant) {
        let paid = self.paid_until.map_or(now, |paid| paid.max(now)) + cost;
        self.paid_until = Some(paid);
    }

    /// Charges a cost, but no more than makes the time to wait `most`.
    pub(super) fn charge_at_most(&mut self, cost: Duration, most: Duration, now: Instant) {
        let before = self.paid_until;
        self.charge(cost, now);
        let limit = now + self.burst + most;
        self.paid_until = self.paid_until.min(Some(limit)).max(before);
    }

    /// Charges a cost if the budget has it, and returns whether it does.
    pub(super) fn try_charge(&mut self, cost: Duration, now: Instant) -> bool {
        let before = *self;
        self.charge(cost, now);
        let has = self.wait_time(now).is_zero();
        if !has {
            *self = before;
        }
        has
    }

    /// The time until the debt is no more than the burst.
    pub(super) fn wait_time(&self, now: Instant) -> Duration {
        let owed = self
            .paid_until
            .map(|paid| paid.saturating_duration_since(now));
        owed.unwrap_or_default().saturating_sub(self.burst)
    }
}

/// Measures the processor time of `work`, which other load on the machine does not change.
pub(super) fn measure_cpu_time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_cpu_time();
    let result = work();
    (result, thread_cpu_time().saturating_sub(before))
}

fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime)
        .try_into()
        .unwrap_or_default()
}

/// Waits, but not at all for a time of zero: a sleep of zero takes a tick of the timer.
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
        let (mut pace, start) = (RateLimiter::for_messages(1), Instant::now());
        for number in 0..1000 {
            assert_eq!(
                pace.charge_message(start + MESSAGE_COST * number),
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
        let start = Instant::now();
        let spin =
            || while thread_cpu_time().is_zero() || start.elapsed() < Duration::from_millis(30) {};
        let (_, spun) = measure_cpu_time(spin);
        assert!(slept < Duration::from_millis(15), "{slept:?}");
        assert!(spun > slept, "{spun:?}, {slept:?}");
    }
}
