//! Creates the objects of a large cluster, and acts for its kubelets and agents.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bursar_e2e::raw_api::RawApi;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use tokio::time::sleep;

const CONCURRENT_REQUESTS: usize = 48;
/// The GPUs of a node, and the memory of each in GiB.
pub(crate) const GPUS_PER_NODE: usize = 8;
pub(crate) const GPU_GIB: i32 = 80;
/// How long a variable of a pod is, so that the API server sends 12 KiB for each pod.
const SETTING_REPEATS: usize = 14;
/// The request of a pod in GiB.
pub(crate) const POD_GIB: i32 = 16;
const RESOURCE: &str = "bursar.dev/gpu-memory-gib";
const LABEL: &str = "bursar.dev/largest-free-gib";

/// The longest time that an edit of a policy may take.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The numbers of objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) nodes: usize,
    pub(crate) pods: usize,
    pub(crate) budgets: usize,
}

/// A pod bound to a GPU.
#[derive(Clone, Debug)]
pub(crate) struct BoundPod {
    pub(crate) namespace: usize,
    pub(crate) name: String,
    uid: String,
    gpu: usize,
}

impl BoundPod {
    /// The path of the object.
    pub(crate) fn path(&self) -> String {
        let namespace = namespace_name(self.namespace);
        format!("/api/v1/namespaces/{namespace}/pods/{}", self.name)
    }
}

/// A fake agent of a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeAgent {
    pub(crate) pods: Vec<BoundPod>,
    /// Quanta of the last GPU that the agent withholds.
    pub(crate) withheld: i32,
    pub(crate) faults: Vec<Value>,
    /// Poisoned contexts and restarts, by namespace.
    pub(crate) context_counts: BTreeMap<usize, (i64, i64)>,
}

impl FakeAgent {
    fn free(&self, gpu: usize) -> i32 {
        let bound = self.pods.iter().filter(|pod| pod.gpu == gpu).count();
        let withheld = if gpu + 1 == GPUS_PER_NODE {
            self.withheld
        } else {
            0
        };
        GPU_GIB - withheld - POD_GIB * i32::try_from(bound).unwrap_or(i32::MAX)
    }

    pub(crate) fn largest_free(&self) -> i32 {
        (0..GPUS_PER_NODE)
            .map(|gpu| self.free(gpu))
            .max()
            .unwrap_or(0)
    }

    /// Returns the GPU with the most free memory.
    fn emptiest_gpu(&self) -> usize {
        let best = (0..GPUS_PER_NODE).max_by_key(|gpu| self.free(*gpu));
        best.unwrap_or(0)
    }

