//! What the operator wrote is known to it before a watch tells: nothing is written twice because a watch is late.
//!
//! ```text
//!   an answer to a write --\
//!                           +--> what is newer than all before, of each object --> the world
//!   a watch ---------------/
//! ```

use std::collections::BTreeMap;
use std::future::ready;
use std::time::Instant;

use bursar_crds::GpuNode;
use futures::stream::{Stream, StreamExt as _, poll_fn, select};
use k8s_openapi::api::core::v1::{Namespace, ResourceQuota};
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::cluster::Key;
use crate::cluster::pod_request::SlimPod;
use crate::placement::node::SlimNode;

macro_rules! kinds {
    ($($kind:ident: $object:ty, $what:literal;)*) => {
        /// Takes objects as the API server answered writes of them. Cheap to clone.
        #[derive(Clone, Debug)]
        pub struct WriteSender {
            $(#[doc = $what] pub $kind: UnboundedSender<WriteResponse<$object>>,)*
        }

        /// The other end of [`WriteSender`].
        #[derive(Debug)]
        pub struct WriteReceiver {
            $(#[doc = $what] pub $kind: UnboundedReceiver<WriteResponse<$object>>,)*
        }

        /// A way from who writes to who observes. What is written is bounded by the rate of writes.
        pub fn channel() -> (WriteSender, WriteReceiver) {
            $(let $kind = unbounded_channel();)*
            (WriteSender { $($kind: $kind.0,)* }, WriteReceiver { $($kind: $kind.1,)* })
        }
    };
}

kinds! {
    pods: SlimPod, "Pods.";
    gpu_nodes: GpuNode, "GPU nodes.";
    nodes: SlimNode, "Nodes.";
    quotas: ResourceQuota, "Quotas.";
    namespaces: PartialObjectMeta<Namespace>, "Namespaces.";
}

/// What the API server answered a write.
#[derive(Debug)]
pub struct WriteResponse<K> {
    /// The object as it is since.
    object: K,
    /// When the write was begun.
    started: Instant,
}

/// Does a write, and tells what came of it; none where its object is gone.
pub(crate) async fn send_response<K, E>(
    who: &UnboundedSender<WriteResponse<K>>,
    write: impl Future<Output = Result<Option<K>, E>>,
) -> Result<(), E> {
    let begun = Instant::now();
    if let Some(object) = write.await? {
        // Nobody listens when the operator ends.
        drop(who.send(WriteResponse {
            object,
            started: begun,
        }));
    }
    Ok(())
}

/// The events of `watch`, and what was `written` before it tells, made into what the watch tells.
pub(crate) fn merge_with_watch<K, W>(
    watch: impl Stream<Item = Event<K>> + Send,
    mut written: UnboundedReceiver<WriteResponse<W>>,
    as_watched: fn(W) -> K,
) -> impl Stream<Item = Event<K>> + Send
where
    K: ResourceExt + Send,
    W: Send,
{
    let mut gate = VersionGate::default();
    let watched = watch.map(Source::Watch);
    let written = poll_fn(move |context| written.poll_recv(context)).map(Source::Write);
    select(watched, written).filter_map(move |heard| {
        ready(match heard {
            Source::Watch(event) => gate.from_watch(event),
            Source::Write(WriteResponse {
                object,
                started: begun,
            }) => gate.from_write(WriteResponse {
                object: as_watched(object),
                started: begun,
            }),
        })
    })
}

enum Source<K, W> {
    Watch(Event<K>),
    Write(WriteResponse<W>),
}

/// Lets through what is newer. Versions of one kind are numbers that grow with each write (KEP-5504); one that is none
/// is nothing to go by, so that the watch alone counts.
#[derive(Debug, Default)]
struct VersionGate {
    /// When all were listed; the watch goes on from there. None while a list is on its way.
    listed: Option<Instant>,
    /// The newest version that the watch told of any of them: what is older it has told too.
    newest_watched: u64,
    /// The objects of which a version is known that the watch has not told.
    unconfirmed: BTreeMap<Key, u64>,
}

impl VersionGate {
    fn from_watch<K: ResourceExt>(&mut self, event: Event<K>) -> Option<Event<K>> {
        let (Event::InitApply(object) | Event::Apply(object) | Event::Delete(object)) = &event
        else {
            self.listed = matches!(event, Event::InitDone).then(Instant::now);
            self.unconfirmed.clear();
            if matches!(event, Event::Init) {
                // The versions of an etcd that was restored are lower.
                self.newest_watched = 0;
            }
            return Some(event);
        };
        let (key, version) = (Key::of(object), version(object));
        self.newest_watched = self.newest_watched.max(version.unwrap_or(0));
        let ahead = self.unconfirmed.get(&key).copied();
        if version.zip(ahead).is_some_and(|(told, ahead)| told < ahead) {
            return None;
        }
        self.unconfirmed.remove(&key);
        Some(event)
    }

    /// What was begun before the last list was there may be older than that list, which knows no version of what is gone:
    /// it is left to the watch.
    fn from_write<K: ResourceExt>(&mut self, answer: WriteResponse<K>) -> Option<Event<K>> {
        let WriteResponse {
            object,
            started: begun,
        } = answer;
        let since = self.listed?;
        let version = version(&object).filter(|_| begun >= since)?;
        let key = Key::of(&object);
        let ahead = self.unconfirmed.get(&key).copied().unwrap_or(0);
        if version <= ahead.max(self.newest_watched) {
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

    /// A quota of this version.
    fn quota(name: &str, version: u64) -> ResourceQuota {
        let metadata =
            json!({ "name": name, "namespace": "n", "resourceVersion": version.to_string() });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    /// The answer to a write that is begun now.
    fn now<K>(object: K) -> WriteResponse<K> {
        WriteResponse {
            object,
            started: Instant::now(),
        }
    }

    fn listed() -> VersionGate {
        let mut gate = VersionGate::default();
        gate.from_watch(Event::<ResourceQuota>::Init);
        gate.from_watch(Event::InitApply(quota("a", 5)));
        gate.from_watch(Event::<ResourceQuota>::InitDone);
        gate
    }

    #[test]
    fn own_write_counts_until_the_watch_catches_up() {
        let mut gate = listed();
        assert!(gate.from_write(now(quota("a", 9))).is_some());
        assert!(
            gate.from_watch(Event::Apply(quota("a", 7))).is_none(),
            "older"
        );
        assert!(
            gate.from_watch(Event::Apply(quota("b", 8))).is_some(),
            "another"
        );
        assert!(gate.from_watch(Event::Apply(quota("a", 9))).is_some());
        assert!(gate.from_watch(Event::Apply(quota("a", 10))).is_some());
    }

    #[test]
    fn response_older_than_the_watch_is_dropped() {
        let mut gate = listed();
        assert!(gate.from_watch(Event::Delete(quota("a", 8))).is_some());
        assert!(gate.from_write(now(quota("a", 7))).is_none(), "it is gone");
        assert!(
            gate.from_write(now(quota("a", 9))).is_some(),
            "it is made anew"
        );
        assert!(gate.from_write(now(quota("a", 9))).is_none());
    }

    #[test]
    fn list_replaces_own_writes_and_drops_responses_meanwhile() {
        let mut gate = listed();
        assert!(gate.from_write(now(quota("a", 9))).is_some());
        gate.from_watch(Event::<ResourceQuota>::Init);
        assert!(gate.from_write(now(quota("a", 10))).is_none());
        assert!(gate.from_watch(Event::InitApply(quota("a", 8))).is_some());
        gate.from_watch(Event::<ResourceQuota>::InitDone);
        assert!(gate.from_watch(Event::Apply(quota("a", 9))).is_some());
    }

    #[test]
    fn response_from_before_a_list_does_not_revive_an_object() {
        let mut gate = listed();
        let late = now(quota("gone", 50));
        gate.from_watch(Event::<ResourceQuota>::Init);
        gate.from_watch(Event::InitApply(quota("a", 5)));
        gate.from_watch(Event::<ResourceQuota>::InitDone);
        assert!(gate.from_write(late).is_none());
        assert!(gate.from_write(now(quota("new", 51))).is_some());
    }

    #[test]
    fn response_counts_after_a_list_of_lower_versions() {
        let mut gate = listed();
        assert!(gate.from_watch(Event::Apply(quota("a", 500))).is_some());
        gate.from_watch(Event::<ResourceQuota>::Init);
        assert!(gate.from_watch(Event::InitApply(quota("a", 4))).is_some());
        gate.from_watch(Event::<ResourceQuota>::InitDone);
        assert!(gate.from_write(now(quota("a", 90))).is_some());
    }

    proptest! {
        /// However late the watch is, and in whichever order answers come: no object ever goes back, and in the end each
        /// is as it was last.
        #[test]
        fn no_object_goes_back_and_the_last_event_wins(
            objects in prop::collection::vec((0_usize..3, any::<bool>(), any::<bool>()), 1..40),
            late in prop::collection::vec(0_usize..6, 40),
        ) {
            const NAMES: [&str; 3] = ["a", "b", "c"];
            let mut gate = listed();
            // What happens: the event, and when its answer comes; none where another one wrote.
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
            for (_, (at, name, deleted), answer) in queue {
                let object = quota(name, at as u64 + 10);
                let passed = match (answer, deleted) {
                    (true, _) => gate.from_write(now(object)),
                    (false, true) => gate.from_watch(Event::Delete(object)),
                    (false, false) => gate.from_watch(Event::Apply(object)),
                };
                if passed.is_some() {
                    let before = known.insert(name, (at, deleted));
                    prop_assert!(before.is_none_or(|(before, _)| before <= at), "{} goes back", name);
                }
                if !answer {
                    last.insert(name, (at, deleted));
                }
            }
            prop_assert_eq!(known, last);
        }
    }
}
