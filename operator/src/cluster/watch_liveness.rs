//! When each watch last made progress: what liveness goes by.
//!
//! A watch that is quiet is ended by the API server after a while and taken up again, and one that died in silence is
//! given up by the client after little longer. So every watch makes progress now and then, whatever the cluster and the
//! API server do; where one does not, something within this process hangs, and only a new process helps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use kube::client::Body;
use tokio::time::Instant;
use tower::service_fn;

use crate::cluster::kinds;
use crate::cluster::watches::SILENCE;

/// The longest that a watch takes from one sign of life to the next, twice.
pub const HANGS: Duration = SILENCE.saturating_mul(2);

/// The paths below which each kind is listed and watched.
const PATHS: [(&str, &str); 6] = [
    ("/gpumemorybudgets", kinds::BUDGETS),
    ("/pods", kinds::PODS),
    ("/gpunodes", kinds::GPU_NODES),
    ("/nodes", kinds::NODES),
    ("/resourcequotas", kinds::QUOTAS),
    ("/namespaces", kinds::NAMESPACES),
];

/// The last progress of each watch. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

impl Default for Pulse {
    /// All of them begin now.
    fn default() -> Self {
        let now = Instant::now();
        let all = kinds::ALL.map(|kind| (kind, now));
        Self(Arc::new(Mutex::new(all.into())))
    }
}

impl Pulse {
    /// The watch of `kind` said something, failed or was taken up.
    pub fn beat(&self, kind: &'static str) {
        self.beat_at(kind, Instant::now());
    }

    /// How long ago that was, of each kind.
    pub fn ages(&self) -> Vec<(&'static str, Duration)> {
        self.ages_at(Instant::now())
    }

    /// The watches that hang.
    pub fn hanging(&self) -> Vec<&'static str> {
        self.hanging_at(Instant::now())
    }

    pub(crate) fn beat_at(&self, kind: &'static str, now: Instant) {
        let mut beats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        beats.insert(kind, now);
    }

    fn ages_at(&self, now: Instant) -> Vec<(&'static str, Duration)> {
        let beats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ages = beats
            .iter()
            .map(|(kind, at)| (*kind, now.saturating_duration_since(*at)));
        ages.collect()
    }

    fn hanging_at(&self, now: Instant) -> Vec<&'static str> {
        let ages = self.ages_at(now).into_iter();
        let hanging = ages.filter(|(_, age)| *age > HANGS);
        hanging.map(|(kind, _)| kind).collect()
    }

    /// A client whose answers to lists and watches are signs of life, of whatever they tell: a quiet watch that is
    /// taken up again says nothing else.
    pub fn listening(&self, client: Client) -> Client {
        let (pulse, namespace) = (self.clone(), client.default_namespace().to_owned());
        let service = service_fn(move |request: http::Request<Body>| {
            let (client, pulse) = (client.clone(), pulse.clone());
            let kind = kind(request.uri().path());
            async move {
                let answer = client.send(request).await;
                if let Some(kind) = kind {
                    pulse.beat(kind);
                }
                answer
            }
        });
        Client::new(service, namespace)
    }
}

fn kind(path: &str) -> Option<&'static str> {
    let is_of_all = !path.contains("/namespaces/");
    let found = PATHS.iter().find(|(end, _)| path.ends_with(end));
    found.filter(|_| is_of_all).map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_watches_of_a_whole_kind_are_told_from_requests_about_one_object() {
        assert_eq!(kind("/api/v1/pods"), Some(kinds::PODS));
        assert_eq!(kind("/api/v1/nodes"), Some(kinds::NODES));
        assert_eq!(
            kind("/apis/bursar.dev/v1alpha1/gpunodes"),
            Some(kinds::GPU_NODES)
        );
        assert_eq!(kind("/api/v1/nodes/n"), None);
        assert_eq!(kind("/api/v1/namespaces/team/pods"), None);
        assert_eq!(kind("/api/v1/namespaces/team/resourcequotas"), None);
        let kinds: Vec<_> = PATHS.iter().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds, kinds::ALL);
    }

    #[test]
    fn a_watch_hangs_that_has_shown_no_life_for_twice_as_long_as_it_may_take() {
        let pulse = Pulse::default();
        let mut now = Instant::now();
        for _ in 0..10 {
            now += SILENCE;
            kinds::ALL.iter().for_each(|kind| pulse.beat_at(kind, now));
            assert_eq!(pulse.hanging_at(now + SILENCE), [] as [&str; 0]);
        }
        for _ in 0..3 {
            now += SILENCE;
            kinds::ALL[1..]
                .iter()
                .for_each(|kind| pulse.beat_at(kind, now));
        }
        assert_eq!(pulse.hanging_at(now), [kinds::BUDGETS]);
    }
}
