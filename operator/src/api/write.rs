//! Sends the operator's writes, each with a timeout and counted.

use std::collections::BTreeMap;
use std::future::Future;

use bursar_crds::conditions::gpu_node as names;
use bursar_crds::context_policy::ContextPolicy;
use bursar_crds::gpu_node::{PodSettings, RestartRequest};
use bursar_crds::resources::{BUDGET_LABEL, OPERATOR, WRITER_LABEL};
use bursar_crds::{
    GpuMemoryBudget, GpuMemoryBudgetStatus, GpuNamespace, GpuNode, OPERATOR_MANAGER,
};
use k8s_openapi::api::core::v1::{Namespace, Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    self as meta, DeleteOptions, ObjectMeta, Time,
};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Resource as _;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::error::{ApiError, with_timeout};
use crate::cluster::own_writes::{WriteSender, send_response};
use crate::serve::metrics::{Metrics, WriteKind};

/// The field manager of `spec.restarts`. Each list has a manager of its own.
const RESTARTS_MANAGER: &str = "bursar-operator-contexts";

/// The field manager of the operator's entries in `spec.drain`.
const DRAIN_MANAGER: &str = "bursar-operator-drain";

/// The field manager of `spec.pods`.
const POD_SETTINGS_MANAGER: &str = "bursar-operator-pods";

/// The message of a GpuNode whose agent is away.
const ABSENT_AGENT: &str = "the node's agent has not been Ready for a minute, so this status is old; \
    kubectl describe of the agent's pod on the node shows why";

/// Fields of a GpuNode's spec with a field manager of their own.
pub enum SpecFields<'a> {
    /// The node's restart requests.
    Restarts(&'a [RestartRequest]),
    /// The GPUs that the operator drains. GPUs of other field managers stay.
    Drain(&'a [String]),
    /// The settings of its pods that the node's agent must know.
    Pods(&'a [PodSettings]),
}

/// The result of an eviction request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionResult {
    /// The pod terminates or is gone.
    Accepted,
    /// A PodDisruptionBudget refused the eviction.
    BlockedByPdb,
}

/// Whether an eviction did not happen for a reason that the pod's namespace may prolong at will: a
/// PodDisruptionBudget, or so many pods that its admission gets no answer. After the grace the
/// operator deletes the pod instead, and admission of a deletion looks at that pod alone.
pub fn is_obstructed(answer: &Result<EvictionResult, ApiError>) -> bool {
    match answer {
        Ok(EvictionResult::Accepted) => false,
        Ok(EvictionResult::BlockedByPdb) => true,
        Err(error) => error.is_unanswered(),
    }
}

/// Writes to the API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiWriter {
    client: Client,
    metrics: Metrics,
    responses: WriteSender,
}

impl ApiWriter {
    /// A writer with the rights of `client` that sends each response to `responses`.
    pub fn new(client: Client, metrics: Metrics, responses: WriteSender) -> Self {
        Self {
            client,
            metrics,
            responses,
        }
    }

    /// The channel for responses.
    pub(crate) fn responses(&self) -> &WriteSender {
        &self.responses
    }

    /// The client for reads with the same rights.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Applies `status`. Returns `None` when the budget is gone.
    pub async fn apply_status(
        &self,
        budget: &GpuMemoryBudget,
        status: &GpuMemoryBudgetStatus,
    ) -> Result<Option<GpuMemoryBudgetStatus>, ApiError> {
        let (name, namespace) = (budget.name_any(), budget.namespace().unwrap_or_default());
        let api = Api::<GpuMemoryBudget>::namespaced(self.client.clone(), &namespace);
        let body = json!({
            "apiVersion": GpuMemoryBudget::api_version(&()),
            "kind": GpuMemoryBudget::kind(&()),
            // The UID protects a recreated budget of the same name.
            "metadata": { "name": name, "uid": budget.uid() },
            "status": status,
        });
        let object = format!("the status of GpuMemoryBudget {namespace}/{name}");
        let (params, patch) = (apply_params(), Patch::Apply(body));
        let write = api.patch_status(&name, &params, &patch);
        let written = self.request(WriteKind::Status, object, write).await?;
        Ok(written.map(|budget| budget.status.unwrap_or_default()))
    }

    /// Applies or merges a quota.
    pub async fn apply_quota(
        &self,
        namespace: &str,
        name: &str,
        patch: &Patch<Value>,
    ) -> Result<(), ApiError> {
        let api = Api::<ResourceQuota>::namespaced(self.client.clone(), namespace);
        let object = format!("ResourceQuota {namespace}/{name}");
        let params = match patch {
            Patch::Apply(_) => apply_params(),
            _ => merge_params(),
        };
        let write = api.patch(name, &params, patch);
        send_response(
            &self.responses.quotas,
            self.request(WriteKind::Quota, object, write),
        )
        .await
    }

