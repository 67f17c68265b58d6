//! Decides whether one GPU is fit for new pods, from XIDs and probes.
//!
//! ```text
//!            xid of the GPU, lost, a call that hangs, or N failed probes in a row
//!   Healthy ------------------------------------------------------> Unhealthy
//!      ^                                                               |  | any bad news: the quiet
//!      |        quiet for `quiet` and `probes` good ones in a row      |  | time starts again
//!      +---------------------------------------------------------------+ <+
//! ```
//!
//! After an XID whose remedy is a reset, good probes mean nothing by themselves: the GPU must have been away
//! since, as every reset takes it away, or the node must have booted ([`Memory`] outlives the agent). Nobody sees what is
//! done to a GPU that is drained: afterwards it counts as having been away.
//!
//! A GPU that falls sick again soon after a recovery must stay quiet twice as long, up to a
//! bound: so a flapping GPU settles. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::xid::{Verdict, verdict};

/// Why a GPU is unfit for new pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sickness {
    /// An XID that condemns the whole GPU.
    Xid(u64),
    /// NVML no longer finds it.
    Lost,
    /// NVML finds it and cannot read it, or a call about it hangs.
    NoAnswer,
    /// The process that makes its kept memory hangs in the driver, and cannot be killed.
    WorkerStuck,
    /// It is to be drained, and something holds it still.
    Draining,
    /// Nothing of ours holds it: it is not even looked at.
    Drained,
}

impl Sickness {
    /// One word for conditions, events and metric labels.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Xid(_) => "Xid",
            Self::Lost => "GpuLost",
            Self::NoAnswer => "NoAnswer",
            Self::WorkerStuck => "WorkerStuck",
            Self::Draining => "Draining",
            Self::Drained => "Drained",
        }
    }
}

impl std::fmt::Display for Sickness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Xid(code) => write!(f, "XID {code}"),
            Self::Lost => f.write_str("the GPU is lost"),
            Self::NoAnswer => f.write_str("the GPU does not answer"),
            Self::WorkerStuck => f.write_str("a worker hangs in the driver"),
            Self::Draining => f.write_str("the GPU is being drained"),
            Self::Drained => f.write_str("the GPU is drained"),
        }
    }
}

/// Whether new pods may get a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Fit.
    Healthy,
    /// Unfit, and why.
    Unhealthy(Sickness),
}

impl Health {
    /// True for [`Health::Healthy`].
    pub fn is_healthy(self) -> bool {
        self == Self::Healthy
    }
}

/// One piece of news about a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// A probe read its memory.
    Answered,
    /// A probe found the GPU and got an error from it.
    Silent,
    /// NVML could not be asked: nothing is known of what the GPU has.
    NotAsked,
    /// A call about it did not return in time: nothing is known of what the GPU has.
    Hung,
    /// NVML did not list the GPU, or called it lost.
    Missing,
    /// NVML reported this XID.
    Xid(u64),
    /// It is drained: nobody looks at it any more.
    Drained,
}

/// How quickly a [`Monitor`] changes its mind.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Failed probes in a row before the GPU is Unhealthy.
    pub failures: u32,
    /// Good probes in a row before it is Healthy again.
    pub probes: u32,
    /// Time without bad news before it is Healthy again.
    pub quiet: Duration,
    /// The longest quiet time that relapses can lead to.
    pub quiet_max: Duration,
    /// A relapse within this time of a recovery doubles the quiet time.
    pub relapse: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            failures: 3,
            probes: 3,
            quiet: Duration::from_secs(10),
            quiet_max: Duration::from_secs(300),
            relapse: Duration::from_secs(600),
        }
    }
}

/// What of a GPU's health a successor in the same boot must know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Memory {
    /// Whether the GPU is away: missing, or without an answer for long. Its memory is lost when it is back.
    pub away: bool,
    /// The XID that only a reset cures, until the GPU was away.
    pub awaits_reset: Option<u64>,
    /// Whether it is away because it is drained.
    pub drained: bool,
}

impl Memory {
    /// The same once whatever took the GPU away is over.
    fn here(self) -> Self {
        Self {
            away: false,
            awaits_reset: self.awaits_reset.filter(|_| !self.away),
            ..self
        }
    }
}

