//! Answers `/metrics`, `/healthz` and `/readyz`.

use std::sync::{Arc, OnceLock};

use bursar_http::Verdict;
use tokio::sync::watch;

use crate::cluster::ClusterIndex;
use crate::cluster::watch_liveness::WatchLiveness;
use crate::serve::metrics::Metrics;

/// The state behind the answers.
#[derive(Clone, Debug)]
pub struct Sources {
    /// For `/metrics`.
    pub metrics: Metrics,
    /// For `/healthz`: every watch makes progress.
    pub liveness: WatchLiveness,
    /// For `/readyz`: all kinds have been listed, so that published figures are complete.
    pub index: watch::Receiver<ClusterIndex>,
}

impl bursar_http::Sources for Sources {
    fn metrics(&self) -> String {
        self.metrics.encode()
    }

    /// A task that ends also ends the process. A stalled task shows here.
    fn health(&self) -> Verdict {
        verdict(&self.liveness.stalled(), "no progress of watches:")
    }

    fn readiness(&self) -> Verdict {
        verdict(&self.index.borrow().unlisted_kinds(), "not listed yet:")
    }
}

/// The state behind the answers of a replica, which may not work yet. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ReplicaSources(Arc<OnceLock<Sources>>);

impl ReplicaSources {
    /// Answers from `sources` from now on. Later calls have no effect.
    pub fn start_work(&self, sources: Sources) {
        let _ = self.0.set(sources);
    }
}

/// The metrics of a replica that stands by. It has no others, because two replicas must not count
/// one budget twice.
const STANDBY: &str = "# HELP bursar_operator_leader 1 of the replica that works.\n\
    # TYPE bursar_operator_leader gauge\nbursar_operator_leader 0\n# EOF\n";

/// A replica that stands by is healthy and ready.
impl bursar_http::Sources for ReplicaSources {
    fn metrics(&self) -> String {
        let working = self.0.get();
        working.map_or_else(|| STANDBY.to_owned(), bursar_http::Sources::metrics)
    }

    fn health(&self) -> Verdict {
        self.0
            .get()
            .map_or(Verdict::Well, bursar_http::Sources::health)
    }

    fn readiness(&self) -> Verdict {
        self.0
            .get()
            .map_or(Verdict::Well, bursar_http::Sources::readiness)
    }
}

/// Healthy when `kinds` is empty.
fn verdict(kinds: &[&str], message: &str) -> Verdict {
    match kinds {
        [] => Verdict::Well,
        kinds => Verdict::Unwell(format!("{message} {}", kinds.join(", "))),
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
    use crate::cluster::watch_liveness::STALLED_AFTER;

    #[test]
    fn stalled_watch_fails_liveness_until_it_progresses() {
        let (_sender, index) = watch::channel(ClusterIndex::new(Quantum::Gib1));
        let (budgets, _writer) = reflector::store();
        let liveness = WatchLiveness::default();
        let sources = Sources {
            metrics: Metrics::new(budgets, index.clone(), liveness.clone()),
            index,
            liveness: liveness.clone(),
        };
        assert_eq!(sources.health(), Verdict::Well);

        let long_ago = Instant::now().checked_sub(STALLED_AFTER + Duration::from_secs(1));
        let long_ago = long_ago.expect("the clock goes as far back");
        liveness.record_progress_at(kinds::PODS, long_ago);
        let hangs = Verdict::Unwell("no progress of watches: Pods".to_owned());
        assert_eq!(sources.health(), hangs);

        liveness.record_progress(kinds::PODS);
        assert_eq!(sources.health(), Verdict::Well);
        // Liveness and readiness are independent.
        let unready = sources.readiness();
        assert!(
            matches!(&unready, Verdict::Unwell(reason) if reason.starts_with("not listed yet: ")),
            "{unready:?}"
        );
    }
}