    /// Deletes the quota with this UID.
    pub async fn delete_quota(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<(), ApiError> {
        let api = Api::<ResourceQuota>::namespaced(self.client.clone(), namespace);
        let object = format!("ResourceQuota {namespace}/{name}");
        let params = with_uid(uid);
        let write = api.delete(name, &params);
        self.request(WriteKind::Quota, object, write)
            .await
            .map(drop)
    }

    /// Sets or removes the budget label of a namespace.
    pub async fn label_namespace(
        &self,
        namespace: &str,
        value: Option<&str>,
    ) -> Result<(), ApiError> {
        let api = Api::<Namespace>::all(self.client.clone());
        let object = format!("the label of Namespace {namespace}");
        // A merge patch, because an apply would keep a label that another manager wrote too.
        let patch = json!({ "metadata": { "labels": { BUDGET_LABEL: value } } });
        let (params, patch) = (merge_params(), Patch::Merge(patch));
        let write = api.patch_metadata(namespace, &params, &patch);
        send_response(
            &self.responses.namespaces,
            self.request(WriteKind::Label, object, write),
        )
        .await
    }

    /// Applies fields of a GpuNode's spec. Fails when the object is gone or was recreated.
    pub async fn apply_spec(
        &self,
        node: &str,
        uid: &str,
        fields: SpecFields<'_>,
    ) -> Result<(), ApiError> {
        let (kind, what, manager, spec) = match fields {
            SpecFields::Restarts(restarts) => (
                WriteKind::ContextPolicies,
                "the restart requests of",
                RESTARTS_MANAGER,
                json!({ "restarts": restarts }),
            ),
            SpecFields::Drain(gpus) => {
                let spec = json!({ "drain": gpus });
                (WriteKind::Drain, "the drain of", DRAIN_MANAGER, spec)
            }
            SpecFields::Pods(pods) => (
                WriteKind::PodSettings,
                "the settings of pods in",
                POD_SETTINGS_MANAGER,
                json!({ "pods": pods }),
            ),
        };
        let object = format!("{what} GpuNode {node}");
        let api = Api::<GpuNode>::all(self.client.clone());
        let body = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            // Without a UID the apply would create the object.
            "metadata": { "name": node, "uid": uid },
            "spec": spec,
        });
        let params = PatchParams::apply(manager).force();
        let patch = Patch::Apply(body);
        let write = api.patch(node, &params, &patch);
        send_response(&self.responses.gpu_nodes, self.request(kind, object, write)).await
    }

    /// Tells all agents the context policy of a namespace.
    pub async fn apply_context_policy(
        &self,
        namespace: &str,
        policy: &ContextPolicy,
    ) -> Result<(), ApiError> {
        let api = Api::<GpuNamespace>::all(self.client.clone());
        let body = json!({
            "apiVersion": GpuNamespace::api_version(&()),
            "kind": GpuNamespace::kind(&()),
            "metadata": { "name": namespace },
            "spec": { "contextPolicy": policy },
        });
        let request = async |params: PatchParams, patch: Patch<&Value>| {
            let object = format!("GpuNamespace {namespace}");
            let write = api.patch(namespace, &params, &patch);
            self.request(WriteKind::ContextPolicies, object, write)
                .await
        };
        let write = async {
            let written = request(apply_params(), Patch::Apply(&body)).await?;
            let differs = |found: &GpuNamespace| found.spec.context_policy.as_ref() != Some(policy);
            if !written.as_ref().is_some_and(differs) {
                return Ok(written);
            }
            // Another client has written the action, which an apply without the field leaves.
            let mut body = body.clone();
            body["spec"]["contextPolicy"]["action"] = json!(policy.action);
            request(merge_params(), Patch::Merge(&body)).await
        };
        send_response(&self.responses.gpu_namespaces, write).await
    }

    /// Deletes the GpuNamespace with this UID: its namespace has no policy of its own any more.
    pub async fn delete_context_policy(&self, namespace: &str, uid: &str) -> Result<(), ApiError> {
        let api = Api::<GpuNamespace>::all(self.client.clone());
        let object = format!("GpuNamespace {namespace}");
        let params = with_uid(uid);
        let write = api.delete(namespace, &params);
        self.request(WriteKind::ContextPolicies, object, write)
            .await
            .map(drop)
    }

    /// Reports that a node's agent is away. An agent that is there after all takes its condition
    /// back.
    pub async fn report_absent_agent(
        &self,
        node: &str,
        uid: &str,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        let api = Api::<GpuNode>::all(self.client.clone());
        let body = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            "metadata": { "name": node, "uid": uid },
            "status": { "conditions": [{
                "type": names::READY,
                "status": "Unknown",
                "reason": names::AGENT_AWAY,
                "message": ABSENT_AGENT,
                "lastTransitionTime": Time(now),
            }] },
        });
        let object = format!("the readiness of GpuNode {node}");
        let params = PatchParams::apply(OPERATOR_MANAGER).force();
        let patch = Patch::Apply(body);
        let write = api.patch_status(node, &params, &patch);
        let request = self.request(WriteKind::NodeStatus, object, write);
        send_response(&self.responses.gpu_nodes, request).await
    }

    /// Evicts the pod with this UID. With `by_force` deletes it, past its PodDisruptionBudgets.
    pub async fn evict(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        by_force: bool,
    ) -> Result<EvictionResult, ApiError> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let object = format!("the eviction of Pod {namespace}/{name}");
        let result = if by_force {
            let params = with_uid(uid);
            let write = api.delete(name, &params);
            self.request(WriteKind::Eviction, object, write)
                .await
                .map(drop)
        } else {
            // kube's own `evict` sends the options under a name that the API server does not know.
            let eviction = Eviction {
                metadata: ObjectMeta {
                    name: Some(name.to_owned()),
                    labels: Some(BTreeMap::from([(
                        WRITER_LABEL.to_owned(),
                        OPERATOR.to_owned(),
                    )])),
                    ..ObjectMeta::default()
                },
                delete_options: Some(DeleteOptions {
                    preconditions: Some(meta::Preconditions {
                        uid: Some(uid.to_owned()),
                        resource_version: None,
                    }),
                    ..DeleteOptions::default()
                }),
            };
            let params = PostParams::default();
            let write = api.create_subresource::<_, Value>("eviction", name, &params, &eviction);
            self.request(WriteKind::Eviction, object, write)
                .await
                .map(drop)
        };
        match result {
            // A conflict (409) means that another pod has the name, which the watch shows soon, or
            // nothing about the pod.
            Err(ApiError::Failed { source, .. }) if is_blocked_by_pdb(&source) => {
                Ok(EvictionResult::BlockedByPdb)
            }
            other => other.map(|()| EvictionResult::Accepted),
        }
    }

    /// Sends a write. Returns `None` when the object is gone.
    async fn request<T>(
        &self,
        kind: WriteKind,
        object: String,
        write: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Option<T>, ApiError> {
        let result = match with_timeout("write", object, write).await {
            Err(error) if error.is_not_found() => Ok(None),
            written => written.map(Some),
        };
        self.metrics.record_write(kind, result.is_ok());
        result
    }
}