/// What is known of one GPU's health.
#[derive(Debug, Clone)]
pub struct Monitor {
    policy: Policy,
    state: State,
    memory: Memory,
    /// Failed probes in a row.
    failures: u32,
    /// Those of them that the GPU itself did not answer.
    silences: u32,
    /// The quiet time that the next recovery takes.
    quiet: Duration,
    recovered: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Healthy,
    Unhealthy {
        why: Sickness,
        bad_news: Instant,
        probes: u32,
    },
}

impl Monitor {
    /// A GPU that NVML listed just now: healthy until there is news, unless a predecessor in the same boot
    /// left it waiting for a reset.
    pub fn new(policy: Policy, memory: Memory, now: Instant) -> Self {
        let memory = match memory.drained {
            true => memory,
            false => memory.here(),
        };
        Self::unlisted(policy, memory, now)
    }

    /// A GPU that NVML does not list, as a predecessor in the same boot left it.
    pub fn unlisted(policy: Policy, memory: Memory, now: Instant) -> Self {
        let mut monitor = Self {
            policy,
            state: State::Healthy,
            memory,
            failures: 0,
            silences: 0,
            quiet: policy.quiet,
            recovered: None,
        };
        let why = match memory {
            Memory { drained: true, .. } => Some(Sickness::Drained),
            Memory {
                awaits_reset: Some(code),
                ..
            } => Some(Sickness::Xid(code)),
            Memory { away: true, .. } => Some(Sickness::Lost),
            Memory { .. } => None,
        };
        if let Some(why) = why {
            monitor.state = monitor.fall(why, now);
        }
        monitor
    }

    /// A GPU that did not answer and was well before: nobody here has seen it so.
    pub fn doubt(&mut self, now: Instant) {
        if matches!(self.state, State::Healthy) {
            self.state = self.fall(Sickness::NoAnswer, now);
        }
    }

    /// The present verdict.
    pub fn health(&self) -> Health {
        match self.state {
            State::Healthy => Health::Healthy,
            State::Unhealthy { why, .. } => Health::Unhealthy(why),
        }
    }

    /// What a successor must know.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Takes one piece of news in.
    pub fn hear(&mut self, news: News, now: Instant) {
        self.memory.drained = news == News::Drained;
        match news {
            News::Answered => {
                self.is_here();
                self.improve(now);
            }
            News::Silent | News::NotAsked => {
                self.failures = self.failures.saturating_add(1);
                self.silences = self.silences.saturating_add((news == News::Silent).into());
                self.memory.away |= self.silences >= self.policy.failures;
                if self.failures >= self.policy.failures {
                    self.worsen(Sickness::NoAnswer, now);
                } else if let State::Unhealthy { why, .. } = self.state {
                    self.worsen(why, now);
                }
            }
            News::Hung => {
                self.failures = self.failures.saturating_add(1);
                self.worsen(Sickness::NoAnswer, now);
            }
            News::Missing => {
                self.memory.away = true;
                self.worsen(Sickness::Lost, now);
            }
            News::Xid(code) => match verdict(code) {
                Verdict::Ignore | Verdict::Application => {}
                Verdict::Transient => self.worsen(Sickness::Xid(code), now),
                Verdict::Reset | Verdict::Node => self.need_reset(code, now),
            },
            News::Drained => {
                self.memory.away = true;
                // Whatever ailed it: it is no relapse to be taken up again.
                self.quiet = self.policy.quiet;
                self.state = unhealthy(Sickness::Drained, now);
            }
        }
    }

    fn is_here(&mut self) {
        (self.failures, self.silences) = (0, 0);
        self.memory = self.memory.here();
    }

    /// The first cause stands: what follows an XID 79 is its consequence.
    fn worsen(&mut self, why: Sickness, now: Instant) {
        self.state = match self.state {
            State::Healthy
            | State::Unhealthy {
                why: Sickness::Drained,
                ..
            } => self.fall(why, now),
            State::Unhealthy { why: first, .. } => unhealthy(first, now),
        };
    }

    /// The cause that asks for a reset is the one to tell, unless the GPU is away already.
    fn need_reset(&mut self, code: u64, now: Instant) {
        let first = self.memory.awaits_reset.is_none();
        self.worsen(Sickness::Xid(code), now);
        if first && !self.memory.away {
            self.state = unhealthy(Sickness::Xid(code), now);
        }
        self.memory.awaits_reset.get_or_insert(code);
    }

