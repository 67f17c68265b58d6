//! Keeps objects that this version cannot parse apart from the others.
//!
//! During a rollout the cluster holds objects of other versions, and one of them must not fail the
//! whole list.

use bursar_crds::GpuMemoryBudget;
use kube::Resource;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::Event;

use crate::cluster::{WatchEvent, project};

/// The object, if this version can parse it.
pub(super) fn readable<K>(object: &DeserializeGuard<K>) -> Option<&K> {
    object.0.as_ref().ok()
}

/// Why an object cannot be parsed, or which of its fields has an unknown value.
fn unreadable_reason<K>(
    object: &DeserializeGuard<K>,
    unknown: fn(&K) -> Option<&'static str>,
) -> Option<String> {
    match &object.0 {
        Ok(object) => unknown(object).map(|field| format!("unknown value of {field}")),
        Err(reason) => Some(reason.error.clone()),
    }
}

/// The event of an object that cannot be parsed, or has a field with an unknown value.
pub(super) fn unreadable_event<K: Resource<DynamicType = ()>>(
    kind: &'static str,
    event: &Event<DeserializeGuard<K>>,
    unknown: fn(&K) -> Option<&'static str>,
) -> WatchEvent {
    let reason = |object: &DeserializeGuard<K>| unreadable_reason(object, unknown);
    WatchEvent::Unreadable(kind, project(event, reason))
}

/// The event for the store of budgets, which holds only those that can be parsed.
pub(super) fn store_event(
    event: Event<DeserializeGuard<GpuMemoryBudget>>,
    store: &Store<GpuMemoryBudget>,
) -> Option<Event<GpuMemoryBudget>> {
    let before = |unreadable: InvalidObject| {
        let metadata = &unreadable.metadata;
        let name = ObjectRef::new(metadata.name.as_deref()?);
        let there = store.get(&name.within(metadata.namespace.as_deref()?))?;
        Some(Event::Delete(there.as_ref().clone()))
    };
    match event {
        Event::Init => Some(Event::Init),
        Event::InitDone => Some(Event::InitDone),
        Event::InitApply(object) => object.0.ok().map(Event::InitApply),
        Event::Apply(object) => object
            .0
            .map_or_else(before, |object| Some(Event::Apply(object))),
        Event::Delete(object) => object
            .0
            .map_or_else(before, |object| Some(Event::Delete(object))),
    }
}