/// Server-side apply that takes over fields of other managers.
fn apply_params() -> PatchParams {
    PatchParams::apply(OPERATOR_MANAGER).force()
}

/// A merge patch with the operator's field manager.
fn merge_params() -> PatchParams {
    PatchParams {
        field_manager: Some(OPERATOR_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Deletes only the object with this UID.
fn with_uid(uid: &str) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

/// Whether PodDisruptionBudgets refused the eviction. Any other 429 comes from the API server's
/// flow control. For a pod under two PodDisruptionBudgets the API server answers 500
/// (`pkg/registry/core/pod/storage/eviction.go`).
fn is_blocked_by_pdb(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        429 => causes
            .into_iter()
            .any(|cause| cause.reason == "DisruptionBudget"),
        500 => status.message.contains("more than one PodDisruptionBudget"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_is_blocked_only_by_disruption_budgets() {
        let kept = |status: Value| {
            let status = serde_json::from_value(status).unwrap();
            is_blocked_by_pdb(&kube::Error::Api(status))
        };
        let causes = json!({ "causes": [{ "reason": "DisruptionBudget", "message": "needs 1 healthy pods and has 1" }] });
        assert!(kept(
            json!({ "code": 429, "reason": "TooManyRequests", "details": causes })
        ));
        assert!(kept(json!({ "code": 500, "message":
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support." })));
        assert!(!kept(
            json!({ "code": 429, "reason": "TooManyRequests", "message":
            "Too many requests, please try again later.", "details": { "retryAfterSeconds": 1 } })
        ));
        assert!(!kept(json!({ "code": 500, "reason": "InternalError" })));
        assert!(!kept(json!({ "code": 409, "details": causes })));
    }
}
