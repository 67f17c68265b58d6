//! Decides whether one GPU is fit for new pods, from XIDs and probes.
//!
//! ```text
//!            xid of the GPU, lost, or N failed probes in a row
//!   Healthy ------------------------------------------------------> Unhealthy
//!      ^                                                               |  | any bad news: the quiet
//!      |        quiet for `quiet` and `probes` good ones in a row      |  | time starts again
//!      +---------------------------------------------------------------+ <+
//! ```
//!
//! A GPU that falls sick again soon after a recovery must stay quiet twice as long, up to a
//! bound: so a flapping GPU settles, and none is Unhealthy for ever. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

use super::xid::{Verdict, verdict};

/// Why a GPU is unfit for new pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sickness {
    /// An XID that condemns the whole GPU.
    Xid(u64),
    /// NVML no longer finds it.
    Lost,
    /// NVML finds it and cannot read it.
    NoAnswer,
}

impl Sickness {
    /// One word for conditions, events and metric labels.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Xid(_) => "Xid",
            Self::Lost => "GpuLost",
            Self::NoAnswer => "NoAnswer",
        }
    }
}

impl std::fmt::Display for Sickness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Xid(code) => write!(f, "XID {code}"),
            Self::Lost => f.write_str("the GPU is lost"),
            Self::NoAnswer => f.write_str("the GPU does not answer"),
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
    /// NVML did not list the GPU, or called it lost.
    Missing,
    /// NVML reported this XID.
    Xid(u64),
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

/// What is known of one GPU's health.
#[derive(Debug, Clone)]
pub struct Monitor {
    policy: Policy,
    state: State,
    /// The quiet time that the next recovery takes.
    quiet: Duration,
    recovered: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Healthy {
        failures: u32,
    },
    Unhealthy {
        why: Sickness,
        bad_news: Instant,
        probes: u32,
    },
}

impl Monitor {
    /// A GPU that NVML listed just now: healthy until there is news.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            state: State::Healthy { failures: 0 },
            quiet: policy.quiet,
            recovered: None,
        }
    }

    /// The present verdict.
    pub fn health(&self) -> Health {
        match self.state {
            State::Healthy { .. } => Health::Healthy,
            State::Unhealthy { why, .. } => Health::Unhealthy(why),
        }
    }

    /// Takes one piece of news in.
    pub fn hear(&mut self, news: News, now: Instant) {
        let bad = match news {
            News::Xid(code) if verdict(code) == Verdict::Gpu => Some(Sickness::Xid(code)),
            News::Xid(_) => return,
            News::Missing => Some(Sickness::Lost),
            News::Silent => Some(Sickness::NoAnswer),
            News::Answered => None,
        };
        self.state = match (self.state, bad) {
            (State::Healthy { .. }, None) => State::Healthy { failures: 0 },
            (State::Healthy { failures }, Some(Sickness::NoAnswer))
                if failures + 1 < self.policy.failures =>
            {
                State::Healthy {
                    failures: failures + 1,
                }
            }
            (State::Healthy { .. }, Some(why)) => self.fall(why, now),
            // The first cause stands: what follows an XID 79 is its consequence.
            (State::Unhealthy { why, .. }, Some(_)) => State::Unhealthy {
                why,
                bad_news: now,
                probes: 0,
            },
            (
                State::Unhealthy {
                    why,
                    bad_news,
                    probes,
                },
                None,
            ) => self.improve(why, bad_news, probes + 1, now),
        };
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
        State::Unhealthy {
            why,
            bad_news: now,
            probes: 0,
        }
    }

    fn improve(&mut self, why: Sickness, bad_news: Instant, probes: u32, now: Instant) -> State {
        let quiet = now.saturating_duration_since(bad_news);
        if probes >= self.policy.probes && quiet >= self.quiet {
            self.recovered = Some(now);
            State::Healthy { failures: 0 }
        } else {
            State::Unhealthy {
                why,
                bad_news,
                probes,
            }
        }
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
            Self {
                monitor: Monitor::new(Policy::default()),
                start: Instant::now(),
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
            bed.hear(at, News::Xid(79));
            let well = bed.recovery(at + 1);
            waits.push(well - at);
            at = well + 1;
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn a_relapse_long_after_a_recovery_is_a_first_fault_again() {
        let mut bed = Bed::new();
        bed.hear(0, News::Xid(79));
        let well = bed.recovery(1);
        bed.hear(well + 1_000, News::Xid(79));
        assert_eq!(bed.recovery(well + 1_001), well + 1_010);
    }
}
