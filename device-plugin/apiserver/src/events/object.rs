//! Builds the objects of Events.

use std::collections::BTreeMap;

use bursar_crds::AGENT_MANAGER;
use bursar_crds::resources::{AGENT, WRITER_LABEL};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::runtime::events::EventType;

use super::{EventKey, PodRef, Subject};

/// The longest note that the API server accepts (`events.k8s.io/v1`).
pub(super) const MAX_NOTE_LENGTH: usize = 1024;

pub(super) fn build_event(key: &EventKey, node: &str) -> Event {
    let mut note = key.message.clone();
    note.truncate(note.floor_char_boundary(MAX_NOTE_LENGTH));
    let regarding = object_reference(&key.subject, node);
    let name = regarding.name.as_deref().unwrap_or_default();
    let now = Timestamp::now();
    Event {
        metadata: ObjectMeta {
            // client-go formats the names of events likewise.
            name: Some(format!("{name}.{:x}", now.as_nanosecond())),
            namespace: Some(key.subject.namespace().to_owned()),
            labels: Some(BTreeMap::from([(
                WRITER_LABEL.to_owned(),
                AGENT.to_owned(),
            )])),
            ..ObjectMeta::default()
        },
        type_: Some(match key.reason.type_() {
            EventType::Normal => "Normal".to_owned(),
            EventType::Warning => "Warning".to_owned(),
        }),
        reason: Some(key.reason.as_str().to_owned()),
        action: Some(key.reason.as_str().to_owned()),
        note: Some(note),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(AGENT_MANAGER.to_owned()),
        reporting_instance: Some(node.to_owned()),
        regarding: Some(regarding),
        ..Event::default()
    }
}

fn object_reference(subject: &Subject, node: &str) -> ObjectReference {
    match subject {
        // The kubelet sets the node's name as the UID in its own events, and `kubectl describe`
        // searches for that.
        Subject::Node => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        },
        Subject::Pod(PodRef {
            namespace,
            name,
            uid,
        }) => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.as_str().to_owned()),
            ..ObjectReference::default()
        },
    }
}
