//! Decides whether one GPU is fit for new pods, from XIDs and probes.
//!
//! ```text
//!            XID of the GPU, GPU lost, call hangs, or N failed probes in a row
//!   Healthy ------------------------------------------------------> Unhealthy
//!      ^                                                               |  | failure: recovery
//!      |   no failure for `recovery_time`, `good_probes` in a row      |  | time starts again
//!      +---------------------------------------------------------------+ <+
//! ```
//!
//! After an XID whose remedy is a reset, good probes alone prove nothing. The GPU must have been
//! absent since, as in every reset, or the node must have booted ([`PersistedHealth`] outlives the
//! agent). The agent does not see a reset of a drained GPU, so a drained GPU counts as absent.
//!
//! A GPU that fails again soon after a recovery needs twice the recovery time, up to a bound, so
//! that a flapping GPU settles. Pure: time is an argument.

mod monitor;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use monitor::HealthMonitor;

/// Why a GPU is unfit for new pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnhealthyReason {
    /// The GPU reported an XID that makes the whole GPU unfit.
    Xid(u64),
    /// NVML no longer lists the GPU.
    Lost,
    /// NVML lists the GPU and cannot read it, or a call about it hangs.
    NoAnswer,
    /// The provisioner of its retained memory hangs in the driver and cannot be killed.
    ProvisionerHung,
    /// CUDA has refused the GPU at each start of its provisioner for a while.
    CudaRefused,
    /// Another device plugin offers the GPU too, and the configuration refuses to share it.
    OtherOwner,
    /// A drain of the GPU is requested, and the GPU is still in use.
    Draining,
    /// The GPU is drained, and the agent does not probe it.
    Drained,
}

impl UnhealthyReason {
    /// The word for conditions, events and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Xid(_) => "Xid",
            Self::Lost => "GpuLost",
            Self::NoAnswer => "NoAnswer",
            Self::ProvisionerHung => "ProvisionerHung",
            Self::CudaRefused => "CudaRefused",
            Self::OtherOwner => "OtherOwner",
            Self::Draining => "Draining",
            Self::Drained => "Drained",
        }
    }
}

impl std::fmt::Display for UnhealthyReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Xid(code) => write!(f, "XID {code}"),
            Self::Lost => f.write_str("the GPU is lost"),
            Self::NoAnswer => f.write_str("the GPU does not answer"),
            Self::ProvisionerHung => f.write_str("a provisioner hangs in the driver"),
            Self::CudaRefused => f.write_str("CUDA refuses the GPU"),
            Self::OtherOwner => f.write_str("another device plugin offers the GPU too"),
            Self::Draining => f.write_str("the GPU is being drained"),
            Self::Drained => f.write_str("the GPU is drained"),
        }
    }
}

/// Whether new pods may get a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// New pods may use it.
    Healthy,
    /// No new pod may use it, for this reason.
    Unhealthy(UnhealthyReason),
}

impl Health {
    /// True for [`Health::Healthy`].
    pub fn is_healthy(self) -> bool {
        self == Self::Healthy
    }
}

/// An event that changes a GPU's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HealthEvent {
    /// A probe read the GPU's memory.
    ProbeSucceeded,
    /// NVML answered a probe of the GPU with an error.
    ProbeFailed,
    /// NVML could not be asked, so nothing is known of the GPU's memory.
    NvmlUnavailable,
    /// A call about the GPU did not return in time, so nothing is known of its memory.
    CallTimedOut,
    /// NVML did not list the GPU, or called it lost.
    NotListed,
    /// NVML reported this XID.
    Xid(u64),
    /// The GPU was drained; the agent stops its probes.
    Drained,
}

/// How quickly a [`HealthMonitor`] changes its verdict.
#[derive(Debug, Clone, Copy)]
pub struct HealthThresholds {
    /// The number of failed probes in a row that makes a GPU unhealthy.
    pub(crate) failed_probes: u32,
    /// The number of good probes in a row that a recovery needs.
    pub(crate) good_probes: u32,
    /// The time without a failure that a recovery needs.
    pub(crate) recovery_time: Duration,
    /// The longest recovery time after repeated relapses.
    pub(crate) max_recovery_time: Duration,
    /// A relapse within this time of a recovery doubles the recovery time.
    pub(crate) relapse_window: Duration,
}

impl Default for HealthThresholds {
    fn default() -> Self {
        Self {
            failed_probes: 3,
            good_probes: 3,
            recovery_time: Duration::from_secs(10),
            max_recovery_time: Duration::from_secs(300),
            relapse_window: Duration::from_secs(600),
        }
    }
}

