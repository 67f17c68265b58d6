//! Records the progress of each watch, for the liveness probe and the metrics.
//!
//! The API server ends a quiet watch after a while and the client resumes it. The client abandons a
//! silent connection a little later. Every watch therefore makes progress regularly, whatever the
//! API server does. A watch without progress means that this process hangs, and only a restart
//! helps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use kube::client::Body;
use tokio::time::Instant;
use tower::service_fn;

use crate::cluster::kinds;
use crate::cluster::watches::READ_TIMEOUT;

/// Four times the longest time between two signs of progress of a watch.
pub const STALLED_AFTER: Duration = READ_TIMEOUT.saturating_mul(4);

/// The URL path suffix of each kind's lists and watches.
const PATHS: [(&str, &str); 7] = [
    ("/gpumemorybudgets", kinds::BUDGETS),
    ("/pods", kinds::PODS),
    ("/gpunodes", kinds::GPU_NODES),
    ("/gpunamespaces", kinds::GPU_NAMESPACES),
    ("/nodes", kinds::NODES),
    ("/resourcequotas", kinds::QUOTAS),
    ("/namespaces", kinds::NAMESPACES),
];

/// The progress of each watch. Clones share it.
#[derive(Clone, Debug)]
pub struct WatchLiveness(Arc<Mutex<BTreeMap<&'static str, WatchProgress>>>);

/// The progress of one watch.
#[derive(Clone, Copy, Debug)]
struct WatchProgress {
    last: Instant,
    failures: u64,
}

impl Default for WatchLiveness {
    /// Counts all watches as alive from now on.
    fn default() -> Self {
        let last = Instant::now();
        let all = kinds::ALL.map(|kind| (kind, WatchProgress { last, failures: 0 }));
        Self(Arc::new(Mutex::new(all.into())))
    }
}

impl WatchLiveness {
    /// Records that the watch of `kind` delivered an event, failed or was resumed.
    pub fn record_progress(&self, kind: &'static str) {
        self.record_progress_at(kind, Instant::now());
    }

    /// Records a failure of the watch of `kind`.
    pub fn record_failure(&self, kind: &'static str) {
        self.update(kind, |watch| watch.failures += 1);
    }

    /// The number of failures, by kind.
    pub fn failures(&self) -> Vec<(&'static str, u64)> {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = watches.iter().map(|(kind, watch)| (*kind, watch.failures));
        failures.collect()
    }

    /// The time since the last progress, by kind.
    pub fn ages(&self) -> Vec<(&'static str, Duration)> {
        self.ages_at(Instant::now())
    }

    /// The watches without progress for too long.
    pub fn stalled(&self) -> Vec<&'static str> {
        self.stalled_at(Instant::now())
    }

    pub(crate) fn record_progress_at(&self, kind: &'static str, now: Instant) {
        self.update(kind, |watch| watch.last = now);
    }

    fn update(&self, kind: &'static str, change: impl FnOnce(&mut WatchProgress)) {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.get_mut(kind).map(change);
    }

    fn ages_at(&self, now: Instant) -> Vec<(&'static str, Duration)> {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ages = watches
            .iter()
            .map(|(kind, watch)| (*kind, now.saturating_duration_since(watch.last)));
        ages.collect()
    }

    fn stalled_at(&self, now: Instant) -> Vec<&'static str> {
        let ages = self.ages_at(now).into_iter();
        let hanging = ages.filter(|(_, age)| *age > STALLED_AFTER);
        hanging.map(|(kind, _)| kind).collect()
    }

    /// Wraps `client` so that each response to a list or watch counts as progress. A quiet watch
    /// that is resumed shows no other sign.
    pub fn instrument_client(&self, client: Client) -> Client {
        let (liveness, namespace) = (self.clone(), client.default_namespace().to_owned());
        let service = service_fn(move |request: http::Request<Body>| {
            let (client, liveness) = (client.clone(), liveness.clone());
            let kind = kind_of_path(request.uri().path());
            async move {
                let answer = client.send(request).await;
                if let Some(kind) = kind {
                    liveness.record_progress(kind);
                }
                answer
            }
        });
        Client::new(service, namespace)
    }
}

fn kind_of_path(path: &str) -> Option<&'static str> {
    let is_of_all = !path.contains("/namespaces/");
    let found = PATHS.iter().find(|(end, _)| path.ends_with(end));
    found.filter(|_| is_of_all).map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_a_whole_kind_are_recognized() {
        assert_eq!(kind_of_path("/api/v1/pods"), Some(kinds::PODS));
        assert_eq!(kind_of_path("/api/v1/nodes"), Some(kinds::NODES));
        assert_eq!(
            kind_of_path("/apis/bursar.dev/v1alpha1/gpunodes"),
            Some(kinds::GPU_NODES)
        );
        assert_eq!(kind_of_path("/api/v1/nodes/n"), None);
        assert_eq!(kind_of_path("/api/v1/namespaces/team/pods"), None);
        assert_eq!(kind_of_path("/api/v1/namespaces/team/resourcequotas"), None);
        let kinds: Vec<_> = PATHS.iter().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds, kinds::ALL);
    }

    #[test]
    fn watch_is_stalled_after_four_times_its_timeout() {
        let liveness = WatchLiveness::default();
        let mut now = Instant::now();
        for _ in 0..10 {
            now += READ_TIMEOUT;
            kinds::ALL
                .iter()
                .for_each(|kind| liveness.record_progress_at(kind, now));
            assert_eq!(liveness.stalled_at(now + READ_TIMEOUT), [] as [&str; 0]);
        }
        for _ in 0..5 {
            now += READ_TIMEOUT;
            kinds::ALL[1..]
                .iter()
                .for_each(|kind| liveness.record_progress_at(kind, now));
        }
        assert_eq!(liveness.stalled_at(now), [kinds::BUDGETS]);
    }
}
