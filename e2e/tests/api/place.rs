//! A case's own part of the API server: a namespace, and nodes with one GPU each, which nobody else touches.

use bursar_e2e::objects::RawApi;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep};

use crate::server::Server;

/// The GPU's memory, in GiB.
pub(crate) const GPU_GIB: i32 = 32;
const RESOURCE: &str = "bursar.dev/gpu-memory-gib";
/// What quotas call it.
pub(crate) const QUOTA_RESOURCE: &str = "requests.bursar.dev/gpu-memory-gib";

/// The objects of one case.
#[derive(Clone)]
pub(crate) struct IsolatedScope {
    /// Of the case, its namespace, its cohort and its node.
    pub(crate) name: String,
    objects: RawApi,
}

impl IsolatedScope {
    /// Makes the namespace, the node and its GPU.
    pub(crate) async fn set_up(server: &Server, name: &str) -> Result<Self, Failed> {
        let place = Self {
            name: name.to_owned(),
            objects: RawApi::new(server.control_plane.client()),
        };
        let namespace = json!({ "metadata": { "name": name } });
        place.create("/api/v1/namespaces", namespace).await?;
        place.make_node(name).await?;
        let begin = Instant::now();
        // A pod is refused until its service account is there.
        let account = format!("/api/v1/namespaces/{name}/serviceaccounts/default");
        while place.get(&account).await?.is_null() {
            if begin.elapsed() > Duration::from_secs(30) {
                return Err(format!("{name} has no service account").into());
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(place)
    }

    /// Makes a node named as the place, and its GPU.
    async fn make_node(&self, case: &str) -> Result<(), Failed> {
        // By the label an operator sees them, and no other case's.
        let metadata = json!({ "name": self.name, "labels": { "bursar.dev/cohort": case } });
        let ready = json!([{ "type": "Ready", "status": "True" }]);
        let node = json!({
            "metadata": metadata,
            // Its other GPU is of no interest here.
            "status": { "conditions": ready, "allocatable": { RESOURCE: "64", "pods": "110" }, "capacity": { RESOURCE: "64", "pods": "110" } },
        });
        self.create("/api/v1/nodes", node).await?;
        // Whoever sees that it is Ready takes off what the API server taints a new node with.
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

    /// Makes another node of the case; there is no namespace of its name.
    pub(crate) async fn second_node(&self) -> Result<Self, Failed> {
        let node = self.in_namespace(&format!("{}-b", self.name));
        node.make_node(&self.name).await?;
        Ok(node)
    }

    /// The same place with other rights.
    pub(crate) fn with_client(&self, client: Client) -> Self {
        Self {
            name: self.name.clone(),
            objects: RawApi::new(client),
        }
    }

    /// Another namespace.
    pub(crate) fn in_namespace(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            objects: self.objects.clone(),
        }
    }

    /// An object; null where there is none.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, Failed> {
        Ok(self.objects.get(path).await?)
    }

    pub(crate) async fn create(&self, path: &str, object: Value) -> kube::Result<Value> {
        self.objects.create(path, &object).await
    }

    pub(crate) async fn merge(&self, path: &str, patch: Value) -> Result<(), Failed> {
        Ok(self.objects.merge_patch(path, &patch).await.map(drop)?)
    }

    /// Changes an object; what the API server says.
    pub(crate) async fn try_merge(&self, path: &str, patch: Value) -> kube::Result<Value> {
        self.objects.merge_patch(path, &patch).await
    }

    /// The same of a deletion.
    pub(crate) async fn try_delete(&self, path: &str) -> kube::Result<Value> {
        self.objects.delete(path).await.map(|()| Value::Null)
    }

    /// Deletes an object, if it is there.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), Failed> {
        Ok(self.objects.delete(path).await?)
    }

    /// The paths of things.
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

    /// Changes the budget's spec.
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

    /// Writes orders of quotas by hand.
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

    /// Makes a pod that asks for so many GiB, on the node where that is said, without a scheduler or a kubelet.
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

