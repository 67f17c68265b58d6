//! Indexes what agents must know of the pods on their nodes, and decides which nodes lack some.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::{MAX_POD_SETTINGS, PodSettings};

use super::facts::pod::PodSummary;
use super::facts::pod_on_node::PodOnNode;
use super::index::ClusterIndex;

/// The settings of the pods on each node, sorted by UID.
fn by_node<'a>(pods: impl Iterator<Item = &'a PodSummary>) -> BTreeMap<&'a str, Vec<PodSettings>> {
    let mut nodes = BTreeMap::<&str, BTreeMap<&str, &PodOnNode>>::new();
    for (node, pod) in
        pods.filter_map(|pod| pod.requests.node.as_deref().zip(pod.on_node.as_deref()))
    {
        let by_uid = nodes.entry(node).or_default();
        let uid = pod.settings.pod_uid.as_str();
        // A mirror pod replaces no real pod with the same UID, because its creator chooses the UID.
        if !(pod.is_mirror && by_uid.contains_key(uid)) {
            by_uid.insert(uid, pod);
        }
    }
    let settings = |by_uid: BTreeMap<&str, &PodOnNode>| {
        let pods = by_uid.into_values().take(MAX_POD_SETTINGS);
        pods.map(|pod| pod.settings.clone()).collect()
    };
    let nodes = nodes.into_iter();
    nodes.map(|(node, pods)| (node, settings(pods))).collect()
}

impl ClusterIndex {
    /// The GpuNodes to which the operator has to write settings of pods: name, UID and settings.
    ///
    /// `applied` holds what the operator applied last, by the UID of the GpuNode; the entries of
    /// deleted ones are dropped. The operator does not write settings again that the API server did
    /// not keep, because the server's schema may be older.
    pub fn outdated_pod_settings(
        &self,
        applied: &mut BTreeMap<String, Vec<PodSettings>>,
    ) -> Vec<(String, String, Vec<PodSettings>)> {
        if !self.pods.is_listed() || !self.gpu_nodes.is_listed() {
            return Vec::new();
        }
        self.forget_deleted_uids(applied);
        let mut by_node = by_node(self.gpu_pods().map(|(_, pod)| pod));
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let outdated = nodes.filter_map(|(key, node)| {
            let pods = by_node.remove(key.name.as_str()).unwrap_or_default();
            let is_due = node.pods != pods && applied.get(&node.facts.uid) != Some(&pods);
            is_due.then(|| (key.name.clone(), node.facts.uid.clone(), pods))
        });
        outdated.collect()
    }
}

#[cfg(test)]
mod tests {
    use bursar_crds::{GpuNode, Quantum};
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::super::{Cache, CacheEntry, GpuNodeSummary, Key, WatchEvent};
    use super::*;
    use crate::cluster::slim_pod::SlimPod;

    fn pod(uid: &str, change: Value) -> Value {
        let mut pod = json!({
            "metadata": { "name": uid, "namespace": "team", "uid": uid },
            "spec": { "nodeName": "n", "containers": [
                { "name": "c", "resources": { "requests": { "bursar.dev/gpu-memory-gib": "4" } } },
            ] },
            "status": { "phase": "Pending" },
        });
        merge(&mut pod, change);
        pod
    }