    /// Returns the `GpuNode` status.
    fn status(&self, node: usize) -> Value {
        let gpus: Vec<Value> = (0..GPUS_PER_NODE).map(|gpu| self.gpu(node, gpu)).collect();
        let mut namespaces: BTreeMap<usize, i32> = BTreeMap::new();
        for pod in &self.pods {
            *namespaces.entry(pod.namespace).or_default() += POD_GIB;
        }
        for namespace in self.context_counts.keys() {
            namespaces.entry(*namespace).or_default();
        }
        let namespaces: Vec<Value> = namespaces
            .into_iter()
            .map(|(namespace, observed)| {
                let (poisoned, restarts) = self
                    .context_counts
                    .get(&namespace)
                    .copied()
                    .unwrap_or_default();
                json!({ "namespace": namespace_name(namespace), "observed": observed, "denials": 0,
                    "poisoned": poisoned, "restarts": restarts })
            })
            .collect();
        let free: i32 = (0..GPUS_PER_NODE).map(|gpu| self.free(gpu)).sum();
        let all = GPU_GIB * i32::try_from(GPUS_PER_NODE).unwrap_or(i32::MAX) - self.withheld;
        let conditions = ["Ready", "GpusFound", "Registered", "CdiReady", "Audited"].map(|type_| {
            json!({ "type": type_, "status": "True", "reason": "AsItShouldBe", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z" })
        });
        json!({ "status": {
            "quantum": "1Gi", "driverVersion": "580.159.04", "agentVersion": "0.1.0",
            "deviceMemory": { "allocatable": all, "free": free, "largestFree": self.largest_free() },
            "gpus": gpus, "namespaces": namespaces, "faults": self.faults, "conditions": conditions,
        } })
    }

    fn gpu(&self, node: usize, gpu: usize) -> Value {
        let pods = self.pods.iter().filter(|pod| pod.gpu == gpu);
        let pods: Vec<Value> = pods
            .map(|pod| json!({ "uid": pod.uid, "quanta": POD_GIB }))
            .collect();
        let (uuid, free) = (gpu_uuid(node, gpu), self.free(gpu));
        json!({ "uuid": uuid, "index": gpu, "model": "NVIDIA H100 80GB HBM3", "memory": "80Gi", "state": "Active",
            "generation": 1, "health": { "status": "Healthy", "reason": "Ok" }, "capacity": GPU_GIB, "free": free,
            "largestFree": free, "pods": pods })
    }

    /// Reports a poisoned context of the node's first pod, with the agent's action.
    pub(crate) fn report_poisoned(&mut self, node: usize, action: &str) {
        let Some(pod) = self.pods.first() else {
            return;
        };
        let (poisoned, _) = self.context_counts.entry(pod.namespace).or_default();
        *poisoned += 1;
        self.faults = vec![json!({
            "id": format!("{node}-{poisoned}"), "kind": "Context", "gpu": gpu_uuid(node, pod.gpu), "gpuGeneration": 1,
            "cudaError": 700, "action": action, "time": "2026-01-01T00:00:00Z",
            "container": { "podUid": pod.uid, "namespace": namespace_name(pod.namespace), "pod": pod.name,
                "container": "main", "processGeneration": 1 },
        })];
    }

    /// Reports that a restart has closed the faults.
    pub(crate) fn report_restarted(&mut self) {
        self.faults.clear();
        if let Some(pod) = self.pods.first() {
            let (_, restarts) = self.context_counts.entry(pod.namespace).or_default();
            *restarts += 1;
        }
    }
}

/// All objects of the cluster.
pub(crate) struct Fleet {
    pub(crate) size: Size,
    pub(crate) objects: RawApi,
    pub(crate) agents: Vec<FakeAgent>,
    next: usize,
}

impl Fleet {
    /// Creates all objects, and returns the fleet with the rate of pods per second. Pods are bound
    /// and running before any quota exists.
    pub(crate) async fn make(objects: RawApi, size: Size) -> anyhow::Result<(Self, f64)> {
        let mut fleet = Self {
            size,
            objects,
            agents: vec![FakeAgent::default(); size.nodes],
            next: size.pods,
        };
        run_concurrently(0..size.budgets, |number| fleet.make_namespace(number)).await?;
        run_concurrently(0..size.nodes, |number| fleet.make_node(number)).await?;
        let begin = Instant::now();
        let pods = stream::iter(0..size.pods)
            .map(|number| {
                let (node, round) = (number % size.nodes, number / size.nodes);
                let namespace = (node + 7 * round) % size.budgets;
                fleet.make_pod(node, namespace, number, round % GPUS_PER_NODE)
            })
            .buffer_unordered(CONCURRENT_REQUESTS);
        let pods: Vec<(usize, BoundPod)> = pods.try_collect().await?;
        let rate = size.pods as f64 / begin.elapsed().as_secs_f64();
        for (node, pod) in pods {
            fleet.agents[node].pods.push(pod);
        }
        fleet.report(0..size.nodes).await?;
        Ok((fleet, rate))
    }

    async fn make_namespace(&self, number: usize) -> anyhow::Result<()> {
        let name = namespace_name(number);
        let namespace = json!({ "metadata": { "name": name } });
        self.create("/api/v1/namespaces", &namespace).await?;
        // The API server admits pods once the account exists; the controller manager may create it
        // first.
        let account = json!({ "metadata": { "name": "default" } });
        let accounts = format!("/api/v1/namespaces/{name}/serviceaccounts");
        self.create(&accounts, &account).await?;
        let budget = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
            "spec": { "deviceMemory": { "guaranteed": "512Gi", "limit": "1Ti" } },
        });
        let budgets = format!("/apis/bursar.dev/v1alpha1/namespaces/{name}/gpumemorybudgets");
        self.create(&budgets, &budget).await
    }

