//! The operator's API calls that change something, each bounded in time and counted.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use bursar_crds::gpu_node::{ContextOrder, RestartOrder};
use bursar_crds::resources::{BUDGET_LABEL, OPERATOR, WRITER_LABEL};
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus, GpuNode, OPERATOR_MANAGER};
use k8s_openapi::api::core::v1::{Namespace, Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{self as meta, DeleteOptions, ObjectMeta};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Resource as _;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::cluster::own_writes::{WriteSender, send_response};
use crate::serve::metrics::{Metrics, WriteKind};

/// How long one write may take. Less than the time that a pod gets to stop.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Who owns `spec.contextPolicies` and `spec.restarts`: other orders in the same object are other applies.
const CONTEXT_POLICIES_MANAGER: &str = "bursar-operator-contexts";

/// A write that failed. All are worth another try later.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The API server does not let the operator do it.
    #[error("may not write {what}: give the operator's service account the chart's ClusterRole")]
    Forbidden {
        /// What.
        what: String,
        /// What the API server said.
        source: Box<kube::Error>,
    },
    /// Anything else that the API server or the way to it says.
    #[error("cannot write {what}")]
    Failed {
        /// What.
        what: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s to the write of {what}", TIMEOUT.as_secs())]
    TimedOut {
        /// What.
        what: String,
    },
}

impl WriteError {
    /// What was to be written.
    pub fn target(&self) -> &str {
        match self {
            Self::Forbidden { what, .. } | Self::Failed { what, .. } | Self::TimedOut { what } => {
                what
            }
        }
    }
}

/// How a pod's eviction went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionResult {
    /// It ends, or is gone.
    Accepted,
    /// A disruption budget keeps it.
    BlockedByPdb,
}

/// Changes things. Cheap to clone.
#[derive(Clone)]
pub struct ApiWriter {
    client: Client,
    metrics: Metrics,
    responses: WriteSender,
}

impl ApiWriter {
    /// A writer with the rights of `client`, which tells what it `responses`.
    pub fn new(client: Client, metrics: Metrics, responses: WriteSender) -> Self {
        Self {
            client,
            metrics,
            responses,
        }
    }

    /// Who is told what was written.
    pub(crate) fn responses(&self) -> &WriteSender {
        &self.responses
    }

    /// The client that it writes with.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Applies `status`; `None` where the budget is gone.
    pub async fn apply_status(
        &self,
        budget: &GpuMemoryBudget,
        status: &GpuMemoryBudgetStatus,
    ) -> Result<Option<GpuMemoryBudgetStatus>, WriteError> {
        let (name, namespace) = (budget.name_any(), budget.namespace().unwrap_or_default());
        let api = Api::<GpuMemoryBudget>::namespaced(self.client.clone(), &namespace);
        let body = json!({
            "apiVersion": GpuMemoryBudget::api_version(&()),
            "kind": GpuMemoryBudget::kind(&()),
            // The UID: a budget that was made anew under the same name is another one.
            "metadata": { "name": name, "uid": budget.uid() },
            "status": status,
        });
        let what = format!("the status of GpuMemoryBudget {namespace}/{name}");
        let (params, patch) = (apply_params(), Patch::Apply(body));
        let write = api.patch_status(&name, &params, &patch);
        let written = self.request(WriteKind::Status, what, write).await?;
        Ok(written.map(|budget| budget.status.unwrap_or_default()))
    }

    /// Applies a quota, or merges it with what is there.
    pub async fn apply_quota(
        &self,
        namespace: &str,
        name: &str,
        patch: &Patch<Value>,
    ) -> Result<(), WriteError> {
        let api = Api::<ResourceQuota>::namespaced(self.client.clone(), namespace);
        let what = format!("ResourceQuota {namespace}/{name}");
        let params = match patch {
            Patch::Apply(_) => apply_params(),
            _ => merge_params(),
        };
        let write = api.patch(name, &params, patch);
        send_response(
            &self.responses.quotas,
            self.request(WriteKind::Quota, what, write),
        )
        .await
    }

