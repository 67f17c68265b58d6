//! Tracks the API server's history as one watch sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kube::{Resource, ResourceExt as _};
use tokio::sync::Notify;
use tracing::warn;

/// The newest `resourceVersion` that a watch has observed, and a request for a new list. Clones
/// share both.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    newest: AtomicU64,
    restarts: AtomicU64,
    list: Notify,
}

/// Whether revision `now` is below `before`. Revisions are decimal numbers (KEP-5504). Others do
/// not compare.
pub fn is_below(now: &str, before: &str) -> bool {
    number(now)
        .zip(number(before))
        .is_some_and(|(now, before)| now < before)
}

fn number(revision: &str) -> Option<u64> {
    revision.parse().ok()
}

impl History {
    /// Makes the watch list again as soon as possible.
    pub fn list_anew(&self) {
        self.0.list.notify_one();
    }

    /// How often the watch has observed the history go back.
    pub fn restarts(&self) -> u64 {
        self.0.restarts.load(Ordering::Relaxed)
    }

    /// Writes a watched object, and requests a new list when the response shows a restored etcd.
    ///
    /// A write that changes something has a revision above all earlier ones. A write that changes
    /// nothing returns `before`, the revision at which the caller knows the object.
    ///
    /// # Errors The errors of the write.
    pub async fn write<K: Resource>(
        &self,
        before: Option<&str>,
        write: impl Future<Output = kube::Result<K>>,
    ) -> kube::Result<K> {
        let newest = self.0.newest.load(Ordering::Relaxed);
        let written = write.await?;
        let now = written.resource_version().unwrap_or_default();
        if before != Some(now.as_str()) && number(&now).is_some_and(|now| now < newest) {
            self.began_anew(&newest.to_string(), &now);
            self.list_anew();
        }
        Ok(written)
    }

    /// Records a revision from the watch.
    pub(crate) fn saw(&self, revision: &str) {
        if let Some(revision) = number(revision) {
            self.0.newest.fetch_max(revision, Ordering::Relaxed);
        }
    }

    /// Records the revision of a list, whose history counts from now on.
    pub(crate) fn listed(&self, revision: &str) {
        let Some(listed) = number(revision) else {
            return;
        };
        let newest = self.0.newest.load(Ordering::Relaxed);
        if listed < newest {
            self.began_anew(&newest.to_string(), revision);
        }
        self.0.newest.store(listed, Ordering::Relaxed);
    }

    /// Waits for a request for a new list.
    pub(crate) async fn list_requested(&self) {
        self.0.list.notified().await;
    }

    /// Records that a revision is below an earlier one. The next list defines the new history.
    pub(crate) fn began_anew(&self, earlier: &str, now: &str) {
        self.0.newest.store(0, Ordering::Relaxed);
        self.0.restarts.fetch_add(1, Ordering::Relaxed);
        warn!(
            seen = earlier,
            now, "resourceVersion went back, as after a restore of etcd; listing again"
        );
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::core::{ObjectMeta, PartialObjectMeta};

    use super::*;

    async fn write(history: &History, before: Option<&str>, answer: &str) {
        let answer = PartialObjectMeta::<ConfigMap> {
            metadata: ObjectMeta {
                resource_version: Some(answer.to_owned()),
                ..ObjectMeta::default()
            },
            ..PartialObjectMeta::default()
        };
        let written = history.write(before, async { Ok(answer) }).await;
        assert!(written.is_ok());
    }

    #[tokio::test]
    async fn write_below_the_newest_revision_asks_for_a_list() {
        let history = History::default();
        history.listed("500");
        write(&history, Some("90"), "501").await;
        write(&history, Some("90"), "90").await;
        assert_eq!(history.restarts(), 0, "the second changed nothing");
        write(&history, Some("90"), "99").await;
        assert_eq!(history.restarts(), 1);
        history.list_requested().await;
    }

    #[test]
    fn list_of_an_older_history_is_the_measure_from_then_on() {
        let history = History::default();
        history.saw("500");
        history.listed("90");
        assert_eq!(history.restarts(), 1);
        history.saw("91");
        history.listed("91");
        assert_eq!(history.restarts(), 1);
    }

    #[test]
    fn revisions_compare_as_numbers_or_not_at_all() {
        assert!(is_below("99", "100"));
        assert!(!is_below("100", "100"));
        assert!(!is_below("a", "b") && !is_below("", "1"));
    }
}