    /// Creates a node with a kubelet's list of images, which is most of a Node's size.
    async fn make_node(&self, number: usize) -> anyhow::Result<()> {
        let name = node_name(number);
        let images: Vec<Value> = (0..50)
            .map(|image| {
                let digest = "0123456789abcdef".repeat(4);
                json!({ "names": [format!("registry.example/team/image-{image}@sha256:{digest}")], "sizeBytes": 1_000_000 })
            })
            .collect();
        let offered = json!({ RESOURCE: (GPUS_PER_NODE as i32 * GPU_GIB).to_string(), "cpu": "128", "memory": "1Ti", "pods": "110" });
        let node = json!({
            "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name, "kubernetes.io/os": "linux" } },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": offered,
                "capacity": offered, "images": images },
        });
        self.create("/api/v1/nodes", &node).await?;
        let gpus = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": name }, "spec": {},
        });
        self.create("/apis/bursar.dev/v1alpha1/gpunodes", &gpus)
            .await
    }

    /// Creates a running pod on a GPU. Each third pod is a borrower.
    async fn make_pod(
        &self,
        node: usize,
        namespace: usize,
        number: usize,
        gpu: usize,
    ) -> anyhow::Result<(usize, BoundPod)> {
        let name = format!("pod-{number}");
        let class = number.is_multiple_of(3).then_some("bursar-borrowed");
        let value = "a value as long as they are, ".repeat(SETTING_REPEATS);
        let env: Vec<Value> = (0..20)
            .map(|number| json!({ "name": format!("SETTING_{number}"), "value": value }))
            .collect();
        let pod = json!({
            "metadata": { "name": name, "labels": { "app": "model", "team": namespace_name(namespace) } },
            "spec": {
                "priorityClassName": class, "nodeName": node_name(node), "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "main", "image": "registry.example/team/image-1", "env": env,
                    "resources": { "limits": { RESOURCE: POD_GIB.to_string(), "cpu": "4", "memory": "16Gi" } } }],
            },
        });
        let pods = format!("/api/v1/namespaces/{}/pods", namespace_name(namespace));
        // The API server sometimes refuses a pod with a conflict when many requests update a quota.
        let created = loop {
            match self.objects.create(&pods, &pod).await {
                Err(kube::Error::Api(status)) if status.reason == "Conflict" => continue,
                created => break created?,
            }
        };
        let since = "2026-01-01T00:00:00Z";
        let status = json!({ "status": {
            "phase": "Running", "startTime": since, "podIP": "10.0.0.1",
            "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": since }],
            "containerStatuses": [{ "name": "main", "image": "registry.example/team/image-1", "imageID": "",
                "ready": true, "restartCount": 0, "state": { "running": { "startedAt": since } } }],
        } });
        self.objects
            .merge_patch(&format!("{pods}/{name}/status"), &status)
            .await?;
        let uid = created["metadata"]["uid"]
            .as_str()
            .context("a pod has a UID")?;
        let bound = BoundPod {
            namespace,
            name,
            uid: uid.to_owned(),
            gpu,
        };
        Ok((node, bound))
    }

    async fn create(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        match self.objects.create(path, object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            other => other
                .map(drop)
                .with_context(|| format!("{path} {}", object["metadata"]["name"])),
        }
    }

    /// Writes the status of these nodes' agents.
    pub(crate) async fn report(
        &self,
        nodes: impl IntoIterator<Item = usize>,
    ) -> anyhow::Result<()> {
        run_concurrently(nodes, |node| async move {
            let path = format!("{}/status", gpu_node_path(node));
            let status = self.agents[node].status(node);
            self.objects.merge_patch(&path, &status).await?;
            Ok(())
        })
        .await
    }

    /// Changes a field of every budget on which no quota and no other budget depends.
    pub(crate) async fn patch_budgets(&self, most: usize) -> anyhow::Result<()> {
        let patch = json!({ "spec": { "perContainer": { "max": format!("{most}Gi") } } });
        run_concurrently(0..self.size.budgets, |number| {
            let patch = &patch;
            async move {
                let namespace = namespace_name(number);
                let path = format!(
                    "/apis/bursar.dev/v1alpha1/namespaces/{namespace}/gpumemorybudgets/default"
                );
                self.objects.merge_patch(&path, patch).await?;
                Ok(())
            }
        })
        .await
    }

    /// Edits the context policy of the first budget, and waits until agents are told. Returns how
    /// long that took.
    pub(crate) async fn edit_policy(&self, most: usize) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let name = namespace_name(0);
        let budget =
            format!("/apis/bursar.dev/v1alpha1/namespaces/{name}/gpumemorybudgets/default");
        let patch = json!({ "spec": { "contextPolicy": { "maxRestarts": most } } });
        self.objects.merge_patch(&budget, &patch).await?;
        let orders = format!("/apis/bursar.dev/v1alpha1/gpunamespaces/{name}");
        loop {
            let told = self.objects.get(&orders).await?;
            if told["spec"]["contextPolicy"]["maxRestarts"] == most {
                return Ok(begin.elapsed());
            }
            anyhow::ensure!(begin.elapsed() < PATIENCE, "the agents are told {told}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Deletes the oldest pod of each of these nodes, and binds another pod of its namespace to the
    /// emptiest GPU. The agents report both.
    pub(crate) async fn replace_pods(&mut self, nodes: &[usize]) -> anyhow::Result<()> {
        let leaving: Vec<(usize, BoundPod)> = nodes
            .iter()
            .filter_map(|node| {
                let pods = &mut self.agents[*node].pods;
                (!pods.is_empty()).then(|| (*node, pods.remove(0)))
            })
            .collect();
        let fleet = &*self;
        run_concurrently(&leaving, |(node, pod)| async move {
            fleet.objects.delete(&pod.path()).await?;
            fleet.report([*node]).await
        })
        .await?;
        let first = self.next;
        self.next += leaving.len();
        let fleet = &*self;
        let created = stream::iter(leaving.iter().enumerate())
            .map(|(at, (node, pod))| {
                let gpu = fleet.agents[*node].emptiest_gpu();
                fleet.make_pod(*node, pod.namespace, first + at, gpu)
            })
            .buffer_unordered(CONCURRENT_REQUESTS);
        let created: Vec<(usize, BoundPod)> = created.try_collect().await?;
        for (node, pod) in created {
            self.agents[node].pods.push(pod);
        }
        self.report(leaving.iter().map(|(node, _)| *node)).await
    }

    /// Counts the nodes whose label differs from the largest free amount of their GPUs.
    pub(crate) async fn mislabelled_nodes(&self) -> anyhow::Result<usize> {
        let nodes = self.objects.get("/api/v1/nodes").await?;
        let nodes = nodes["items"].as_array().context("a list of nodes")?;
        let labels: BTreeMap<_, _> = nodes
            .iter()
            .map(|node| {
                (
                    &node["metadata"]["name"],
                    &node["metadata"]["labels"][LABEL],
                )
            })
            .map(|(name, label)| (name.as_str().unwrap_or_default(), label.clone()))
            .collect();
        let wrong = self.agents.iter().enumerate().filter(|(node, agent)| {
            let label = labels.get(node_name(*node).as_str());
            label != Some(&json!(agent.largest_free().to_string()))
        });
        Ok(wrong.count())
    }

    /// Counts the budgets whose status is of an older spec, or which are not Ready.
    pub(crate) async fn stale_budgets(&self) -> anyhow::Result<usize> {
        let path = "/apis/bursar.dev/v1alpha1/gpumemorybudgets";
        let budgets = self.objects.get(path).await?;
        let budgets = budgets["items"].as_array().context("a list of budgets")?;
        let behind = budgets.iter().filter(|budget| {
            let status = &budget["status"];
            let mut conditions = status["conditions"].as_array().into_iter().flatten();
            let ready = conditions.any(|one| one["type"] == "Ready" && one["status"] == "True");
            !ready || status["observedGeneration"] != budget["metadata"]["generation"]
        });
        Ok(behind.count())
    }
}

/// Runs `act` for all items, with bounded concurrency.
async fn run_concurrently<T, F: Future<Output = anyhow::Result<()>>>(
    of: impl IntoIterator<Item = T>,
    act: impl FnMut(T) -> F,
) -> anyhow::Result<()> {
    let acts = stream::iter(of)
        .map(act)
        .buffer_unordered(CONCURRENT_REQUESTS);
    acts.try_collect::<Vec<()>>().await.map(drop)
}

fn namespace_name(number: usize) -> String {
    format!("team-{number}")
}

fn node_name(number: usize) -> String {
    format!("gpu-node-{number}")
}

fn gpu_node_path(number: usize) -> String {
    format!("/apis/bursar.dev/v1alpha1/gpunodes/{}", node_name(number))
}

fn gpu_uuid(node: usize, gpu: usize) -> String {
    format!("GPU-{node:08x}-0000-0000-0000-{gpu:012x}")
}
