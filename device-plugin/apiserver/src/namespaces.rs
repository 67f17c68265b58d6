//! Watches `GpuNamespace` objects: what the agents of all nodes must know of namespaces.

use std::collections::BTreeMap;

use bursar_crds::GpuNamespace;
use bursar_crds::context_policy::{ContextAction, ContextPolicy};
use bursar_watch::History;
use kube::api::Api;
use kube::core::{ApiResource, DynamicObject};
use kube::runtime::watcher::{Config, Event};
use kube::{Client, ResourceExt as _};
use serde::Deserialize as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::metrics::ApiMetrics;
use crate::watching;

/// The context policies by namespace. In every other namespace the cluster's default applies.
pub type ContextPolicies = BTreeMap<String, ContextPolicy>;

/// Publishes the policies in `policies` until `stop`; none before the first list is complete.
pub async fn run(
    client: Client,
    policies: watch::Sender<Option<ContextPolicies>>,
    metrics: ApiMetrics,
    stop: CancellationToken,
) {
    let objects = Api::all_with(client, &ApiResource::erase::<GpuNamespace>(&()));
    let mut listed = ContextPolicies::new();
    let apply = |event| match event {
        Event::Init => listed.clear(),
        Event::InitApply(object) => set(&mut listed, &object, read(&object)),
        Event::InitDone => {
            policies.send_replace(Some(std::mem::take(&mut listed)));
        }
        Event::Apply(object) => {
            policies.send_modify(|all| set(all.get_or_insert_default(), &object, read(&object)));
        }
        Event::Delete(object) => {
            policies.send_modify(|all| set(all.get_or_insert_default(), &object, None));
        }
    };
    let config = Config::default();
    let (kind, history) = ("GpuNamespace", History::default());
    watching::watch(objects, config, kind, history, &metrics, &stop, apply).await;
}

fn set(policies: &mut ContextPolicies, object: &DynamicObject, policy: Option<ContextPolicy>) {
    let name = object.name_any();
    match policy {
        Some(policy) => drop(policies.insert(name, policy)),
        None => drop(policies.remove(&name)),
    }
}

/// The policy that an object has, as far as this version understands it.
fn read(object: &DynamicObject) -> Option<ContextPolicy> {
    let policy = object.data.get("spec")?.get("contextPolicy")?;
    match Option::<ContextPolicy>::deserialize(policy) {
        // An action of a later version ends a process, so the container starts anew here.
        Ok(Some(
            policy @ ContextPolicy {
                action: Some(ContextAction::Unknown),
                ..
            },
        )) => Some(ContextPolicy {
            action: Some(ContextAction::Restart),
            ..policy
        }),
        Ok(policy) => policy,
        Err(error) => {
            let namespace = object.name_any();
            warn!(
                namespace, %error,
                "failed to parse a GpuNamespace; the cluster's default applies; give the operator, \
                 the agents and the CRDs one version"
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read_spec(spec: Value) -> Option<ContextPolicy> {
        let object = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNamespace",
            "metadata": { "name": "team" }, "spec": spec,
        });
        read(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn policy_of_a_later_version_restarts_the_container() {
        let policy = |action: &str| {
            let policy = json!({ "action": action, "maxRestarts": 9, "later": 1 });
            read_spec(json!({ "contextPolicy": policy, "later": {} })).unwrap()
        };
        let read = policy("Report");
        assert_eq!(
            (read.action, read.max_restarts),
            (Some(ContextAction::Report), 9)
        );
        let later = policy("Quarantine");
        assert_eq!(
            (later.action, later.max_restarts),
            (Some(ContextAction::Restart), 9)
        );
    }

    #[test]
    fn object_without_a_readable_policy_has_the_default() {
        let specs = [
            json!({}),
            json!(null),
            json!({ "contextPolicy": null }),
            json!({ "contextPolicy": 7 }),
            json!({ "contextPolicy": { "maxRestarts": "many" } }),
        ];
        for spec in specs {
            assert_eq!(read_spec(spec.clone()), None, "{spec}");
        }
    }
}
