//! Defines what an agent must know of a pod on its node: one channel for priority and annotations.
//!
//! The agent has no right to read pods, because the API server can restrict none to a node. A
//! further annotation for agents needs its name in [`POD_ANNOTATIONS`] alone.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::time::Duration;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// The annotation with the least number of GPUs over which a container's memory is spread.
pub const GPUS_ANNOTATION: &str = "bursar.dev/gpus";

/// The annotations that agents read. The operator writes no others, because every agent's token can
/// read them.
pub const POD_ANNOTATIONS: [&str; 1] = [GPUS_ANNOTATION];

/// The longest value of an annotation, in bytes. The operator omits a longer one.
pub const MAX_ANNOTATION_BYTES: usize = 63;

/// A pod on the node that requests a resource of Bursar.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSettings {
    /// The UID by which the node knows the pod. A static pod's is that of its mirror annotation.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The pod's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The pod's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub name: String,
    /// The pod's priority.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub priority: i32,
    /// The pod's annotations that agents read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 8))]
    pub annotations: BTreeMap<String, String>,
    /// The grace period of the pod's deletion, in seconds. Absent while nobody has deleted the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub deletion_grace_seconds: Option<i64>,
}

impl PodSettings {
    /// The settings of a pod with this UID, with those of its annotations that agents read.
    pub fn new(pod_uid: String, priority: i32, annotations: &BTreeMap<String, String>) -> Self {
        let read = POD_ANNOTATIONS.iter().filter_map(|name| {
            let value = annotations.get(*name)?;
            let fits = value.len() <= MAX_ANNOTATION_BYTES;
            fits.then(|| ((*name).to_owned(), value.clone()))
        });
        Self {
            pod_uid,
            priority,
            annotations: read.collect(),
            ..Self::default()
        }
    }

    /// The grace period of the pod's deletion; `None` while nobody has deleted the pod.
    pub fn deletion_grace(&self) -> Option<Duration> {
        let seconds = self.deletion_grace_seconds?;
        Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
    }

    /// The least number of GPUs over which the memory of each container is spread; one where the
    /// annotation is no number from 1 on.
    pub fn min_gpus(&self) -> NonZeroU16 {
        let gpus = self.annotations.get(GPUS_ANNOTATION);
        gpus.and_then(|gpus| gpus.parse().ok())
            .unwrap_or(NonZeroU16::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(gpus: &str) -> PodSettings {
        let annotations = [
            (GPUS_ANNOTATION, gpus),
            ("bursar.dev/else", "1"),
            ("kubernetes.io/config.hash", "u2"),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
        PodSettings::new("u1".to_owned(), 0, &annotations.into())
    }

    #[test]
    fn settings_have_the_annotations_that_agents_read() {
        let settings = settings("2");
        assert_eq!(
            settings.annotations.keys().collect::<Vec<_>>(),
            [GPUS_ANNOTATION]
        );
        assert_eq!(
            (settings.pod_uid.as_str(), settings.min_gpus().get()),
            ("u1", 2)
        );
    }

    #[test]
    fn malformed_gpus_annotation_means_one_gpu() {
        let long = "2".repeat(MAX_ANNOTATION_BYTES + 1);
        for bad in ["0", "-1", "two", "", &long] {
            assert_eq!(settings(bad).min_gpus(), NonZeroU16::MIN, "{bad}");
        }
    }

    #[test]
    fn settings_of_an_ordinary_pod_are_its_uid_alone() {
        let settings = PodSettings::new("u1".to_owned(), 0, &BTreeMap::new());
        let json = serde_json::to_value(&settings).unwrap();
        assert_eq!(json, serde_json::json!({ "podUid": "u1" }));
    }
}
