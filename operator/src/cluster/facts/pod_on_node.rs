//! Reduces a pod on a node to what the node's agent must know.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::PodSettings;
use bursar_crds::resources::PREFIX;

use super::pod_request::{has_ended, mirrored_uid};
use crate::cluster::slim_pod::SlimPod;

/// A pod on a node that requests a resource of Bursar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOnNode {
    /// Whether the pod is a mirror pod, whose UID an annotation names.
    pub is_mirror: bool,
    /// The settings for the node's agent.
    pub settings: PodSettings,
}

impl PodOnNode {
    /// `None` for a pod without a node or without a request, and for a pod that has ended.
    pub fn of(pod: &SlimPod) -> Option<Self> {
        let (meta, spec) = (&pod.metadata, &pod.spec);
        spec.node_name.as_ref().filter(|node| !node.is_empty())?;
        let mut containers = spec.containers.iter().chain(&spec.init_containers);
        let requests = containers.any(|container| {
            let mut resources = container.resources.requests.keys();
            resources.any(|resource| resource.starts_with(PREFIX))
        });
        if !requests || has_ended(pod) {
            return None;
        }
        let mirrored = mirrored_uid(meta);
        let uid = mirrored.or(meta.uid.as_ref()).cloned()?;
        let none = BTreeMap::new();
        let annotations = meta.annotations.as_ref().unwrap_or(&none);
        let grace = meta.deletion_grace_period_seconds.unwrap_or(0);
        Some(Self {
            is_mirror: mirrored.is_some(),
            settings: PodSettings {
                deletion_grace_seconds: meta.deletion_timestamp.as_ref().map(|_| grace),
                namespace: meta.namespace.clone().unwrap_or_default(),
                name: meta.name.clone().unwrap_or_default(),
                ..PodSettings::new(uid, spec.priority.unwrap_or(0), annotations)
            },
        })
    }
}
