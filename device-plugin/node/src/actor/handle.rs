//! Passes the kubelet's calls to the node task, and publishes their outcome on the pods.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_apiserver::{Events, PodRef, Reason};
use bursar_gpu::generations::GenerationChange;
use bursar_host::clock;
use bursar_kubelet::plugin::{AllocateError, Allocator, PrepareError};
use bursar_ledger::WaitReason;
use bursar_ledger::units::{AllocationId, DeviceIdSet, Resource};
use tokio::sync::{mpsc, oneshot};

use super::Command;
use crate::allocator::{BoundMemory, PrepareRequest, Reply};
use crate::checkpoint_state::PodName;
use crate::metrics::{BindResult, NodeMetrics};
use crate::pod_resolver::PodResolver;

/// A handle to the node task, from which the kubelet's plugins allocate.
#[derive(Clone)]
pub struct NodeHandle {
    commands: mpsc::Sender<Command>,
    resolver: Arc<PodResolver>,
    bind_wait: Duration,
    observers: Observers,
}

/// The receivers of the node task's events and measurements.
#[derive(Debug, Clone)]
pub struct Observers {
    /// Events on pods.
    pub events: Events,
    /// Durations and counters.
    pub metrics: NodeMetrics,
}

/// The part of a call's time that the wait for the operator leaves for the bind.
const BIND_TIME: Duration = Duration::from_secs(1);

impl Observers {
    /// Reports the GPUs whose memory has a new generation.
    pub(super) fn report_lost_memory(&self, grown: &[GenerationChange]) {
        for change in grown {
            self.events
                .on_node(Reason::GpuMemoryLost, change.to_string());
        }
    }

    /// Reports the end of a PreStartContainer call of `container`. A wait is reported when it
    /// begins, and again only where its reason has changed.
    fn report_prepare(
        &self,
        container: Option<&NamedContainer>,
        result: &Result<BoundMemory, PrepareError>,
        reported_wait: Option<&str>,
        took: Duration,
    ) {
        let (counted, reason, message) = match result {
            Ok(memory) => (BindResult::Bound, Reason::Bound, memory.to_string()),
            Err(error @ (PrepareError::NoRoom(_) | PrepareError::PodDeleted)) => (
                BindResult::NoRoom,
                Reason::WaitingForRoom,
                error.to_string(),
            ),
            Err(error) => (BindResult::Failed, Reason::NotBound, error.to_string()),
        };
        self.metrics.observe_prepare(counted, took);
        let is_reported = matches!(result, Err(PrepareError::PodDeleted))
            || reported_wait.is_some_and(|reported| reported == message);
        if let Some(container) = container.filter(|_| !is_reported) {
            self.events
                .on_pod(container.pod.clone(), reason, container.note(&message));
        }
    }
}

/// The Events of a container that was bound without its pod's settings end so.
const ASSUMED: &str =
    "; Bursar's operator did not answer: priority 0 and one GPU were assumed for the pod";

/// A container whose pod has a name, as Events show it.
#[derive(Clone, Debug)]
struct NamedContainer {
    pod: PodRef,
    container: String,
    /// Whether priority and spread are defaults for want of the operator's answer.
    is_assumed: bool,
}

impl NamedContainer {
    fn of(request: &PrepareRequest) -> Option<Self> {
        let PodName { namespace, name } = request.pod_name.clone()?;
        Some(Self {
            pod: PodRef {
                namespace,
                name,
                uid: request.bind.pod.clone(),
            },
            container: request.container.clone(),
            is_assumed: request.is_assumed,
        })
    }

    /// The message of an Event about the container.
    fn note(&self, message: &str) -> String {
        let assumed = if self.is_assumed { ASSUMED } else { "" };
        format!("container {}: {message}{assumed}", self.container)
    }
}

impl Allocator for NodeHandle {
    async fn allocate(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        id: Option<AllocationId>,
    ) -> Result<AllocationId, AllocateError> {
        if resource == Resource::Compute {
            return Ok(id.unwrap_or_else(|| AllocationId::from_bits(rand::random())));
        }
        let started = Instant::now();
        let (reply, allocated) = oneshot::channel();
        let command = Command::Allocate {
            resource,
            device_ids,
            id,
            reply,
        };
        self.commands
            .send(command)
            .await
            .map_err(|_| AllocateError::Stopping)?;
        let allocated = allocated.await.map_err(|_| AllocateError::Stopping);
        self.observers.metrics.observe_allocate(started.elapsed());
        allocated
    }

