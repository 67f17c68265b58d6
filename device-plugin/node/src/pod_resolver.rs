//! Resolves device ids to the container that the kubelet starts: PreStartContainer names ids only.
//!
//! The kubelet's device checkpoint maps device ids to a pod's UID and a container. PodResources
//! adds the pod's name, and the API server its priority and GPU spread. Only the UID is necessary.
//! The other data serve order and messages, so reading them is bounded in time and may fail.

use std::io;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use bursar_apiserver::PodRef;
use bursar_kubelet::device_checkpoint::{
    self, CheckpointEntry, DeviceCheckpoint, DeviceCheckpointError,
};
use bursar_kubelet::plugin::PrepareError;
use bursar_kubelet::pod_resources::{
    ContainerRef, ListedContainer, PodResourcesClient, find_container,
};
use bursar_ledger::units::{DeviceIdSet, PodUid, Resource};
use bursar_ledger::{GpuSpread, Priority};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tracing::debug;

use super::allocator::ContainerIdentity;
use super::checkpoint_state::PodName;
use super::shared_read::SharedRead;

/// The number of GPUs over which a pod spreads its memory. The annotation grants nothing.
pub const GPUS_ANNOTATION: &str = "bursar.dev/gpus";

/// The annotation of a mirror pod with the UID that the kubelet uses for the static pod.
const STATIC_POD_ANNOTATION: &str = "kubernetes.io/config.hash";

/// The timeout of the API server's read, whose data are worth no longer wait.
const API_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason why no container could be resolved.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The kubelet's checkpoint does not have these device ids.
    #[error(
        "failed to resolve the pod of device ids {device_ids}: the kubelet's device checkpoint does \
         not have them, and {skipped} of its entries cannot be decoded; \
         delete the pod: its controller makes another"
    )]
    NotInCheckpoint {
        /// The device ids.
        device_ids: DeviceIdSet,
        /// The entries that were skipped, each of which may have them.
        skipped: usize,
    },
    /// The checkpoint has these device ids for two pods, which no kubelet writes.
    #[error(
        "failed to resolve the pod of device ids {0}: the kubelet's device checkpoint has them \
         for more than one pod; delete the pod: its controller makes another"
    )]
    Ambiguous(DeviceIdSet),
    /// The checkpoint is unreadable, and the API server could not replace it.
    #[error(
        "failed to resolve the pod of device ids {device_ids}: {source}; the kubelet tries again"
    )]
    Unreadable {
        /// The device ids.
        device_ids: DeviceIdSet,
        /// The error of the checkpoint.
        source: DeviceCheckpointError,
    },
}

impl From<ResolveError> for PrepareError {
    fn from(error: ResolveError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Resolves containers by the kubelet and the API server.
#[derive(Clone)]
pub struct PodResolver {
    /// The kubelet's plugin directory with its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// The resources under their registered names.
    pub resource_names: Vec<(Resource, String)>,
    /// The client of the kubelet's PodResources service.
    pub pod_resources: PodResourcesClient,
    /// The client of the API server, if any.
    pub client: Option<Client>,
    /// The read of the kubelet's checkpoint that has not ended, if any.
    pub checkpoint_read: SharedRead<Result<DeviceCheckpoint, DeviceCheckpointError>>,
}

/// The fields of a pod at the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ApiPod {
    uid: PodUid,
    priority: Priority,
    gpu_spread: GpuSpread,
}

impl PodResolver {
    /// Reads the kubelet's checkpoint; an error soon where its disk hangs.
    pub async fn read_device_checkpoint(&self) -> Result<DeviceCheckpoint, DeviceCheckpointError> {
        let (dir, names) = (self.device_plugin_dir.clone(), self.resource_names.clone());
        let read = move || DeviceCheckpoint::read(&dir, &names);
        let late = || DeviceCheckpointError::Unreadable {
            path: self.device_plugin_dir.join(device_checkpoint::FILE_NAME),
            source: io::ErrorKind::TimedOut.into(),
        };
        let read = self.checkpoint_read.run(read).await;
        read.unwrap_or_else(|| Err(late()))
    }

    /// Resolves the container that has these device ids.
    pub async fn resolve(
        &self,
        resource: Resource,
        device_ids: &DeviceIdSet,
    ) -> Result<ContainerIdentity, ResolveError> {
        let (checkpoint, container) = tokio::join!(
            self.read_device_checkpoint(),
            self.find_container(resource, device_ids)
        );
        let api_pod = match &container {
            Some(container) => self.read_pod(container).await,
            None => None,
        };
        let checkpoint = match checkpoint {
            Ok(checkpoint) => checkpoint,
            Err(source) if api_pod.is_none() => {
                return Err(ResolveError::Unreadable {
                    device_ids: device_ids.clone(),
                    source,
                });
            }
            Err(_) => DeviceCheckpoint::default(),
        };
        let held = checkpoint
            .entries_with(resource, device_ids)
            .cloned()
            .collect();
        let DeviceCheckpoint { entries, skipped } = checkpoint;
        let mut identity = merge_identity(held, skipped, container, api_pod, device_ids)?;
        identity.pod_device_ids = device_ids_of_pod(&identity.pod, resource, entries);
        Ok(identity)
    }

