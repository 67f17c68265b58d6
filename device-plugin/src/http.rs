//! Answers `/metrics`, `/healthz` and `/readyz`.

use std::time::{Duration, Instant};

pub(crate) use bursar_http::Verdict;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// The longest time between two heartbeats of a node task that works.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);

/// The time of the node task's last tick.
#[derive(Clone, Debug)]
pub(crate) struct Heartbeat(pub watch::Receiver<Instant>);

impl Heartbeat {
    /// The verdict on the node task at `now`.
    fn verdict(&self, now: Instant) -> Verdict {
        if self.0.has_changed().is_err() {
            return Verdict::Unwell("the node task has ended".to_owned());
        }
        let still = now.saturating_duration_since(*self.0.borrow());
        if still > HEARTBEAT_TIMEOUT {
            return Verdict::Unwell(format!("the node task has sent no heartbeat for {still:?}"));
        }
        Verdict::Well
    }
}

/// The sources of the three endpoints. The owner of each fact writes its channel.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The metrics of `/metrics`.
    pub metrics: Metrics,
    /// The heartbeat behind `/healthz`: the kubelet restarts an agent whose node task hangs.
    pub health: Heartbeat,
    /// The readiness behind `/readyz`: a rollout waits for an agent that cannot serve.
    pub(crate) readiness: watch::Receiver<Verdict>,
}

impl bursar_http::Sources for Sources {
    fn metrics(&self) -> String {
        self.metrics.encode()
    }

    fn health(&self) -> Verdict {
        self.health.verdict(Instant::now())
    }

    fn readiness(&self) -> Verdict {
        self.readiness.borrow().clone()
    }
}

#[cfg(test)]
mod tests {
    use bursar_http::Sources as _;

    use super::*;

    #[test]
    fn probes_follow_their_channels_and_metrics_are_served() {
        let (alive, health) = watch::channel(Instant::now());
        let (ready, readiness) = watch::channel(Verdict::Unwell("not registered".into()));
        let sources = Sources {
            metrics: Metrics::new(),
            health: Heartbeat(health),
            readiness,
        };
        assert_eq!(sources.health(), Verdict::Well);
        assert_eq!(
            sources.readiness(),
            Verdict::Unwell("not registered".into())
        );
        ready.send_replace(Verdict::Well);
        assert_eq!(sources.readiness(), Verdict::Well);
        assert!(sources.metrics().contains("# EOF"));
        drop(alive);
        assert!(matches!(sources.health(), Verdict::Unwell(why) if why.contains("has ended")));
    }

    #[test]
    fn task_without_heartbeat_for_30_s_is_unwell() {
        let beat = Instant::now();
        let (_alive, pulse) = watch::channel(beat);
        let after = |seconds| Heartbeat(pulse.clone()).verdict(beat + Duration::from_secs(seconds));
        assert_eq!(after(30), Verdict::Well);
        assert!(matches!(after(31), Verdict::Unwell(why) if why.contains("no heartbeat")));
    }
}