    /// Gives a pod something that would make another one; its UID.
    pub(crate) async fn create_owner(&self, pod: &str) -> Result<String, Failed> {
        let path = format!("/api/v1/namespaces/{}/configmaps", self.name);
        let owner = self.create(&path, json!({ "metadata": { "name": pod } }));
        let uid = owner.await?["metadata"]["uid"].clone();
        let owner = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": pod, "uid": uid, "controller": true });
        let owned = json!({ "metadata": { "ownerReferences": [owner] } });
        self.merge(&self.pod_path(pod), owned).await?;
        Ok(uid.as_str().unwrap_or_default().to_owned())
    }

    /// Whether somebody was told this of the pod.
    pub(crate) async fn has_event(&self, reason: &str, pod: &str) -> Result<bool, Failed> {
        let path = format!("/api/v1/namespaces/{}/events", self.name);
        let events = self.get(&path).await?["items"].take();
        let mut events = events.as_array().into_iter().flatten();
        Ok(events.any(|event| event["reason"] == reason && event["involvedObject"]["name"] == pod))
    }

    /// What the scheduler says of a pod for which it has no node.
    pub(crate) async fn mark_unschedulable(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/status", self.pod_path(pod));
        let refused = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "lastTransitionTime": "2026-01-01T00:00:00Z" });
        self.merge(&path, json!({ "status": { "conditions": [refused] } }))
            .await
    }

    /// The scheduler's part: the pod is on the node from now on.
    pub(crate) async fn bind(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/binding", self.pod_path(pod));
        let target = json!({ "apiVersion": "v1", "kind": "Node", "name": self.name });
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod }, "target": target,
        });
        Ok(self.create(&path, binding).await.map(drop)?)
    }

    /// What the kubelet says.
    pub(crate) async fn mark_running(&self, pod: &str) -> Result<(), Failed> {
        let path = format!("{}/status", self.pod_path(pod));
        self.merge(&path, json!({ "status": { "phase": "Running" } }))
            .await
    }

    /// What the agent says: the GPU's memory, and which pods are bound to how much of it.
    pub(crate) async fn report_gpu(
        &self,
        memory: i32,
        bound: &[(String, i32)],
    ) -> Result<(), Failed> {
        self.report_gpu_with_waiter(memory, bound, None).await
    }

    /// What the agent says of faults that nobody has dealt with.
    pub(crate) async fn report_faults(&self, faults: Value) -> Result<(), Failed> {
        let path = format!("{}/status", self.gpu_node_path());
        self.merge(&path, json!({ "status": { "faults": faults } }))
            .await
    }

    /// As [`Self::report`], with a pod that waits for so much; whom the GPU is reserved for it is held for.
    pub(crate) async fn report_gpu_with_waiter(
        &self,
        memory: i32,
        bound: &[(String, i32)],
        waiter: Option<(&str, &str, i32)>,
    ) -> Result<(), Failed> {
        let before = self.gpu_node().await?;
        let held = &before["spec"]["reservations"][0]["waiter"];
        let free = memory - bound.iter().map(|(_, gib)| gib).sum::<i32>();
        let pods: Vec<_> = bound
            .iter()
            .map(|(uid, gib)| json!({ "uid": uid, "quanta": gib }))
            .collect();
        let waiting: Vec<_> = waiter
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
                "largestFree": largest, "heldFor": held, "pods": pods }],
        });
        if is_subset(&status, &before["status"]) {
            return Ok(());
        }
        let path = format!("{}/status", self.gpu_node_path());
        self.merge(&path, json!({ "status": status })).await
    }
}

/// Whether everything that `wanted` says is so.
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

/// The status of one of a budget's conditions.
pub(crate) fn condition<'a>(budget: &'a Value, type_: &str) -> &'a str {
    let conditions = budget["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|condition| condition["type"] == type_);
    condition
        .and_then(|condition| condition["status"].as_str())
        .unwrap_or_default()
}