    /// Finds a container that PodResources lists with some of the device ids.
    ///
    /// Plain init containers are not listed, but later containers of their pod have the same device
    /// ids.
    async fn find_container(
        &self,
        resource: Resource,
        device_ids: &DeviceIdSet,
    ) -> Option<ContainerRef> {
        find_container(&self.list_containers(resource).await, device_ids).cloned()
    }

    /// The containers that PodResources lists with `resource`; empty on an error.
    pub(crate) async fn list_containers(&self, resource: Resource) -> Vec<ListedContainer> {
        let mut names = self.resource_names.iter();
        let Some((_, name)) = names.find(|(named, _)| *named == resource) else {
            return Vec::new();
        };
        let listed = self.pod_resources.list(resource, name).await;
        listed.unwrap_or_else(|error| {
            debug!(%error, "failed to list the pods' resources");
            Vec::new()
        })
    }

    /// Reads the pod as the response to a dry-run patch that changes nothing. None without a client
    /// and after a timeout.
    ///
    /// Unlike a `get`, an admission policy can restrict the patch to pods of this node.
    async fn read_api_pod(&self, namespace: &str, name: &str) -> Option<kube::Result<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone()?, namespace);
        let dry = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let nothing = Patch::Merge(json!({}));
        let read = pods.patch_status(name, &dry, &nothing);
        tokio::time::timeout(API_TIMEOUT, read).await.ok()
    }

    async fn read_pod(&self, container: &ContainerRef) -> Option<ApiPod> {
        match self
            .read_api_pod(&container.namespace, &container.pod)
            .await?
        {
            Ok(pod) => parse_api_pod(&pod),
            Err(error) => {
                debug!(%error, pod = container.pod, "failed to read the pod's priority");
                None
            }
        }
    }

    /// Whether the API server has a deletion of the pod, or the pod no more. False while the API
    /// server does not answer.
    pub(crate) async fn is_deleted(&self, pod: &PodRef) -> bool {
        match self.read_api_pod(&pod.namespace, &pod.name).await {
            Some(Ok(read)) => {
                let is_another = parse_api_pod(&read).is_some_and(|read| read.uid != pod.uid);
                is_another || read.metadata.deletion_timestamp.is_some()
            }
            Some(Err(kube::Error::Api(refused))) => refused.code == 404,
            Some(Err(_)) | None => false,
        }
    }
}

/// The device ids of all containers of a pod. The kubelet allocates for all of them before any
/// starts.
fn device_ids_of_pod(
    pod: &PodUid,
    resource: Resource,
    all: Vec<CheckpointEntry>,
) -> Vec<DeviceIdSet> {
    let of_pod = |held: &CheckpointEntry| held.pod == *pod && held.resource == resource;
    all.into_iter()
        .filter(of_pod)
        .map(|held| held.device_ids)
        .collect()
}

/// Merges the answers of the kubelet and the API server.
fn merge_identity(
    held: Vec<CheckpointEntry>,
    skipped: usize,
    container: Option<ContainerRef>,
    api_pod: Option<ApiPod>,
    device_ids: &DeviceIdSet,
) -> Result<ContainerIdentity, ResolveError> {
    let pod = match (held.first(), &api_pod) {
        (Some(first), _) if held.iter().any(|other| other.pod != first.pod) => {
            return Err(ResolveError::Ambiguous(device_ids.clone()));
        }
        (Some(first), _) => first.pod.clone(),
        (None, Some(api_pod)) => api_pod.uid.clone(),
        (None, None) => {
            let device_ids = device_ids.clone();
            return Err(ResolveError::NotInCheckpoint {
                device_ids,
                skipped,
            });
        }
    };
    // A later pod of the same name has another UID: its name and data belong to another pod.
    let is_another = api_pod.as_ref().is_some_and(|api_pod| api_pod.uid != pod);
    let (api_pod, container) = match is_another {
        true => (None, None),
        false => (api_pod, container),
    };
    let ContainerRef {
        namespace,
        pod: name,
        container,
    } = container.unwrap_or_else(|| ContainerRef {
        namespace: String::new(),
        pod: String::new(),
        container: String::new(),
    });
    Ok(ContainerIdentity {
        pod,
        pod_name: (!name.is_empty()).then_some(PodName { namespace, name }),
        container,
        checkpoint_entries: held,
        pod_device_ids: Vec::new(),
        gpu_spread: api_pod
            .as_ref()
            .map(|api_pod| api_pod.gpu_spread)
            .unwrap_or_default(),
        priority: api_pod
            .as_ref()
            .map(|api_pod| api_pod.priority)
            .unwrap_or_default(),
    })
}

