//! Tells `/metrics`, `/healthz` and `/readyz` what the operator knows.

use bursar_http::Verdict;
use tokio::sync::watch;

use crate::cluster::World;
use crate::cluster::watch_liveness::Pulse;
use crate::serve::metrics::Metrics;

/// Where the answers come from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/metrics`.
    pub metrics: Metrics,
    /// `/healthz`: every watch goes on.
    pub pulse: Pulse,
    /// `/readyz`: everything has been listed once, so what is published is the truth.
    pub world: watch::Receiver<World>,
}

impl bursar_http::Sources for Sources {
    fn metrics(&self) -> String {
        self.metrics.encode()
    }

    /// A task that ends ends the process; one that hangs shows here.
    fn health(&self) -> Verdict {
        without(&self.pulse.hanging(), "no progress of the watch of")
    }

    fn readiness(&self) -> Verdict {
        without(&self.world.borrow().missing(), "not listed yet:")
    }
}

/// Well without any of `kinds`.
fn without(kinds: &[&str], what: &str) -> Verdict {
    match kinds {
        [] => Verdict::Well,
        kinds => Verdict::Unwell(format!("{what} {}", kinds.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bursar_crds::Quantum;
    use bursar_http::Sources as _;
    use kube::runtime::reflector;
    use tokio::time::Instant;

    use super::*;
    use crate::cluster::kinds;
    use crate::cluster::watch_liveness::HANGS;

    #[test]
    fn a_watch_that_hangs_is_named_and_ends_liveness_until_it_goes_on() {
        let (_sender, world) = watch::channel(World::new(Quantum::Gib1));
        let (budgets, _writer) = reflector::store();
        let pulse = Pulse::default();
        let sources = Sources {
            metrics: Metrics::new(budgets, world.clone(), pulse.clone()),
            world,
            pulse: pulse.clone(),
        };
        assert_eq!(sources.health(), Verdict::Well);

        let long_ago = Instant::now().checked_sub(HANGS + Duration::from_secs(1));
        let long_ago = long_ago.expect("the clock goes as far back");
        pulse.beat_at(kinds::PODS, long_ago);
        let hangs = Verdict::Unwell("no progress of the watch of Pods".to_owned());
        assert_eq!(sources.health(), hangs);

        pulse.beat(kinds::PODS);
        assert_eq!(sources.health(), Verdict::Well);
        // Alive and not yet ready are two things.
        let unready = sources.readiness();
        assert!(
            matches!(&unready, Verdict::Unwell(why) if why.starts_with("not listed yet: ")),
            "{unready:?}"
        );
    }
}
