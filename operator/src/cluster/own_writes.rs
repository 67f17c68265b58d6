//! Merges the operator's own write responses into the watch streams (read your writes).
//!
//! A late watch then causes no second write.
//!
//! ```text
//!   write responses --\
//!                      +--> VersionGate: newer than all before, per object --> ClusterIndex
//!   watch ------------/
//! ```

use std::collections::BTreeMap;
use std::future::ready;
use std::time::Instant;

use bursar_crds::{GpuNamespace, GpuNode};
use futures::stream::{Stream, StreamExt as _, poll_fn, select};
use k8s_openapi::api::core::v1::{Namespace, ResourceQuota};
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::cluster::Key;
use crate::cluster::slim_node::SlimNode;
use crate::cluster::slim_pod::SlimPod;

macro_rules! kinds {
    ($($kind:ident: $object:ty, $what:literal;)*) => {
        /// Sends objects as the API server returned them from writes. Cheap to clone.
        #[derive(Clone, Debug)]
        pub struct WriteSender {
            $(#[doc = $what] pub $kind: UnboundedSender<WriteResponse<$object>>,)*
        }

        /// The receiving end of [`WriteSender`].
        #[derive(Debug)]
        pub struct WriteReceiver {
            $(#[doc = $what] pub $kind: Responses<$object>,)*
        }

        /// Creates the channels. They are unbounded, because the rate of writes bounds them.
        pub fn channel() -> (WriteSender, WriteReceiver) {
            $(let $kind = unbounded_channel();)*
            (WriteSender { $($kind: $kind.0,)* }, WriteReceiver { $($kind: $kind.1,)* })
        }
    };
}

kinds! {
    pods: SlimPod, "Pods.";
    gpu_nodes: GpuNode, "GPU nodes.";
    gpu_namespaces: GpuNamespace, "What agents know of namespaces.";
    nodes: SlimNode, "Nodes.";
    quotas: ResourceQuota, "Quotas.";
    namespaces: PartialObjectMeta<Namespace>, "Namespaces.";
}

/// Receives the responses to writes of one kind.
pub type Responses<K> = UnboundedReceiver<WriteResponse<K>>;

/// The API server's response to a write.
#[derive(Debug)]
pub struct WriteResponse<K> {
    /// The object after the write.
    object: K,
    /// When the operator started the write.
    started: Instant,
}

/// Awaits a write and sends its response, unless the object is gone.
pub(crate) async fn send_response<K, E>(
    sender: &UnboundedSender<WriteResponse<K>>,
    write: impl Future<Output = Result<Option<K>, E>>,
) -> Result<(), E> {
    let started = Instant::now();
    if let Some(object) = write.await? {
        // The receiver is closed only while the operator stops.
        drop(sender.send(WriteResponse { object, started }));
    }
    Ok(())
}

/// Merges `written` responses into the events of `watch`.
pub(crate) fn merge_with_watch<K, W>(
    watch: impl Stream<Item = Event<K>> + Send,
    mut written: Responses<W>,
    as_watched: fn(W) -> K,
) -> impl Stream<Item = Event<K>> + Send
where
    K: ResourceExt + Send,
    W: Send,
{
    let mut gate = VersionGate::default();
    let watched = watch.map(Source::Watch);
    let written = poll_fn(move |context| written.poll_recv(context)).map(Source::Write);
    select(watched, written).filter_map(move |item| {
        ready(match item {
            Source::Watch(event) => gate.admit_event(event),
            Source::Write(WriteResponse { object, started }) => {
                gate.admit_response(WriteResponse {
                    object: as_watched(object),
                    started,
                })
            }
        })
    })
}

enum Source<K, W> {
    Watch(Event<K>),
    Write(WriteResponse<W>),
}

/// Passes objects that are newer than all before. Resource versions of one kind are increasing
/// numbers (KEP-5504). A version that is no number never passes, so that only the watch counts.
#[derive(Debug, Default)]
struct VersionGate {
    /// When the last list completed. `None` during a list.
    listed: Option<Instant>,
    /// The newest version that the watch has delivered for any object.
    newest_watched: u64,
    /// The objects whose newest version came from a response and not yet from the watch.
    unconfirmed: BTreeMap<Key, u64>,
}

impl VersionGate {
    fn admit_event<K: ResourceExt>(&mut self, event: Event<K>) -> Option<Event<K>> {
        let (Event::InitApply(object) | Event::Apply(object) | Event::Delete(object)) = &event
        else {
            self.listed = matches!(event, Event::InitDone).then(Instant::now);
            self.unconfirmed.clear();
            if matches!(event, Event::Init) {
                // After a restore of etcd the versions are lower.
                self.newest_watched = 0;
            }
            return Some(event);
        };
        let (key, version) = (Key::of(object), version(object));
        self.newest_watched = self.newest_watched.max(version.unwrap_or(0));
        let unconfirmed = self.unconfirmed.get(&key).copied();
        if version
            .zip(unconfirmed)
            .is_some_and(|(watched, unconfirmed)| watched < unconfirmed)
        {
            return None;
        }
        self.unconfirmed.remove(&key);
        Some(event)
    }

    /// A response from before the last list may be older than the list, which has no version of
    /// deleted objects. Such a response is dropped, and the watch delivers the object.
    fn admit_response<K: ResourceExt>(&mut self, response: WriteResponse<K>) -> Option<Event<K>> {
        let WriteResponse { object, started } = response;
        let since = self.listed?;
        let version = version(&object).filter(|_| started >= since)?;
        let key = Key::of(&object);
        let unconfirmed = self.unconfirmed.get(&key).copied().unwrap_or(0);
        if version <= unconfirmed.max(self.newest_watched) {
            return None;
        }
        self.unconfirmed.insert(key, version);
        Some(Event::Apply(object))
    }
}

fn version(object: &impl ResourceExt) -> Option<u64> {
    object.resource_version()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    /// A quota with this version.
    fn quota(name: &str, version: u64) -> ResourceQuota {
        let metadata =
            json!({ "name": name, "namespace": "n", "resourceVersion": version.to_string() });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    /// The response to a write that starts now.
    fn now<K>(object: K) -> WriteResponse<K> {
        WriteResponse {
            object,
            started: Instant::now(),
        }
    }

    fn listed() -> VersionGate {
        let mut gate = VersionGate::default();
        gate.admit_event(Event::<ResourceQuota>::Init);
        gate.admit_event(Event::InitApply(quota("a", 5)));
        gate.admit_event(Event::<ResourceQuota>::InitDone);
        gate
    }

    #[test]
    fn own_write_counts_until_the_watch_catches_up() {
        let mut gate = listed();
        assert!(gate.admit_response(now(quota("a", 9))).is_some());
        assert!(
            gate.admit_event(Event::Apply(quota("a", 7))).is_none(),
            "older"
        );
        assert!(
            gate.admit_event(Event::Apply(quota("b", 8))).is_some(),
            "another"
        );
        assert!(gate.admit_event(Event::Apply(quota("a", 9))).is_some());
        assert!(gate.admit_event(Event::Apply(quota("a", 10))).is_some());
    }

    #[test]
    fn response_older_than_the_watch_is_dropped() {
        let mut gate = listed();
        assert!(gate.admit_event(Event::Delete(quota("a", 8))).is_some());
        assert!(
            gate.admit_response(now(quota("a", 7))).is_none(),
            "it is gone"
        );
        assert!(
            gate.admit_response(now(quota("a", 9))).is_some(),
            "it is made anew"
        );
        assert!(gate.admit_response(now(quota("a", 9))).is_none());
    }

    #[test]
    fn list_replaces_own_writes_and_drops_responses_meanwhile() {
        let mut gate = listed();
        assert!(gate.admit_response(now(quota("a", 9))).is_some());
        gate.admit_event(Event::<ResourceQuota>::Init);
        assert!(gate.admit_response(now(quota("a", 10))).is_none());
        assert!(gate.admit_event(Event::InitApply(quota("a", 8))).is_some());
        gate.admit_event(Event::<ResourceQuota>::InitDone);
        assert!(gate.admit_event(Event::Apply(quota("a", 9))).is_some());
    }

    #[test]
    fn response_from_before_a_list_does_not_revive_an_object() {
        let mut gate = listed();
        let late = now(quota("gone", 50));
        gate.admit_event(Event::<ResourceQuota>::Init);
        gate.admit_event(Event::InitApply(quota("a", 5)));
        gate.admit_event(Event::<ResourceQuota>::InitDone);
        assert!(gate.admit_response(late).is_none());
        assert!(gate.admit_response(now(quota("new", 51))).is_some());
    }

    #[test]
    fn response_counts_after_a_list_of_lower_versions() {
        let mut gate = listed();
        assert!(gate.admit_event(Event::Apply(quota("a", 500))).is_some());
        gate.admit_event(Event::<ResourceQuota>::Init);
        assert!(gate.admit_event(Event::InitApply(quota("a", 4))).is_some());
        gate.admit_event(Event::<ResourceQuota>::InitDone);
        assert!(gate.admit_response(now(quota("a", 90))).is_some());
    }

    proptest! {
        /// For any delay of the watch and any order of responses, no object goes back in time and
        /// each ends in its last state.
        #[test]
        fn no_object_goes_back_and_the_last_event_wins(
            objects in prop::collection::vec((0_usize..3, any::<bool>(), any::<bool>()), 1..40),
            late in prop::collection::vec(0_usize..6, 40),
        ) {
            const NAMES: [&str; 3] = ["a", "b", "c"];
            let mut gate = listed();
            // Each entry holds an event and the time of its delivery, by the watch or as a
            // response.
            let mut queue = Vec::new();
            for (at, ((name, deleted, ours), late)) in objects.iter().zip(late).enumerate() {
                let event = (at, NAMES[*name], *deleted);
                queue.push((at + 3, event, false));
                if *ours && !deleted {
                    queue.push((at + late, event, true));
                }
            }
            queue.sort_by_key(|(when, ..)| *when);
            let (mut known, mut last) = (BTreeMap::new(), BTreeMap::new());
            for (_, (at, name, deleted), response) in queue {
                let object = quota(name, at as u64 + 10);
                let passed = match (response, deleted) {
                    (true, _) => gate.admit_response(now(object)),
                    (false, true) => gate.admit_event(Event::Delete(object)),
                    (false, false) => gate.admit_event(Event::Apply(object)),
                };
                if passed.is_some() {
                    let before = known.insert(name, (at, deleted));
                    prop_assert!(before.is_none_or(|(before, _)| before <= at), "{} goes back", name);
                }
                if !response {
                    last.insert(name, (at, deleted));
                }
            }
            prop_assert_eq!(known, last);
        }
    }
}