    /// Deletes the quota of this UID and no other.
    pub async fn delete_quota(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<(), WriteError> {
        let api = Api::<ResourceQuota>::namespaced(self.client.clone(), namespace);
        let what = format!("ResourceQuota {namespace}/{name}");
        let params = with_uid(uid);
        let write = api.delete(name, &params);
        self.request(WriteKind::Quota, what, write).await.map(drop)
    }

    /// Sets the budget label of a namespace, or takes it off.
    pub async fn label_namespace(
        &self,
        namespace: &str,
        value: Option<&str>,
    ) -> Result<(), WriteError> {
        let api = Api::<Namespace>::all(self.client.clone());
        let what = format!("the label of Namespace {namespace}");
        // No apply: that would leave a label in place which somebody else responses too.
        let patch = json!({ "metadata": { "labels": { BUDGET_LABEL: value } } });
        let (params, patch) = (merge_params(), Patch::Merge(patch));
        let write = api.patch_metadata(namespace, &params, &patch);
        send_response(
            &self.responses.namespaces,
            self.request(WriteKind::Label, what, write),
        )
        .await
    }

    /// Orders what a node's agent does about poisoned contexts, and which it restarts now. Fails where the
    /// object is gone or was made anew.
    pub async fn apply_context_policies(
        &self,
        node: &str,
        uid: &str,
        orders: &[ContextOrder],
        restarts: &[RestartOrder],
    ) -> Result<(), WriteError> {
        let api = Api::<GpuNode>::all(self.client.clone());
        let body = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            // An apply without a UID would make the object.
            "metadata": { "name": node, "uid": uid },
            "spec": { "contextPolicies": orders, "restarts": restarts },
        });
        let what = format!("the context policies of GpuNode {node}");
        let params = PatchParams::apply(CONTEXT_POLICIES_MANAGER).force();
        let patch = Patch::Apply(body);
        let write = api.patch(node, &params, &patch);
        send_response(
            &self.responses.gpu_nodes,
            self.request(WriteKind::ContextPolicies, what, write),
        )
        .await
    }

    /// Evicts the pod of this UID and no other. `by_force`: whatever its disruption budgets say.
    pub async fn evict(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        by_force: bool,
    ) -> Result<EvictionResult, WriteError> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let what = format!("the eviction of Pod {namespace}/{name}");
        let result = if by_force {
            let params = with_uid(uid);
            let write = api.delete(name, &params);
            self.request(WriteKind::Eviction, what, write)
                .await
                .map(drop)
        } else {
            // The client's own `evict` sends the options under a name that the API server does not know.
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
            self.request(WriteKind::Eviction, what, write)
                .await
                .map(drop)
        };
        match result {
            // A conflict (409) says that another pod has the name by now, which is soon seen, or nothing of the pod.
            Err(WriteError::Failed { source, .. }) if is_blocked_by_pdb(&source) => {
                Ok(EvictionResult::BlockedByPdb)
            }
            other => other.map(|()| EvictionResult::Accepted),
        }
    }

    /// `None` where what is written to is gone.
    async fn request<T>(
        &self,
        kind: WriteKind,
        what: String,
        write: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Option<T>, WriteError> {
        let answer = timeout(TIMEOUT, write).await;
        let result = match answer {
            Ok(Ok(written)) => Ok(Some(written)),
            Ok(Err(source)) => match status_code(&source) {
                404 => Ok(None),
                401 | 403 => Err(WriteError::Forbidden {
                    what,
                    source: Box::new(source),
                }),
                _ => Err(WriteError::Failed {
                    what,
                    source: Box::new(source),
                }),
            },
            Err(_) => Err(WriteError::TimedOut { what }),
        };
        self.metrics.record_write(kind, result.is_ok());
        result
    }
}

/// Server-side apply, over whoever changed the same fields.
fn apply_params() -> PatchParams {
    PatchParams::apply(OPERATOR_MANAGER).force()
}

/// A merge, in the operator's name.
fn merge_params() -> PatchParams {
    PatchParams {
        field_manager: Some(OPERATOR_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Deletes what has this UID.
fn with_uid(uid: &str) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

fn status_code(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        _ => 0,
    }
}

/// Whether the pod's disruption budgets refused its eviction. What else answers 429 is about the request (the API
/// server's own flow control); a pod under two disruption budgets is refused by an error of the server
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
