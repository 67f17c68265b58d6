//! Creates the isolated objects of one case: a namespace, and nodes with one GPU each.

use bursar_e2e::raw_api::RawApi;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep};

use crate::server::Server;

/// The GPU's memory in GiB.
pub(crate) const GPU_GIB: i32 = 32;
const RESOURCE: &str = "bursar.dev/gpu-memory-gib";
/// The resource name in quotas.
pub(crate) const QUOTA_RESOURCE: &str = "requests.bursar.dev/gpu-memory-gib";

/// The objects of one case.
#[derive(Clone)]
pub(crate) struct IsolatedScope {
    /// The name of the case, its namespace, its cohort and its node.
    pub(crate) name: String,
    objects: RawApi,
}

impl IsolatedScope {
    /// Creates the namespace, the node and its GpuNode.
    pub(crate) async fn set_up(server: &Server, name: &str) -> Result<Self, Failed> {
        let scope = Self {
            name: name.to_owned(),
            objects: RawApi::new(server.control_plane.client()),
        };
        let namespace = json!({ "metadata": { "name": name } });
        scope.create("/api/v1/namespaces", namespace).await?;
        scope.make_node(name).await?;
        let begin = Instant::now();
        // The API server refuses pods until their service account exists.
        let account = format!("/api/v1/namespaces/{name}/serviceaccounts/default");
        while scope.get(&account).await?.is_null() {
            if begin.elapsed() > Duration::from_secs(120) {
                return Err(format!("{name} has no service account").into());
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(scope)
    }

    /// Creates a node of this scope's name, and its GpuNode.
    async fn make_node(&self, case: &str) -> Result<(), Failed> {
        // By this label an operator sees the nodes of its own case only.
        let metadata = json!({ "name": self.name, "labels": { "bursar.dev/cohort": case } });
        let ready = json!([{ "type": "Ready", "status": "True" }]);
        let node = json!({
            "metadata": metadata,
            // Capacity for a second GPU, which the test does not use.
            "status": { "conditions": ready, "allocatable": { RESOURCE: "64", "pods": "110" }, "capacity": { RESOURCE: "64", "pods": "110" } },
        });
        self.create("/api/v1/nodes", node).await?;
        // Removes the taint that the API server puts on a new node, as the node controller does for
        // Ready nodes.
        let path = format!("/api/v1/nodes/{}", self.name);
        self.merge(&path, json!({ "spec": { "taints": null } }))
            .await?;
        let gpus = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": metadata, "spec": {},
        });
        self.create("/apis/bursar.dev/v1alpha1/gpunodes", gpus)
            .await?;
        self.report_gpu(GPU_GIB, &[]).await
    }

    /// Creates another node of the case. No namespace has its name.
    pub(crate) async fn second_node(&self) -> Result<Self, Failed> {
        let node = self.in_namespace(&format!("{}-b", self.name));
        node.make_node(&self.name).await?;
        Ok(node)
    }

    /// Returns this scope with the rights of another client.
    pub(crate) fn with_client(&self, client: Client) -> Self {
        Self {
            name: self.name.clone(),
            objects: RawApi::new(client),
        }
    }

