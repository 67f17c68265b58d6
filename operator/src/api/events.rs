//! Publishes the operator's Events: for changed conditions, evictions and placement.

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus, OPERATOR_MANAGER};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use tracing::{debug, info};

use super::error::{ApiError, with_timeout};
use crate::error::error_chain;

/// The longest note that the API server accepts (`events.k8s.io/v1`).
const MAX_NOTE_LENGTH: usize = 1024;

/// The conditions that changed, each with whether the change needs no attention.
///
/// Each edit of a budget makes its quotas pending for a moment. `Ready` only summarizes the others.
/// A new budget that is not in force yet is no change.
fn changed_conditions<'a>(
    before: Option<&GpuMemoryBudgetStatus>,
    now: &'a GpuMemoryBudgetStatus,
) -> Vec<(&'a Condition, bool)> {
    let status_before = |type_: &str| {
        let conditions = before.iter().flat_map(|status| &status.conditions);
        conditions
            .into_iter()
            .find(|condition| condition.type_ == type_)
            .map(|condition| condition.status.as_str())
    };
    let changes = now.conditions.iter().filter_map(|condition| {
        let good_when = if condition.type_ == names::EXCEEDED {
            "False"
        } else {
            "True"
        };
        let is_good = condition.status == good_when;
        let changed = match status_before(&condition.type_) {
            _ if condition.type_ == names::READY => false,
            Some(status) => status != condition.status,
            None => !is_good && condition.type_ != names::ENFORCED && condition.status != "Unknown",
        };
        let is_passing = condition.reason == names::QUOTA_PENDING;
        changed.then_some((condition, is_good || is_passing))
    });
    changes.collect()
}

/// Publishes the changed conditions of `budget`.
pub(crate) async fn publish_transitions(
    client: &Client,
    budget: &GpuMemoryBudget,
    before: Option<&GpuMemoryBudgetStatus>,
    now: &GpuMemoryBudgetStatus,
) {
    for (condition, is_good) in changed_conditions(before, now) {
        let Condition {
            type_,
            status,
            reason,
            message,
            ..
        } = condition;
        let namespace = budget.metadata.namespace.as_deref().unwrap_or_default();
        info!(
            namespace,
            condition = type_,
            status,
            reason,
            "budget condition changed"
        );
        let kind = if is_good {
            EventType::Normal
        } else {
            EventType::Warning
        };
        let event = event(kind, type_, reason, message);
        publish(client, &budget.object_ref(&()), &event).await;
    }
}

/// Publishes the eviction of a pod for its budget. Returns whether the API server has stored the
/// Event.
pub(crate) async fn publish_eviction(
    client: &Client,
    (namespace, pod, uid): (&str, &str, &str),
    reason: &str,
    note: &str,
) -> bool {
    info!(namespace, pod, uid, reason, note, "evicted pod");
    let about = pod_reference(namespace, pod, uid);
    let event = event(EventType::Warning, "Evict", reason, note);
    publish(client, &about, &event).await
}

/// Publishes an eviction before it is requested, where no budget records it.
///
/// # Errors
/// The API server has not stored the Event, or did not answer.
pub(crate) async fn announce_eviction(
    client: &Client,
    (namespace, pod, uid): (&str, &str, &str),
    reason: &str,
    note: &str,
) -> Result<(), ApiError> {
    info!(namespace, pod, uid, reason, note, "evicting pod");
    let about = pod_reference(namespace, pod, uid);
    let event = event(EventType::Warning, "Evict", reason, note);
    try_publish(client, &about, &event).await
}

/// Publishes what placement did with a pod, and the other pod that it did it for or with.
pub(crate) async fn publish_placement(
    client: &Client,
    (namespace, pod, uid): (&str, &str, &str),
    reason: &str,
    note: &str,
    related: Option<(&str, &str, &str)>,
) {
    let about = pod_reference(namespace, pod, uid);
    let event = Event {
        secondary: related.map(|(namespace, pod, uid)| pod_reference(namespace, pod, uid)),
        ..event(EventType::Normal, reason, reason, note)
    };
    publish(client, &about, &event).await;
}

