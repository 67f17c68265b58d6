//! Defines the parts of Events.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Meta;

/// An Event of the core API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Event {
    /// The metadata.
    pub metadata: Meta,
    /// The object.
    pub involved_object: ObjectRef,
    /// Another object, such as the victim for a waiting pod.
    pub related: ObjectRef,
    /// The reason as one word.
    pub reason: String,
    /// The message.
    pub message: String,
    /// `Normal` or `Warning`.
    #[serde(rename = "type")]
    pub type_: String,
    /// The time of the first occurrence of an Event of `events.k8s.io`.
    pub event_time: Option<Timestamp>,
    /// The time of the last occurrence of an older Event.
    pub last_timestamp: Option<Timestamp>,
    /// The number of occurrences of an older Event.
    pub count: i64,
    /// Further occurrences.
    pub series: Option<Series>,
    /// The writer.
    pub reporting_component: String,
    /// The writer's instance: an agent's node.
    pub reporting_instance: String,
}

/// The object of an Event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    /// The kind.
    pub kind: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
}

/// Further occurrences of an Event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Series {
    /// The number.
    pub count: i64,
    /// The time of the last.
    pub last_observed_time: Option<Timestamp>,
}

impl Event {
    /// The time of the last occurrence.
    pub fn time(&self) -> Option<Timestamp> {
        let series = self.series.as_ref();
        series
            .and_then(|series| series.last_observed_time)
            .or(self.last_timestamp)
            .or(self.event_time)
            .or(self.metadata.creation_timestamp)
    }

    /// The number of occurrences.
    pub fn occurrences(&self) -> i64 {
        let series = self.series.as_ref().map_or(0, |series| series.count);
        series.max(self.count).max(1)
    }
}