/// The part of a GPU's health that the next agent of the same boot needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct PersistedHealth {
    /// Whether the GPU is absent: missing, or without an answer for long. Its memory is lost then.
    pub away: bool,
    /// The XID that only a reset cures, until the GPU was absent.
    pub awaits_reset: Option<u64>,
    /// Whether the GPU is to be drained: its drain goes on while no order of an admin is known.
    pub draining: bool,
    /// Whether the GPU is absent because it is drained.
    pub drained: bool,
}

impl PersistedHealth {
    /// The record after the GPU has returned.
    fn after_return(self) -> Self {
        Self {
            away: false,
            awaits_reset: self.awaits_reset.filter(|_| !self.away),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A monitor with a clock of whole seconds.
    struct Fixture {
        monitor: HealthMonitor,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self::with_persisted(PersistedHealth::default())
        }

        /// A monitor that continues from a record of the previous agent.
        fn with_persisted(memory: PersistedHealth) -> Self {
            let start = Instant::now();
            Self {
                monitor: HealthMonitor::new(HealthThresholds::default(), memory, start),
                start,
            }
        }

        fn record(&mut self, second: u64, event: HealthEvent) -> Health {
            self.monitor
                .record(event, self.start + Duration::from_secs(second));
            self.monitor.health()
        }

        /// Probes well each second from `from` on; returns the second at which the GPU is healthy.
        fn recovers_at(&mut self, from: u64) -> u64 {
            (from..from + 100_000)
                .find(|second| {
                    self.record(*second, HealthEvent::ProbeSucceeded)
                        .is_healthy()
                })
                .expect("nothing is unhealthy for ever")
        }
    }

    #[test]
    fn one_failed_probe_changes_nothing() {
        let mut fixture = Fixture::new();
        assert!(fixture.record(1, HealthEvent::ProbeFailed).is_healthy());
        assert!(fixture.record(2, HealthEvent::ProbeFailed).is_healthy());
        assert!(fixture.record(3, HealthEvent::ProbeSucceeded).is_healthy());
        assert!(fixture.record(4, HealthEvent::ProbeFailed).is_healthy());
    }

    #[test]
    fn three_failed_probes_in_a_row_make_it_unhealthy() {
        let mut fixture = Fixture::new();
        fixture.record(1, HealthEvent::ProbeFailed);
        fixture.record(2, HealthEvent::ProbeFailed);
        assert_eq!(
            fixture.record(3, HealthEvent::ProbeFailed),
            Health::Unhealthy(UnhealthyReason::NoAnswer)
        );
    }

    #[test]
    fn gpu_memory_is_not_lost_when_nvml_cannot_be_asked() {
        let mut fixture = Fixture::new();
        fixture.record(1, HealthEvent::NvmlUnavailable);
        fixture.record(2, HealthEvent::NvmlUnavailable);
        let unhealthy = Health::Unhealthy(UnhealthyReason::NoAnswer);
        assert_eq!(fixture.record(3, HealthEvent::ProbeFailed), unhealthy);
        assert!(!fixture.monitor.memory().away, "NVML answered once");
        fixture.record(4, HealthEvent::ProbeFailed);
        fixture.record(5, HealthEvent::NvmlUnavailable);
        fixture.record(6, HealthEvent::ProbeFailed);
        assert!(fixture.monitor.memory().away);
    }

    #[test]
    fn gpu_is_unhealthy_at_once_when_a_call_hangs() {
        let mut fixture = Fixture::new();
        let unhealthy = Health::Unhealthy(UnhealthyReason::NoAnswer);
        for second in 1..=3 {
            assert_eq!(fixture.record(second, HealthEvent::CallTimedOut), unhealthy);
        }
        assert!(
            !fixture.monitor.memory().away,
            "nothing is known of its memory"
        );
        assert_eq!(fixture.recovers_at(4), 13);
    }

    #[test]
    fn gpu_is_unhealthy_at_once_when_an_xid_is_of_the_gpu() {
        let mut fixture = Fixture::new();
        assert!(fixture.record(1, HealthEvent::Xid(31)).is_healthy());
        assert_eq!(
            fixture.record(2, HealthEvent::Xid(79)),
            Health::Unhealthy(UnhealthyReason::Xid(79))
        );
    }

    #[test]
    fn gpu_recovers_after_good_probes_and_recovery_time() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::NotListed);
        assert_eq!(fixture.recovers_at(1), 10);
    }

    #[test]
    fn recovery_time_restarts_and_first_reason_stays_on_failure() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Xid(48));
        fixture.record(8, HealthEvent::ProbeSucceeded);
        assert_eq!(
            fixture.record(9, HealthEvent::NotListed),
            Health::Unhealthy(UnhealthyReason::Xid(48))
        );
        assert_eq!(fixture.recovers_at(10), 19);
    }

    #[test]
    fn recovery_time_doubles_up_to_a_bound_when_gpu_relapses() {
        let mut fixture = Fixture::new();
        let (mut at, mut waits) = (0, Vec::new());
        for _ in 0..7 {
            fixture.record(at, HealthEvent::Xid(74));
            let recovered_at = fixture.recovers_at(at + 1);
            waits.push(recovered_at - at);
            at = recovered_at + 1;
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn recovery_time_is_reset_when_a_relapse_is_late() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Xid(74));
        let recovered_at = fixture.recovers_at(1);
        fixture.record(recovered_at + 1_000, HealthEvent::Xid(74));
        assert_eq!(
            fixture.recovers_at(recovered_at + 1_001),
            recovered_at + 1_010
        );
    }

    #[test]
    fn gpu_stays_unhealthy_until_absent_when_xid_needs_reset() {
        for gone in [HealthEvent::NotListed, HealthEvent::ProbeFailed] {
            let mut fixture = Fixture::new();
            fixture.record(0, HealthEvent::Xid(48));
            for second in 1..1_000 {
                assert!(
                    !fixture
                        .record(second, HealthEvent::ProbeSucceeded)
                        .is_healthy()
                );
            }
            for second in 1_000..1_003 {
                fixture.record(second, gone);
            }
            assert_eq!(fixture.recovers_at(1_003), 1_012);
        }
    }

    #[test]
    fn gpu_counts_as_reset_when_it_was_drained() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Xid(48));
        let drained = Health::Unhealthy(UnhealthyReason::Drained);
        assert_eq!(fixture.record(1, HealthEvent::Drained), drained);
        let memory = PersistedHealth {
            away: true,
            awaits_reset: Some(48),
            draining: false,
            drained: true,
        };
        assert_eq!(fixture.monitor.memory(), memory);
        let successor = Fixture::with_persisted(memory);
        assert_eq!(successor.monitor.health(), drained);
        assert_eq!(successor.monitor.memory(), memory);
        for mut fixture in [fixture, successor] {
            assert_eq!(fixture.record(100, HealthEvent::ProbeSucceeded), drained);
            assert_eq!(fixture.monitor.memory(), PersistedHealth::default());
            assert_eq!(
                fixture.recovers_at(101),
                102,
                "as many probes as after any failure"
            );
        }
    }

    #[test]
    fn gpu_is_lost_when_missing_after_a_drain() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Drained);
        assert_eq!(
            fixture.record(1, HealthEvent::NotListed),
            Health::Unhealthy(UnhealthyReason::Lost)
        );
        assert!(!fixture.monitor.memory().drained);
    }

    #[test]
    fn gpu_still_needs_reset_when_one_probe_failed() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Xid(119));
        fixture.record(1, HealthEvent::ProbeFailed);
        for second in 2..100 {
            assert!(
                !fixture
                    .record(second, HealthEvent::ProbeSucceeded)
                    .is_healthy()
            );
        }
    }

    #[test]
    fn reason_with_reset_replaces_one_without() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::Xid(74));
        let unhealthy = fixture.record(1, HealthEvent::Xid(48));
        assert_eq!(unhealthy, Health::Unhealthy(UnhealthyReason::Xid(48)));
    }

    #[test]
    fn successor_requires_reset_only_while_gpu_was_not_absent() {
        let mut before = Fixture::new();
        before.record(0, HealthEvent::Xid(95));
        let mut after = Fixture::with_persisted(before.monitor.memory());
        let unhealthy = Health::Unhealthy(UnhealthyReason::Xid(95));
        assert_eq!(after.record(60, HealthEvent::ProbeSucceeded), unhealthy);
        before.record(1, HealthEvent::NotListed);
        let back = Fixture::with_persisted(before.monitor.memory());
        assert!(back.monitor.health().is_healthy());
    }

    #[test]
    fn xid_requires_no_second_absence_when_gpu_is_missing() {
        let mut fixture = Fixture::new();
        fixture.record(0, HealthEvent::NotListed);
        fixture.record(0, HealthEvent::Xid(79));
        assert_eq!(fixture.recovers_at(1), 10);
    }
}