    fn merge(into: &mut Value, change: Value) {
        match (into, change) {
            (Value::Object(into), Value::Object(change)) => {
                for (key, value) in change {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, change) => *into = change,
        }
    }

    fn event(pod: &Value) -> Event<CacheEntry<PodSummary>> {
        let pod: SlimPod = serde_json::from_value(pod.clone()).unwrap();
        let key = Key {
            namespace: "team".to_owned(),
            name: pod.metadata.name.clone().unwrap(),
        };
        Event::Apply((key, PodSummary::of(&pod, Quantum::Gib1)))
    }

    fn on_node(pods: &[Value]) -> Vec<PodSettings> {
        let mut cache = Cache::default();
        pods.iter().for_each(|pod| drop(cache.apply(event(pod))));
        let mut nodes = by_node(cache.iter().map(|(_, pod)| pod));
        nodes.remove("n").unwrap_or_default()
    }

    /// The settings of the pod `name` of [`pod`], with this UID.
    fn settings_of(name: &str, uid: &str) -> PodSettings {
        PodSettings {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            ..PodSettings::new(uid.to_owned(), 0, &BTreeMap::new())
        }
    }

    fn settings(uid: &str) -> PodSettings {
        settings_of(uid, uid)
    }

    #[test]
    fn pods_on_the_node_have_priority_and_annotations() {
        let gpus = json!({ "metadata": { "annotations": { "bursar.dev/gpus": "2" } } });
        let pods = [
            pod("b", json!({ "spec": { "priority": -10 } })),
            pod("a", gpus),
            pod("elsewhere", json!({ "spec": { "nodeName": "other" } })),
            pod("unscheduled", json!({ "spec": { "nodeName": null } })),
            pod(
                "quiet",
                json!({ "spec": { "containers": [{ "name": "c" }] } }),
            ),
            pod("ended", json!({ "status": { "phase": "Failed" } })),
        ];
        let found = on_node(&pods);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].pod_uid.as_str(), found[0].min_gpus().get()),
            ("a", 2)
        );
        assert_eq!((found[1].pod_uid.as_str(), found[1].priority), ("b", -10));
    }

    #[test]
    fn deletion_is_passed_on_with_its_grace() {
        let deleted = json!({ "metadata": {
            "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 600 } });
        let found = on_node(&[pod("a", deleted), pod("b", json!({}))]);
        let graces: Vec<_> = found.iter().map(|pod| pod.deletion_grace_seconds).collect();
        assert_eq!(graces, [Some(600), None]);
    }

    #[test]
    fn only_a_mirror_pod_has_the_uid_of_an_annotation() {
        let node = json!([{ "apiVersion": "v1", "kind": "Node", "name": "n", "uid": "nu", "controller": true }]);
        let annotated = |name: &str, owners: &Value| {
            let meta = json!({ "annotations": { name: "static" }, "ownerReferences": owners });
            on_node(&[pod("api", json!({ "metadata": meta }))])
        };
        let (mirror, hash) = ("kubernetes.io/config.mirror", "kubernetes.io/config.hash");
        assert_eq!(annotated(mirror, &node), [settings_of("api", "static")]);
        assert_eq!(annotated(mirror, &json!([])), [settings("api")]);
        assert_eq!(annotated(hash, &node), [settings("api")]);
    }

    #[test]
    fn mirror_pod_replaces_no_real_pod() {
        let node = json!([{ "apiVersion": "v1", "kind": "Node", "name": "n", "uid": "nu", "controller": true }]);
        let meta = json!({ "annotations": { "kubernetes.io/config.mirror": "z" }, "ownerReferences": node });
        let claim = pod(
            "a",
            json!({ "metadata": meta, "spec": { "priority": -10 } }),
        );
        assert_eq!(on_node(&[claim, pod("z", json!({}))]), [settings("z")]);
    }

    /// An index with the GpuNode `n`, whose spec has these settings.
    fn index(settings: &[PodSettings]) -> ClusterIndex {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        put_node(&mut index, settings);
        index.apply(WatchEvent::Pod(Event::Init));
        index.apply(WatchEvent::Pod(Event::InitDone));
        index
    }

    fn put_node(index: &mut ClusterIndex, settings: &[PodSettings]) {
        let node: GpuNode = serde_json::from_value(json!({
            "metadata": { "name": "n", "uid": "node-uid" }, "spec": { "pods": settings } }))
        .unwrap();
        let key = Key {
            namespace: String::new(),
            name: "n".to_owned(),
        };
        let summary = GpuNodeSummary::of(&node, Quantum::Gib1);
        for event in [
            Event::Init,
            Event::InitApply((key, Some(summary))),
            Event::InitDone,
        ] {
            index.apply(WatchEvent::GpuNode(event));
        }
    }

    #[test]
    fn settings_are_due_until_the_object_has_them() {
        let mut index = index(&[]);
        let mut applied = BTreeMap::new();
        assert_eq!(index.outdated_pod_settings(&mut applied), []);
        index.apply(WatchEvent::Pod(event(&pod("a", json!({})))));
        let due = vec![settings("a")];
        let write = ("n".to_owned(), "node-uid".to_owned(), due.clone());
        assert_eq!(index.outdated_pod_settings(&mut applied), [write]);
        applied.insert("node-uid".to_owned(), due.clone());
        assert_eq!(
            index.outdated_pod_settings(&mut applied),
            [],
            "no write repeats"
        );
        put_node(&mut index, &due);
        assert_eq!(index.outdated_pod_settings(&mut BTreeMap::new()), []);
    }

    #[test]
    fn settings_of_an_ended_pod_are_removed() {
        let index = index(&[settings("gone")]);
        let due = index.outdated_pod_settings(&mut BTreeMap::new());
        assert_eq!(due, [("n".to_owned(), "node-uid".to_owned(), vec![])]);
    }
}