    fn fall(&mut self, why: Sickness, now: Instant) -> State {
        let relapsed = self
            .recovered
            .is_some_and(|at| now.saturating_duration_since(at) < self.policy.relapse);
        self.quiet = if relapsed {
            (self.quiet * 2).min(self.policy.quiet_max)
        } else {
            self.policy.quiet
        };
        unhealthy(why, now)
    }

    fn improve(&mut self, now: Instant) {
        let State::Unhealthy {
            bad_news, probes, ..
        } = &mut self.state
        else {
            return;
        };
        *probes = probes.saturating_add(1);
        let quiet = now.saturating_duration_since(*bad_news) >= self.quiet;
        if *probes >= self.policy.probes && quiet && self.memory.awaits_reset.is_none() {
            self.recovered = Some(now);
            self.state = State::Healthy;
        }
    }
}

/// Unfit since now.
fn unhealthy(why: Sickness, now: Instant) -> State {
    State::Unhealthy {
        why,
        bad_news: now,
        probes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A monitor with a clock of whole seconds.
    struct Bed {
        monitor: Monitor,
        start: Instant,
    }

    impl Bed {
        fn new() -> Self {
            Self::after(Memory::default())
        }

        /// With what a predecessor left.
        fn after(memory: Memory) -> Self {
            let start = Instant::now();
            Self {
                monitor: Monitor::new(Policy::default(), memory, start),
                start,
            }
        }

        fn hear(&mut self, second: u64, news: News) -> Health {
            self.monitor
                .hear(news, self.start + Duration::from_secs(second));
            self.monitor.health()
        }

        /// Good probes each second from `from` on; the second at which the GPU was healthy.
        fn recovery(&mut self, from: u64) -> u64 {
            (from..from + 100_000)
                .find(|second| self.hear(*second, News::Answered).is_healthy())
                .expect("nothing is unhealthy for ever")
        }
    }

    #[test]
    fn one_failed_probe_changes_nothing() {
        let mut bed = Bed::new();
        assert!(bed.hear(1, News::Silent).is_healthy());
        assert!(bed.hear(2, News::Silent).is_healthy());
        assert!(bed.hear(3, News::Answered).is_healthy());
        assert!(bed.hear(4, News::Silent).is_healthy());
    }

    #[test]
    fn three_failed_probes_in_a_row_make_it_unhealthy() {
        let mut bed = Bed::new();
        bed.hear(1, News::Silent);
        bed.hear(2, News::Silent);
        assert_eq!(
            bed.hear(3, News::Silent),
            Health::Unhealthy(Sickness::NoAnswer)
        );
    }

    #[test]
    fn probes_that_could_not_ask_make_it_unhealthy_and_say_nothing_of_its_memory() {
        let mut bed = Bed::new();
        bed.hear(1, News::NotAsked);
        bed.hear(2, News::NotAsked);
        let sick = Health::Unhealthy(Sickness::NoAnswer);
        assert_eq!(bed.hear(3, News::Silent), sick);
        assert!(!bed.monitor.memory().away, "it was asked once");
        bed.hear(4, News::Silent);
        bed.hear(5, News::NotAsked);
        bed.hear(6, News::Silent);
        assert!(bed.monitor.memory().away);
    }

    #[test]
    fn gpu_is_unhealthy_at_once_when_a_call_hangs() {
        let mut bed = Bed::new();
        let sick = Health::Unhealthy(Sickness::NoAnswer);
        for second in 1..=3 {
            assert_eq!(bed.hear(second, News::Hung), sick);
        }
        assert!(!bed.monitor.memory().away, "nothing is known of its memory");
        assert_eq!(bed.recovery(4), 13);
    }

    #[test]
    fn an_xid_of_the_gpu_counts_at_once_and_one_of_a_program_never() {
        let mut bed = Bed::new();
        assert!(bed.hear(1, News::Xid(31)).is_healthy());
        assert_eq!(
            bed.hear(2, News::Xid(79)),
            Health::Unhealthy(Sickness::Xid(79))
        );
    }

    #[test]
    fn recovery_takes_good_probes_and_a_quiet_time() {
        let mut bed = Bed::new();
        bed.hear(0, News::Missing);
        assert_eq!(bed.recovery(1), 10);
    }

    #[test]
    fn bad_news_starts_the_quiet_time_again_and_keeps_the_first_cause() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(48));
        bed.hear(8, News::Answered);
        assert_eq!(
            bed.hear(9, News::Missing),
            Health::Unhealthy(Sickness::Xid(48))
        );
        assert_eq!(bed.recovery(10), 19);
    }

    #[test]
    fn a_relapse_must_stay_quiet_twice_as_long_up_to_a_bound() {
        let mut bed = Bed::new();
        let (mut at, mut waits) = (0, Vec::new());
        for _ in 0..7 {
            bed.hear(at, News::Xid(74));
            let well = bed.recovery(at + 1);
            waits.push(well - at);
            at = well + 1;
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn a_relapse_long_after_a_recovery_is_a_first_fault_again() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(74));
        let well = bed.recovery(1);
        bed.hear(well + 1_000, News::Xid(74));
        assert_eq!(bed.recovery(well + 1_001), well + 1_010);
    }

    #[test]
    fn after_an_xid_that_asks_for_a_reset_good_probes_do_not_make_it_healthy_until_it_was_away() {
        for gone in [News::Missing, News::Silent] {
            let mut bed = Bed::new();
            bed.hear(0, News::Xid(48));
            for second in 1..1_000 {
                assert!(!bed.hear(second, News::Answered).is_healthy());
            }
            for second in 1_000..1_003 {
                bed.hear(second, gone);
            }
            assert_eq!(bed.recovery(1_003), 1_012);
        }
    }

    #[test]
    fn a_gpu_that_was_drained_counts_as_reset_and_is_taken_up_again_by_probes() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(48));
        let drained = Health::Unhealthy(Sickness::Drained);
        assert_eq!(bed.hear(1, News::Drained), drained);
        let memory = Memory {
            away: true,
            awaits_reset: Some(48),
            drained: true,
        };
        assert_eq!(bed.monitor.memory(), memory);
        let successor = Bed::after(memory);
        assert_eq!(successor.monitor.health(), drained);
        assert_eq!(successor.monitor.memory(), memory);
        for mut bed in [bed, successor] {
            assert_eq!(bed.hear(100, News::Answered), drained);
            assert_eq!(bed.monitor.memory(), Memory::default());
            assert_eq!(
                bed.recovery(101),
                102,
                "as many probes as after any sickness"
            );
        }
    }

    #[test]
    fn one_that_does_not_come_back_from_being_drained_is_lost() {
        let mut bed = Bed::new();
        bed.hear(0, News::Drained);
        assert_eq!(
            bed.hear(1, News::Missing),
            Health::Unhealthy(Sickness::Lost)
        );
        assert!(!bed.monitor.memory().drained);
    }

    #[test]
    fn one_failed_probe_is_not_taken_for_the_reset() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(119));
        bed.hear(1, News::Silent);
        for second in 2..100 {
            assert!(!bed.hear(second, News::Answered).is_healthy());
        }
    }

    #[test]
    fn a_cause_that_asks_for_a_reset_is_told_before_one_that_does_not() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(74));
        let sick = bed.hear(1, News::Xid(48));
        assert_eq!(sick, Health::Unhealthy(Sickness::Xid(48)));
    }

    #[test]
    fn a_successor_knows_that_a_reset_is_due_and_one_that_finds_the_gpu_back_does_not_ask_again() {
        let mut before = Bed::new();
        before.hear(0, News::Xid(95));
        let mut after = Bed::after(before.monitor.memory());
        let sick = Health::Unhealthy(Sickness::Xid(95));
        assert_eq!(after.hear(60, News::Answered), sick);
        before.hear(1, News::Missing);
        let back = Bed::after(before.monitor.memory());
        assert!(back.monitor.health().is_healthy());
    }

    #[test]
    fn an_xid_that_is_heard_after_its_gpu_is_gone_asks_for_no_second_absence() {
        let mut bed = Bed::new();
        bed.hear(0, News::Missing);
        bed.hear(0, News::Xid(79));
        assert_eq!(bed.recovery(1), 10);
    }
}