    /// Returns a scope of another name with the same client.
    pub(crate) fn in_namespace(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            objects: self.objects.clone(),
        }
    }

    /// Returns an object, or null if the server has none.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, Failed> {
        Ok(self.objects.get(path).await?)
    }

    pub(crate) async fn create(&self, path: &str, object: Value) -> kube::Result<Value> {
        self.objects.create(path, &object).await
    }

    pub(crate) async fn merge(&self, path: &str, patch: Value) -> Result<(), Failed> {
        Ok(self.objects.merge_patch(path, &patch).await.map(drop)?)
    }

    /// Changes an object, and returns the API server's answer.
    pub(crate) async fn try_merge(&self, path: &str, patch: Value) -> kube::Result<Value> {
        self.objects.merge_patch(path, &patch).await
    }

    /// Deletes an object, and returns the API server's answer.
    pub(crate) async fn try_delete(&self, path: &str) -> kube::Result<Value> {
        self.objects.delete(path).await.map(|()| Value::Null)
    }

    /// Deletes an object, if it exists.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), Failed> {
        Ok(self.objects.delete(path).await?)
    }

    pub(crate) fn budget_path(&self) -> String {
        format!("{}/default", self.budgets_path())
    }

    pub(crate) fn budgets_path(&self) -> String {
        let name = &self.name;
        format!("/apis/bursar.dev/v1alpha1/namespaces/{name}/gpumemorybudgets")
    }

    pub(crate) fn quota_path(&self, which: &str) -> String {
        let name = &self.name;
        format!("/api/v1/namespaces/{name}/resourcequotas/gpu-memory-budget-{which}")
    }

    pub(crate) fn pods_path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.name)
    }

    pub(crate) fn pod_path(&self, pod: &str) -> String {
        format!("{}/{pod}", self.pods_path())
    }

    pub(crate) fn namespace_path(&self) -> String {
        format!("/api/v1/namespaces/{}", self.name)
    }

    fn gpu_node_path(&self) -> String {
        format!("/apis/bursar.dev/v1alpha1/gpunodes/{}", self.name)
    }

    /// Declares the budget.
    pub(crate) async fn create_budget(&self, guaranteed: &str, limit: &str) -> Result<(), Failed> {
        let spec = json!({ "cohort": self.name, "deviceMemory": { "guaranteed": guaranteed, "limit": limit } });
        let budget = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
            "metadata": { "name": "default" }, "spec": spec,
        });
        self.create(&self.budgets_path(), budget).await?;
        Ok(())
    }

    pub(crate) async fn patch_budget(&self, spec: Value) -> Result<(), Failed> {
        self.merge(&self.budget_path(), json!({ "spec": spec }))
            .await
    }

    pub(crate) async fn budget(&self) -> Result<Value, Failed> {
        self.get(&self.budget_path()).await
    }

    pub(crate) async fn gpu_node(&self) -> Result<Value, Failed> {
        self.get(&self.gpu_node_path()).await
    }

    /// The context policy in the namespace's GpuNamespace, or null.
    pub(crate) async fn context_policy(&self) -> Result<Value, Failed> {
        let path = format!("/apis/bursar.dev/v1alpha1/gpunamespaces/{}", self.name);
        Ok(self.get(&path).await?["spec"]["contextPolicy"].take())
    }

    /// Writes quota overrides to the GpuNode, in the operator's place.
    pub(crate) async fn write_quota_overrides(&self, quotas: Value) -> Result<(), Failed> {
        self.merge(
            &self.gpu_node_path(),
            json!({ "spec": { "quotas": quotas } }),
        )
        .await
    }

    pub(crate) async fn node_labels(&self) -> Result<Value, Failed> {
        let node = self.get(&format!("/api/v1/nodes/{}", self.name)).await?;
        Ok(node["metadata"]["labels"].clone())
    }

    /// Creates a pod that requests this many GiB, and binds the pod to the node if `on_node`.
    pub(crate) async fn create_pod(
        &self,
        pod: &str,
        gib: i32,
        borrows: bool,
        on_node: bool,
    ) -> kube::Result<Value> {
        let class = borrows.then_some("bursar-borrowed");
        let node = on_node.then_some(&self.name);
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod },
            "spec": {
                "priorityClassName": class, "nodeName": node, "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "c", "image": "i", "resources": { "limits": { RESOURCE: gib.to_string() } } }],
            },
        });
        self.create(&self.pods_path(), pod).await
    }

    /// Gives a pod a controlling owner, which could create it again, and returns the owner's UID.
    pub(crate) async fn create_owner(&self, pod: &str) -> Result<String, Failed> {
        let path = format!("/api/v1/namespaces/{}/configmaps", self.name);
        let owner = self.create(&path, json!({ "metadata": { "name": pod } }));
        let uid = owner.await?["metadata"]["uid"].clone();
        let owner = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": pod, "uid": uid, "controller": true });
        let owned = json!({ "metadata": { "ownerReferences": [owner] } });
        self.merge(&self.pod_path(pod), owned).await?;
        Ok(uid.as_str().unwrap_or_default().to_owned())
    }

    /// Returns whether there is an Event about the pod with this reason.
    pub(crate) async fn has_event(&self, reason: &str, pod: &str) -> Result<bool, Failed> {
        let path = format!("/api/v1/namespaces/{}/events", self.name);
        let events = self.get(&path).await?["items"].take();
        let mut events = events.as_array().into_iter().flatten();
        Ok(events.any(|event| event["reason"] == reason && event["involvedObject"]["name"] == pod))
    }

    /// Marks a pod Unschedulable, in the scheduler's place.
    pub(crate) async fn mark_unschedulable(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/status", self.pod_path(pod));
        let refused = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "lastTransitionTime": "2026-01-01T00:00:00Z" });
        self.merge(&path, json!({ "status": { "conditions": [refused] } }))
            .await
    }

    /// Binds a pod to the node, in the scheduler's place.
    pub(crate) async fn bind(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/binding", self.pod_path(pod));
        let target = json!({ "apiVersion": "v1", "kind": "Node", "name": self.name });
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod }, "target": target,
        });
        Ok(self.create(&path, binding).await.map(drop)?)
    }

    /// Marks a pod Running, in the kubelet's place.
    pub(crate) async fn mark_running(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/status", self.pod_path(pod));
        self.merge(&path, json!({ "status": { "phase": "Running" } }))
            .await
    }

    /// Reports the GPU's memory and its bound pods, in the agent's place.
    pub(crate) async fn report_gpu(
        &self,
        memory: i32,
        bound: &[(String, i32)],
    ) -> Result<(), Failed> {
        self.report_gpu_with_queued_claim(memory, bound, None).await
    }

    /// Reports the node as ready, in the agent's place.
    pub(crate) async fn report_ready(&self) -> Result<(), Failed> {
        let ready = json!({ "type": "Ready", "status": "True", "reason": "Ok", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z" });
        let path = format!("{}/status", self.gpu_node_path());
        self.merge(&path, json!({ "status": { "conditions": [ready] } }))
            .await
    }

    /// Reports open faults, in the agent's place.
    pub(crate) async fn report_faults(&self, faults: Value) -> Result<(), Failed> {
        let path = format!("{}/status", self.gpu_node_path());
        self.merge(&path, json!({ "status": { "faults": faults } }))
            .await
    }

    /// Reports as [`Self::report_gpu`] does, with a queued claim. A GPU that is reserved for a
    /// claim is reported as held for its pod.
    pub(crate) async fn report_gpu_with_queued_claim(
        &self,
        memory: i32,
        bound: &[(String, i32)],
        queued_claim: Option<(&str, &str, i32)>,
    ) -> Result<(), Failed> {
        let before = self.gpu_node().await?;
        let held = &before["spec"]["reservations"][0]["podUid"];
        let free = memory - bound.iter().map(|(_, gib)| gib).sum::<i32>();
        let pods: Vec<_> = bound
            .iter()
            .map(|(uid, gib)| json!({ "uid": uid, "quanta": gib }))
            .collect();
        let waiting: Vec<_> = queued_claim
            .into_iter()
            .map(|(uid, pod, gib)| {
                json!({ "podUid": uid, "namespace": self.name, "pod": pod, "container": "c", "quanta": gib,
                    "since": "2026-01-01T00:00:00Z" })
            })
            .collect();
        let largest = if held.is_null() { free } else { 0 };
        let status = json!({
            "quantum": "1Gi",
            "deviceMemory": { "allocatable": memory, "free": free, "largestFree": largest },
            "waiting": waiting,
            "gpus": [{ "uuid": "GPU-0", "index": 0, "model": "m", "memory": format!("{memory}Gi"), "state": "Active",
                "generation": 1, "health": { "status": "Healthy", "reason": "Ok" }, "capacity": memory, "free": free,
                "largestFree": largest, "reservedFor": held, "pods": pods }],
        });
        if is_subset(&status, &before["status"]) {
            return Ok(());
        }
        let path = format!("{}/status", self.gpu_node_path());
        self.merge(&path, json!({ "status": status })).await
    }
}

/// Returns whether `there` has every value of `wanted`.
fn is_subset(wanted: &Value, there: &Value) -> bool {
    match (wanted, there) {
        (Value::Object(wanted), Value::Object(there)) => wanted.iter().all(|(key, value)| {
            let null = Value::Null;
            is_subset(value, there.get(key).unwrap_or(&null))
        }),
        (Value::Array(wanted), Value::Array(there)) => {
            let pairs = wanted.iter().zip(there);
            wanted.len() == there.len() && pairs.fold(true, |all, (a, b)| all && is_subset(a, b))
        }
        (wanted, Value::Null) => wanted.as_array().is_some_and(Vec::is_empty),
        (wanted, there) => wanted == there,
    }
}

/// Returns the status of a budget's condition.
pub(crate) fn condition<'a>(budget: &'a Value, type_: &str) -> &'a str {
    let conditions = budget["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|condition| condition["type"] == type_);
    condition
        .and_then(|condition| condition["status"].as_str())
        .unwrap_or_default()
}