    async fn prepare(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        limit: Duration,
    ) -> Result<(), PrepareError> {
        let started = Instant::now();
        let deadline = clock::now() + self.bind_wait.min(limit);
        let wait = limit.saturating_sub(BIND_TIME);
        let request = match self.resolver.resolve(resource, &device_ids, wait).await {
            Ok(request) => request,
            Err(error) => {
                let result = Err(error.into());
                self.observers
                    .report_prepare(None, &result, None, started.elapsed());
                return result.map(drop);
            }
        };
        // The weight is given out with the container's device memory.
        if resource == Resource::Compute {
            return Ok(());
        }
        let container = NamedContainer::of(&request);
        let (result, bound) = oneshot::channel();
        let (wait_reason, waiting) = oneshot::channel();
        let reply = Reply {
            result,
            wait_reason,
        };
        let command = Command::Prepare {
            request,
            deadline,
            reply,
        };
        self.commands
            .send(command)
            .await
            .map_err(|_| PrepareError::Stopping)?;
        let (result, reported_wait) = self.follow(container.as_ref(), bound, waiting).await;
        let (container, reported_wait) = (container.as_ref(), reported_wait.as_deref());
        self.observers
            .report_prepare(container, &result, reported_wait, started.elapsed());
        result.map(drop)
    }
}

impl NodeHandle {
    /// A handle that sends `commands` to the node task.
    pub(super) fn new(
        commands: mpsc::Sender<Command>,
        resolver: Arc<PodResolver>,
        bind_wait: Duration,
        observers: Observers,
    ) -> Self {
        Self {
            commands,
            resolver,
            bind_wait,
            observers,
        }
    }

