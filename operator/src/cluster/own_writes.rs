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
use crate::cluster::pod_request::AskingPod;
use crate::placement::node::SlimNode;

macro_rules! kinds {
    ($($kind:ident: $object:ty, $what:literal;)*) => {
        /// Takes objects as the API server answered writes of them. Cheap to clone.
        #[derive(Clone, Debug)]
        pub struct Wrote {
            $(#[doc = $what] pub $kind: UnboundedSender<Answer<$object>>,)*
        }

        /// The other end of [`Wrote`].
        #[derive(Debug)]
        pub struct Written {
            $(#[doc = $what] pub $kind: UnboundedReceiver<Answer<$object>>,)*
        }

        /// A way from who writes to who observes. What is written is bounded by the rate of writes.
        pub fn channel() -> (Wrote, Written) {
            $(let $kind = unbounded_channel();)*
            (Wrote { $($kind: $kind.0,)* }, Written { $($kind: $kind.1,)* })
        }
    };
}

kinds! {
    pods: AskingPod, "Pods.";
    gpu_nodes: GpuNode, "GPU nodes.";
    nodes: SlimNode, "Nodes.";
    quotas: ResourceQuota, "Quotas.";
    namespaces: PartialObjectMeta<Namespace>, "Namespaces.";
}

/// What the API server answered a write.
#[derive(Debug)]
pub struct Answer<K> {
    /// The object as it is since.
    object: K,
    /// When the write was begun.
    begun: Instant,
}

/// Does a write, and tells what came of it; none where its object is gone.
pub(crate) async fn telling<K, E>(
    who: &UnboundedSender<Answer<K>>,
    write: impl Future<Output = Result<Option<K>, E>>,
) -> Result<(), E> {
    let begun = Instant::now();
    if let Some(object) = write.await? {
        // Nobody listens when the operator ends.
        drop(who.send(Answer { object, begun }));
    }
    Ok(())
}

/// The events of `watch`, and what was `written` before it tells, made into what the watch tells.
pub(crate) fn merged<K, W>(
    watch: impl Stream<Item = Event<K>> + Send,
    mut written: UnboundedReceiver<Answer<W>>,
    as_watched: fn(W) -> K,
) -> impl Stream<Item = Event<K>> + Send
where
    K: ResourceExt + Send,
    W: Send,
{
    let mut gate = Gate::default();
    let told = watch.map(Heard::Told);
    let written = poll_fn(move |context| written.poll_recv(context)).map(Heard::Written);
    select(told, written).filter_map(move |heard| {
        ready(match heard {
            Heard::Told(event) => gate.told(event),
            Heard::Written(Answer { object, begun }) => gate.written(Answer {
                object: as_watched(object),
                begun,
            }),
        })
    })
}

enum Heard<K, W> {
    Told(Event<K>),
    Written(Answer<W>),
}

/// Lets through what is newer. Versions of one kind are numbers that grow with each write (KEP-5504); one that is none
/// is nothing to go by, so that the watch alone counts.
#[derive(Debug, Default)]
struct Gate {
    /// When all were listed; the watch goes on from there. None while a list is on its way.
    listed: Option<Instant>,
    /// The newest version that the watch told of any of them: what is older it has told too.
    told: u64,
    /// The objects of which a version is known that the watch has not told.
    ahead: BTreeMap<Key, u64>,
}

impl Gate {
    fn told<K: ResourceExt>(&mut self, event: Event<K>) -> Option<Event<K>> {
        let (Event::InitApply(object) | Event::Apply(object) | Event::Delete(object)) = &event
        else {
            self.listed = matches!(event, Event::InitDone).then(Instant::now);
            self.ahead.clear();
            if matches!(event, Event::Init) {
                // The versions of an etcd that was restored are lower.
                self.told = 0;
            }
            return Some(event);
        };
        let (key, version) = (Key::of(object), version(object));
        self.told = self.told.max(version.unwrap_or(0));
        let ahead = self.ahead.get(&key).copied();
        if version.zip(ahead).is_some_and(|(told, ahead)| told < ahead) {
            return None;
        }
        self.ahead.remove(&key);
        Some(event)
    }

    /// What was begun before the last list was there may be older than that list, which knows no version of what is gone:
    /// it is left to the watch.
    fn written<K: ResourceExt>(&mut self, answer: Answer<K>) -> Option<Event<K>> {
        let Answer { object, begun } = answer;
        let since = self.listed?;
        let version = version(&object).filter(|_| begun >= since)?;
        let key = Key::of(&object);
        let ahead = self.ahead.get(&key).copied().unwrap_or(0);
        if version <= ahead.max(self.told) {
            return None;
        }
        self.ahead.insert(key, version);
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
    fn now<K>(object: K) -> Answer<K> {
        Answer {
            object,
            begun: Instant::now(),
        }
    }

    fn listed() -> Gate {
        let mut gate = Gate::default();
        gate.told(Event::<ResourceQuota>::Init);
        gate.told(Event::InitApply(quota("a", 5)));
        gate.told(Event::<ResourceQuota>::InitDone);
        gate
    }

    #[test]
    fn what_was_written_counts_until_the_watch_has_passed_it() {
        let mut gate = listed();
        assert!(gate.written(now(quota("a", 9))).is_some());
        assert!(gate.told(Event::Apply(quota("a", 7))).is_none(), "older");
        assert!(gate.told(Event::Apply(quota("b", 8))).is_some(), "another");
        assert!(gate.told(Event::Apply(quota("a", 9))).is_some());
        assert!(gate.told(Event::Apply(quota("a", 10))).is_some());
    }

    #[test]
    fn what_the_watch_has_passed_does_not_come_back() {
        let mut gate = listed();
        assert!(gate.told(Event::Delete(quota("a", 8))).is_some());
        assert!(gate.written(now(quota("a", 7))).is_none(), "it is gone");
        assert!(
            gate.written(now(quota("a", 9))).is_some(),
            "it is made anew"
        );
        assert!(gate.written(now(quota("a", 9))).is_none());
    }

    #[test]
    fn a_list_takes_the_place_of_all_and_what_is_written_meanwhile_is_left_to_the_watch() {
        let mut gate = listed();
        assert!(gate.written(now(quota("a", 9))).is_some());
        gate.told(Event::<ResourceQuota>::Init);
        assert!(gate.written(now(quota("a", 10))).is_none());
        assert!(gate.told(Event::InitApply(quota("a", 8))).is_some());
        gate.told(Event::<ResourceQuota>::InitDone);
        assert!(gate.told(Event::Apply(quota("a", 9))).is_some());
    }

    #[test]
    fn a_write_whose_object_was_gone_when_all_were_listed_anew_does_not_bring_it_back() {
        let mut gate = listed();
        let late = now(quota("gone", 50));
        gate.told(Event::<ResourceQuota>::Init);
        gate.told(Event::InitApply(quota("a", 5)));
        gate.told(Event::<ResourceQuota>::InitDone);
        assert!(gate.written(late).is_none());
        assert!(gate.written(now(quota("new", 51))).is_some());
    }

    #[test]
    fn answer_counts_after_a_list_of_lower_versions() {
        let mut gate = listed();
        assert!(gate.told(Event::Apply(quota("a", 500))).is_some());
        gate.told(Event::<ResourceQuota>::Init);
        assert!(gate.told(Event::InitApply(quota("a", 4))).is_some());
        gate.told(Event::<ResourceQuota>::InitDone);
        assert!(gate.written(now(quota("a", 90))).is_some());
    }

    proptest! {
        /// However late the watch is, and in whichever order answers come: no object ever goes back, and in the end each
        /// is as it was last.
        #[test]
        fn no_object_goes_back_and_the_last_word_holds(
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
                    (true, _) => gate.written(now(object)),
                    (false, true) => gate.told(Event::Delete(object)),
                    (false, false) => gate.told(Event::Apply(object)),
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