fn parse_api_pod(pod: &Pod) -> Option<ApiPod> {
    let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key);
    let uid = annotation(STATIC_POD_ANNOTATION).or(pod.metadata.uid.as_ref())?;
    let gpus = annotation(GPUS_ANNOTATION).and_then(|gpus| gpus.parse::<NonZeroU16>().ok());
    Some(ApiPod {
        uid: uid.parse().ok()?,
        priority: Priority(
            pod.spec
                .as_ref()
                .and_then(|spec| spec.priority)
                .unwrap_or_default(),
        ),
        gpu_spread: gpus.map(|gpus| GpuSpread { gpus }).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::AllocationId;
    use k8s_openapi::api::core::v1::PodSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn ids() -> DeviceIdSet {
        DeviceIdSet::from_indexes([1, 2]).unwrap()
    }

    fn held(pod: &str, container: &str) -> CheckpointEntry {
        CheckpointEntry {
            pod: pod.parse().unwrap(),
            container: container.into(),
            resource: Resource::DeviceMemory,
            device_ids: ids(),
            allocation: AllocationId::from_bits(7),
        }
    }

    fn name() -> ContainerRef {
        ContainerRef {
            namespace: "team".into(),
            pod: "train-0".into(),
            container: "main".into(),
        }
    }

    fn pod(uid: &str, annotations: &[(&str, &str)]) -> Pod {
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Pod {
            metadata: ObjectMeta {
                uid: Some(uid.into()),
                annotations: Some(annotations.collect()),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                priority: Some(100),
                ..PodSpec::default()
            }),
            status: None,
        }
    }

    #[test]
    fn checkpoint_names_the_pod_and_api_server_its_priority() {
        let api_pod = parse_api_pod(&pod("uid-1", &[(GPUS_ANNOTATION, "2")]));
        let found = merge_identity(
            vec![held("uid-1", "main")],
            0,
            Some(name()),
            api_pod,
            &ids(),
        )
        .unwrap();
        assert_eq!(
            (found.pod.as_str(), found.priority),
            ("uid-1", Priority(100))
        );
        assert_eq!(found.gpu_spread.gpus.get(), 2);
        assert_eq!(found.pod_name.unwrap().to_string(), "team/train-0");
    }

    #[tokio::test]
    async fn pod_is_read_by_a_dry_run_patch() {
        use axum::body::{Body, to_bytes};
        use axum::http::{Request, Response};

        let server = tower::service_fn(|request: Request<kube::client::Body>| async move {
            let asked = format!("{} {}", request.method(), request.uri());
            let body = to_bytes(Body::new(request.into_body()), 64).await?;
            assert_eq!(
                (asked.as_str(), &body[..]),
                (
                    "PATCH /api/v1/namespaces/team/pods/train-0/status?&dryRun=All",
                    b"{}".as_slice()
                )
            );
            let pod = serde_json::to_vec(&pod("uid-1", &[])).unwrap();
            Ok::<_, axum::Error>(Response::new(Body::from(pod)))
        });
        let identities = PodResolver {
            device_plugin_dir: PathBuf::new(),
            resource_names: Vec::new(),
            pod_resources: PodResourcesClient::new(std::path::Path::new("/nobody/listens/here")),
            client: Some(Client::new(server, "default")),
            checkpoint_read: SharedRead::default(),
        };
        let api_pod = identities.read_pod(&name()).await.unwrap();
        assert_eq!(
            (api_pod.uid.as_str(), api_pod.priority),
            ("uid-1", Priority(100))
        );
    }

    /// A resolver whose API server answers each request with `status` and `body`.
    fn resolver(status: u16, body: &serde_json::Value) -> PodResolver {
        use axum::body::Body;
        use axum::http::{Request, Response};

        let body = body.to_string();
        let server = tower::service_fn(move |_: Request<kube::client::Body>| {
            let body = Body::from(body.clone());
            let response = Response::builder().status(status).body(body);
            std::future::ready(response)
        });
        PodResolver {
            device_plugin_dir: PathBuf::new(),
            resource_names: Vec::new(),
            pod_resources: PodResourcesClient::new(std::path::Path::new("/nobody/listens/here")),
            client: Some(Client::new(server, "default")),
            checkpoint_read: SharedRead::default(),
        }
    }

    #[tokio::test]
    async fn checkpoint_on_a_disk_that_hangs_is_unreadable() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(device_checkpoint::FILE_NAME);
        // The open of a pipe without a writer hangs.
        rustix::fs::mkfifoat(rustix::fs::CWD, &file, 0o600.into()).unwrap();
        let identities = PodResolver {
            device_plugin_dir: dir.path().to_owned(),
            ..resolver(200, &json!({}))
        };
        let read = identities.read_device_checkpoint();
        let read = tokio::time::timeout(Duration::from_secs(30), read).await;
        // A writer that closes the pipe again ends the read's thread.
        drop(std::fs::File::options().read(true).write(true).open(&file));
        let error = read.unwrap().unwrap_err();
        assert!(
            matches!(error, DeviceCheckpointError::Unreadable { .. }),
            "{error:?}"
        );
    }

    #[tokio::test]
    async fn pod_is_deleted_with_a_timestamp_or_when_absent() {
        let pod = |uid: &str, deleted: bool| {
            let mut pod = json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": "train-0", "namespace": "team", "uid": uid } });
            if deleted {
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            pod
        };
        let refused = |code: u16, reason: &str| {
            json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "", "reason": reason, "code": code })
        };
        let cases = [
            (200, pod("uid-1", false), false),
            (200, pod("uid-1", true), true),
            (200, pod("uid-2", false), true),
            (404, refused(404, "NotFound"), true),
            (403, refused(403, "Forbidden"), false),
            (500, refused(500, "InternalError"), false),
        ];
        for (status, body, deleted) in cases {
            let pod = PodRef {
                namespace: "team".into(),
                name: "train-0".into(),
                uid: "uid-1".parse().unwrap(),
            };
            let found = resolver(status, &body).is_deleted(&pod).await;
            assert_eq!(found, deleted, "{status} {body}");
        }
    }

    #[test]
    fn device_ids_of_all_containers_of_the_pod_are_returned() {
        let entry = |pod: &str, device_ids: [u16; 2]| CheckpointEntry {
            device_ids: DeviceIdSet::from_indexes(device_ids).unwrap(),
            ..held(pod, "main")
        };
        let managed = CheckpointEntry {
            resource: Resource::ManagedMemory,
            ..entry("uid-1", [7, 8])
        };
        let all = vec![
            entry("uid-1", [1, 2]),
            entry("uid-2", [3, 4]),
            entry("uid-1", [5, 6]),
            managed,
        ];
        let pod = "uid-1".parse().unwrap();
        let containers = device_ids_of_pod(&pod, Resource::DeviceMemory, all);
        let indexes: Vec<Vec<u16>> = containers
            .iter()
            .map(|set| set.indexes().collect())
            .collect();
        assert_eq!(indexes, [[1, 2], [5, 6]]);
    }

    #[test]
    fn pod_of_the_same_name_with_another_uid_is_ignored() {
        let api_pod = parse_api_pod(&pod("uid-2", &[]));
        let found = merge_identity(
            vec![held("uid-1", "main")],
            0,
            Some(name()),
            api_pod,
            &ids(),
        )
        .unwrap();
        assert_eq!((found.pod.as_str(), found.priority), ("uid-1", Priority(0)));
        assert_eq!(found.pod_name, None, "what is kept hangs on its namespace");
    }

    #[test]
    fn static_pod_has_the_uid_of_its_mirror_annotation() {
        let api_pod =
            parse_api_pod(&pod("mirror", &[(STATIC_POD_ANNOTATION, "0123abcd")])).unwrap();
        assert_eq!(api_pod.uid.as_str(), "0123abcd");
    }

    #[test]
    fn malformed_gpus_annotation_means_one_gpu() {
        for bad in ["0", "-1", "two", ""] {
            assert_eq!(
                parse_api_pod(&pod("uid-1", &[(GPUS_ANNOTATION, bad)]))
                    .unwrap()
                    .gpu_spread,
                GpuSpread::default()
            );
        }
    }

    #[test]
    fn api_server_names_the_pod_without_a_device_checkpoint() {
        let api_pod = parse_api_pod(&pod("uid-1", &[]));
        let found = merge_identity(Vec::new(), 0, Some(name()), api_pod, &ids()).unwrap();
        assert_eq!(
            (found.pod.as_str(), found.container.as_str()),
            ("uid-1", "main")
        );
    }

    #[test]
    fn two_pods_with_the_same_device_ids_are_ambiguous() {
        let found = merge_identity(
            vec![held("uid-1", "a"), held("uid-2", "a")],
            0,
            None,
            None,
            &ids(),
        );
        assert!(matches!(found, Err(ResolveError::Ambiguous(_))));
        let error = merge_identity(Vec::new(), 3, None, None, &ids()).unwrap_err();
        assert!(error.to_string().contains("3 of its entries"), "{error}");
    }
}