    /// Waits for the result of a call. Publishes a wait when it begins, and ends it when the pod is
    /// being deleted: the kubelet ends no pod while this call is open.
    async fn follow(
        &self,
        container: Option<&NamedContainer>,
        mut bound: oneshot::Receiver<Result<BoundMemory, PrepareError>>,
        waiting: oneshot::Receiver<WaitReason>,
    ) -> (Result<BoundMemory, PrepareError>, Option<String>) {
        let stopping = || Err(PrepareError::Stopping);
        let reason = tokio::select! {
            biased;
            // The channel closes without a reason where the call does not wait.
            Ok(reason) = waiting => reason.to_string(),
            result = &mut bound => return (result.unwrap_or_else(|_| stopping()), None),
        };
        let Some(container) = container else {
            return (bound.await.unwrap_or_else(|_| stopping()), None);
        };
        let (events, settings) = (&self.observers.events, &self.resolver.settings);
        events.on_pod(
            container.pod.clone(),
            Reason::WaitingForRoom,
            container.note(&reason),
        );
        let result = tokio::select! {
            biased;
            result = bound => result.unwrap_or_else(|_| stopping()),
            () = settings.wait_for_deletion(&container.pod.uid) => Err(PrepareError::PodDeleted),
        };
        (result, Some(reason))
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::{Request, Response};
    use bursar_apiserver::metrics::ApiMetrics;
    use bursar_apiserver::{ParsedSpec, PodSettingsReader};
    use bursar_crds::gpu_node::PodSettings;
    use bursar_kubelet::pod_resources::PodResourcesClient;
    use bursar_ledger::units::Bytes;
    use kube::Client;
    use prometheus_client::registry::Registry;
    use serde_json::Value;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// The Events that the API server received: reason and note.
    type Published = Arc<std::sync::Mutex<Vec<(String, String)>>>;

    /// A client of an API server that stores Events.
    fn client(published: Published) -> Client {
        let server = tower::service_fn(move |request: Request<kube::client::Body>| {
            let published = published.clone();
            async move {
                let body = to_bytes(Body::new(request.into_body()), 1 << 16).await?;
                let event: Value = serde_json::from_slice(&body).expect("a JSON body");
                let text = |field: &str| event[field].as_str().unwrap().to_owned();
                let sent = (text("reason"), text("note"));
                published.lock().unwrap().push(sent);
                Ok::<_, axum::Error>(Response::new(Body::from(body)))
            }
        });
        Client::new(server, "default")
    }

    fn handle(published: &Published) -> NodeHandle {
        let client = client(published.clone());
        let metrics = ApiMetrics::new(&mut Registry::default());
        let (events, sender) = Events::new(metrics.clone());
        let stop = CancellationToken::new();
        tokio::spawn(sender.run(client, "n".into(), metrics, stop));
        NodeHandle {
            commands: mpsc::channel(1).0,
            resolver: Arc::new(PodResolver {
                device_plugin_dir: Default::default(),
                resource_names: Vec::new(),
                pod_resources: PodResourcesClient::new(std::path::Path::new("/nobody")),
                settings: PodSettingsReader::new(None),
                checkpoint_read: Default::default(),
            }),
            bind_wait: Duration::from_secs(25),
            observers: Observers {
                events,
                metrics: NodeMetrics::new(&mut Registry::default()),
            },
        }
    }

    fn container() -> NamedContainer {
        NamedContainer {
            pod: PodRef {
                namespace: "team".into(),
                name: "train-0".into(),
                uid: "uid-1".parse().unwrap(),
            },
            container: "main".into(),
            is_assumed: false,
        }
    }

    /// A wait for 8 GiB of device memory on a GPU with 6 GiB free.
    fn reason() -> WaitReason {
        WaitReason {
            resource: Resource::DeviceMemory,
            needed: Bytes::gib(8),
            other_containers: Vec::new(),
            gpus: std::num::NonZeroU16::new(1),
            too_few_gpus: None,
            beyond_instance: false,
            largest_free: Bytes::gib(6),
            largest_free_gpu: Some("GPU-a".parse().unwrap()),
            set_aside: Vec::new(),
            closed_gpu: None,
            refused_gpu: None,
            untried_gpu: None,
            weight: None,
            claims_ahead: 0,
            withheld: Bytes::ZERO,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn wait_is_reported_when_it_begins_and_once() {
        let published = Published::default();
        let handle = handle(&published);
        let (container, started) = (container(), tokio::time::Instant::now());
        let (result, bound) = oneshot::channel();
        let (wait_reason, waiting) = oneshot::channel();
        wait_reason.send(reason()).unwrap();
        let node = async {
            while published.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let reported_after = started.elapsed();
            tokio::time::sleep(Duration::from_secs(25)).await;
            let message = reason().to_string();
            result.send(Err(PrepareError::NoRoom(message))).unwrap();
            reported_after
        };
        let follow = handle.follow(Some(&container), bound, waiting);
        let ((result, reported_wait), reported_after) = tokio::join!(follow, node);
        assert!(
            reported_after < Duration::from_secs(1),
            "{reported_after:?}"
        );
        let took = Duration::from_secs(25);
        let reported_wait = reported_wait.as_deref();
        handle
            .observers
            .report_prepare(Some(&container), &result, reported_wait, took);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let note = "container main: waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-a)";
        let expected = [("WaitingForGpuMemory".to_owned(), note.to_owned())];
        assert_eq!(*published.lock().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_memory_is_reported_with_both_generations() {
        let published = Published::default();
        let handle = handle(&published);
        let change = |gpu: &str, before| GenerationChange {
            gpu: gpu.parse().unwrap(),
            before,
            after: before + 1,
        };
        let observers = &handle.observers;
        observers.report_lost_memory(&[change("GPU-a", 3), change("GPU-b", 1)]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let events = published.lock().unwrap().clone();
        let note = "the memory of GPU-a has generation 4 instead of 3: its contents are lost";
        assert_eq!(events[0], ("GpuMemoryLost".to_owned(), note.to_owned()));
        assert_eq!(events.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_with_the_operators_word_of_a_deletion() {
        let spec = |deletion_grace_seconds| {
            let settings = PodSettings {
                deletion_grace_seconds,
                ..PodSettings::new("uid-1".to_owned(), 0, &Default::default())
            };
            Some(ParsedSpec {
                generation: Some(1),
                pods: Arc::new([("uid-1".to_owned(), settings)].into()),
                ..ParsedSpec::default()
            })
        };
        let (operator, read) = watch::channel(spec(None));
        let mut handle = handle(&Published::default());
        let resolver = Arc::get_mut(&mut handle.resolver).unwrap();
        resolver.settings = PodSettingsReader::new(Some(read));
        let (_result, bound) = oneshot::channel();
        let (wait_reason, waiting) = oneshot::channel();
        wait_reason.send(reason()).unwrap();
        let deletion = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            operator.send_replace(spec(Some(30)));
        };
        let container = container();
        let follow = handle.follow(Some(&container), bound, waiting);
        let started = tokio::time::Instant::now();
        let ((result, _), ()) = tokio::join!(follow, deletion);
        assert!(
            matches!(result, Err(PrepareError::PodDeleted)),
            "{result:?}"
        );
        assert_eq!(started.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn bound_container_is_reported_with_amount_and_gpu() {
        let published = Published::default();
        let handle = handle(&published);
        let memory = BoundMemory::Device(vec![("GPU-a".parse().unwrap(), Bytes::gib(8))]);
        handle
            .observers
            .report_prepare(Some(&container()), &Ok(memory), None, Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let note = "container main: 8 GiB of GPU-a";
        let expected = [("GpuMemoryBound".to_owned(), note.to_owned())];
        assert_eq!(*published.lock().unwrap(), expected);
    }

    #[test]
    fn pod_without_settings_is_told_what_was_assumed() {
        let mut container = container();
        container.is_assumed = true;
        let note = container.note("8 GiB of GPU-a");
        assert!(
            note.starts_with("container main: 8 GiB of GPU-a; "),
            "{note}"
        );
        assert!(
            note.contains("priority 0 and one GPU were assumed"),
            "{note}"
        );
    }
}