/// Publishes what the operator did with the GPUs of a node.
pub(crate) async fn publish_on_node(client: &Client, node: &str, reason: &str, note: &str) {
    let about = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        // `kubectl describe node` finds Events by the name in place of the UID.
        uid: Some(node.to_owned()),
        ..ObjectReference::default()
    };
    let event = event(EventType::Normal, reason, reason, note);
    publish(client, &about, &event).await;
}

/// Publishes that a replica leads, by its Lease.
pub(crate) async fn publish_leader(client: &Client, lease: &ObjectReference, leader: &str) {
    let reason = "LeaderElection";
    let note = format!("{leader} leads");
    let event = event(EventType::Normal, reason, reason, &note);
    publish(client, lease, &event).await;
}

/// The pod that an Event is about.
fn pod_reference(namespace: &str, pod: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(pod.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// An Event with the part of the note that the API server accepts.
fn event(type_: EventType, action: &str, reason: &str, note: &str) -> Event {
    let mut note = note.to_owned();
    note.truncate(note.floor_char_boundary(MAX_NOTE_LENGTH));
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note),
        action: action.to_owned(),
        secondary: None,
    }
}

/// Publishes an Event. Returns whether the API server has stored it.
async fn publish(client: &Client, about: &ObjectReference, event: &Event) -> bool {
    let published = try_publish(client, about, event).await;
    if let Err(error) = &published {
        debug!(error = %error_chain(error), "failed to publish an Event");
    }
    published.is_ok()
}

async fn try_publish(
    client: &Client,
    about: &ObjectReference,
    event: &Event,
) -> Result<(), ApiError> {
    let reporter = Reporter::from(OPERATOR_MANAGER);
    // A new recorder each time: a used one takes a second Event with the same reason for the first
    // and drops its note.
    let recorder = Recorder::new(client.clone(), reporter);
    let published = recorder.publish(event, about);
    let object = format!("an Event {}", event.reason);
    with_timeout("publish", object, published).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(conditions: &[(&str, &str)]) -> GpuMemoryBudgetStatus {
        let conditions: Vec<_> = conditions
            .iter()
            .map(|(type_, status)| {
                json!({ "type": type_, "status": status, "reason": "R", "message": "",
                        "lastTransitionTime": "2026-01-01T00:00:00Z" })
            })
            .collect();
        serde_json::from_value(json!({ "conditions": conditions })).unwrap()
    }

    fn changed(before: Option<&[(&str, &str)]>, now: &[(&str, &str)]) -> Vec<(String, bool)> {
        let before = before.map(status);
        let now = status(now);
        let turned = changed_conditions(before.as_ref(), &now);
        turned
            .into_iter()
            .map(|(condition, is_good)| (condition.type_.clone(), is_good))
            .collect()
    }

    #[test]
    fn condition_change_is_published_once_with_its_severity() {
        let quiet = [
            ("Ready", "True"),
            ("Exceeded", "False"),
            ("Enforced", "True"),
        ];
        let loud = [
            ("Ready", "False"),
            ("Exceeded", "True"),
            ("Enforced", "True"),
        ];
        assert_eq!(
            changed(Some(&quiet), &loud),
            [("Exceeded".to_owned(), false)]
        );
        assert_eq!(
            changed(Some(&loud), &quiet),
            [("Exceeded".to_owned(), true)]
        );
        assert_eq!(changed(Some(&loud), &loud), []);
    }

    #[test]
    fn quota_that_an_edit_makes_pending_is_no_warning() {
        let enforced = status(&[("Enforced", "True")]);
        let mut pending = status(&[("Enforced", "False")]);
        pending.conditions[0].reason = names::QUOTA_PENDING.to_owned();
        let changed = changed_conditions(Some(&enforced), &pending);
        assert_eq!(changed, [(&pending.conditions[0], true)]);
    }

    #[test]
    fn new_budget_publishes_only_bad_conditions() {
        let new = [
            ("Ready", "False"),
            ("Accepted", "True"),
            ("Covered", "False"),
            ("Exceeded", "False"),
            ("Enforced", "False"),
        ];
        assert_eq!(changed(None, &new), [("Covered".to_owned(), false)]);
    }
}
