//! Resolves device ids to the container that the kubelet starts: PreStartContainer names ids only.
//!
//! The kubelet's device checkpoint maps device ids to a pod's UID and a container. The operator
//! adds the pod's name, priority and GPU spread; without it PodResources has the name. Only the UID
//! is necessary. The other data serve order and messages, so reading them is bounded in time and
//! may fail.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bursar_apiserver::PodSettingsReader;
use bursar_crds::gpu_node::PodSettings;
use bursar_crds::resources::{GPU_COMPUTE, WHOLE_GPU};
use bursar_kubelet::device_checkpoint::{
    self, CheckpointEntry, DeviceCheckpoint, DeviceCheckpointError,
};
use bursar_kubelet::plugin::PrepareError;
use bursar_kubelet::pod_resources::{
    ContainerRef, ListedContainer, PodResourcesClient, find_container,
};
use bursar_ledger::units::{DeviceIdSet, PodUid, Resource};
use bursar_ledger::{BindRequest, GpuSpread, Priority};
use tracing::debug;

use super::allocator::PrepareRequest;
use super::checkpoint_state::PodName;
use super::shared_read::SharedRead;

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
    /// A container asks for compute time without device memory, which would say on which GPU.
    #[error(
        "failed to start container {0}: it asks for {GPU_COMPUTE} without GPU memory; \
         ask for memory of the GPU in the same container"
    )]
    ComputeWithoutMemory(String),
    /// The containers of a pod ask for more compute time together than one GPU has.
    #[error(
        "failed to start container {container}: its pod asks for {weight} hundredths of a GPU's \
         compute time; ask for {WHOLE_GPU} of {GPU_COMPUTE} at most in all containers together"
    )]
    TooMuchCompute {
        /// The container.
        container: String,
        /// The sum.
        weight: u16,
    },
    /// The checkpoint is unreadable. Nothing else says which pod has the device ids.
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

/// Resolves containers by the kubelet and the operator.
#[derive(Clone)]
pub struct PodResolver {
    /// The kubelet's plugin directory with its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// The resources under their registered names.
    pub resource_names: Vec<(Resource, String)>,
    /// The client of the kubelet's PodResources service.
    pub pod_resources: PodResourcesClient,
    /// The operator's settings of pods.
    pub settings: PodSettingsReader,
    /// The read of the kubelet's checkpoint that has not ended, if any.
    pub checkpoint_read: SharedRead<Result<DeviceCheckpoint, DeviceCheckpointError>>,
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

    /// Resolves the container that has these device ids. Waits for its pod's settings until `limit`
    /// has passed since the call.
    pub async fn resolve(
        &self,
        resource: Resource,
        device_ids: &DeviceIdSet,
        limit: Duration,
    ) -> Result<PrepareRequest, ResolveError> {
        let started = Instant::now();
        let listed = async {
            match self.settings.has_api_server() {
                true => None,
                false => self.find_name(resource, device_ids).await,
            }
        };
        let (checkpoint, listed) = tokio::join!(self.read_device_checkpoint(), listed);
        let checkpoint = checkpoint.map_err(|source| ResolveError::Unreadable {
            device_ids: device_ids.clone(),
            source,
        })?;
        let held: Vec<_> = checkpoint
            .entries_with(resource, device_ids)
            .cloned()
            .collect();
        let DeviceCheckpoint { entries, skipped } = checkpoint;
        let CheckpointEntry { pod, container, .. } = entry_of_one_pod(&held, skipped, device_ids)?;
        let weight = weight_of(&pod, &container, resource, &entries)?;
        let limit = limit.saturating_sub(started.elapsed());
        let settings = self.settings.read(&pod, limit).await;
        let pod_name = match settings.as_ref().and_then(name_of).or(listed) {
            // Asked last, because the kubelet limits these calls to 100 a second.
            None => self.find_name(resource, device_ids).await,
            name => name,
        };
        let is_assumed = settings.is_none();
        let settings = settings.unwrap_or_default();
        Ok(PrepareRequest {
            bind: BindRequest {
                resource,
                device_ids: device_ids.clone(),
                containers: device_ids_of_pod(&pod, resource, entries),
                pod,
                spread: GpuSpread {
                    gpus: settings.min_gpus(),
                },
                priority: Priority(settings.priority),
            },
            pod_name,
            container,
            weight,
            checkpoint_entries: held,
            is_assumed,
        })
    }

    /// Finds the pod that PodResources lists with some of the device ids.
    ///
    /// Plain init containers are not listed, but later containers of their pod have the same device
    /// ids.
    async fn find_name(&self, resource: Resource, device_ids: &DeviceIdSet) -> Option<PodName> {
        let listed = self.list_containers(resource).await;
        let ContainerRef { namespace, pod, .. } = find_container(&listed, device_ids)?;
        Some(PodName {
            namespace: namespace.clone(),
            name: pod.clone(),
        })
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
}

/// The pod's weight in compute time, for the start of one of its containers.
fn weight_of(
    pod: &PodUid,
    container: &str,
    resource: Resource,
    all: &[CheckpointEntry],
) -> Result<u16, ResolveError> {
    let container = container.to_owned();
    let has_memory = all.iter().any(|held| {
        let is_memory = held.resource == Resource::DeviceMemory;
        is_memory && held.pod == *pod && held.container == container
    });
    match DeviceCheckpoint::weight_of(all, pod) {
        _ if resource == Resource::Compute && !has_memory => {
            Err(ResolveError::ComputeWithoutMemory(container))
        }
        weight if weight > WHOLE_GPU => Err(ResolveError::TooMuchCompute { container, weight }),
        weight => Ok(weight),
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

/// An entry of the one pod that has the kubelet's entries `held`.
fn entry_of_one_pod(
    held: &[CheckpointEntry],
    skipped: usize,
    device_ids: &DeviceIdSet,
) -> Result<CheckpointEntry, ResolveError> {
    match held.first() {
        Some(first) if held.iter().any(|other| other.pod != first.pod) => {
            Err(ResolveError::Ambiguous(device_ids.clone()))
        }
        Some(first) => Ok(first.clone()),
        None => Err(ResolveError::NotInCheckpoint {
            device_ids: device_ids.clone(),
            skipped,
        }),
    }
}

fn name_of(settings: &PodSettings) -> Option<PodName> {
    let (namespace, name) = (settings.namespace.clone(), settings.name.clone());
    (!name.is_empty()).then_some(PodName { namespace, name })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use bursar_apiserver::ParsedSpec;
    use bursar_crds::Quantum;
    use bursar_ledger::units::AllocationId;

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

    /// The settings of a pod with this UID, called `team/train-0` as each other one.
    fn settings(uid: &str) -> PodSettings {
        let annotations = [("bursar.dev/gpus".to_owned(), "2".to_owned())];
        PodSettings {
            namespace: "team".to_owned(),
            name: "train-0".to_owned(),
            ..PodSettings::new(uid.to_owned(), 100, &annotations.into())
        }
    }

    /// A resolver that reads `dir`, over an operator that has written these settings.
    fn resolver(dir: &Path, settings: &[PodSettings]) -> PodResolver {
        let by_uid = settings
            .iter()
            .map(|pod| (pod.pod_uid.clone(), pod.clone()));
        let (_, spec) = tokio::sync::watch::channel(Some(ParsedSpec {
            generation: Some(1),
            pods: std::sync::Arc::new(by_uid.collect()),
            ..ParsedSpec::default()
        }));
        let resource = Resource::DeviceMemory;
        PodResolver {
            device_plugin_dir: dir.to_owned(),
            resource_names: vec![(resource, resource.name(Quantum::Gib1).to_owned())],
            pod_resources: PodResourcesClient::new(Path::new("/nobody/listens/here")),
            settings: PodSettingsReader::new(Some(spec)),
            checkpoint_read: SharedRead::default(),
        }
    }

    /// The content of a kubelet's checkpoint with [`ids`] for container `main` of `uid-1`.
    const CHECKPOINT: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"main",
        "ResourceName":"bursar.dev/gpu-memory-gib","DeviceIDs":{"-1":["m-0001","m-0002"]},
        "AllocResp":"KiEKH2J1cnNhci5kZXYvZ3B1PTAwMDAwMDAwMDAwMDAwMDc="}]}}"#;

    fn kubelet(checkpoint: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(device_checkpoint::FILE_NAME), checkpoint).unwrap();
        dir
    }

    async fn resolved(settings: &[PodSettings]) -> PrepareRequest {
        let dir = kubelet(CHECKPOINT);
        let ids = ids();
        let resolver = resolver(dir.path(), settings);
        let resolved = resolver.resolve(Resource::DeviceMemory, &ids, Duration::ZERO);
        resolved.await.unwrap()
    }

    #[tokio::test]
    async fn checkpoint_names_the_pod_and_operator_the_rest() {
        let found = resolved(&[settings("uid-1"), settings("uid-2")]).await;
        assert_eq!(
            (found.bind.pod.as_str(), found.container.as_str()),
            ("uid-1", "main")
        );
        assert_eq!(
            (found.bind.priority, found.bind.spread.gpus.get()),
            (Priority(100), 2)
        );
        assert_eq!(found.pod_name.unwrap().to_string(), "team/train-0");
        assert!(!found.is_assumed);
    }

    #[tokio::test]
    async fn pod_of_the_same_name_gives_no_settings() {
        let found = resolved(&[settings("uid-2")]).await;
        assert_eq!((found.bind.priority, found.bind.spread), Default::default());
        assert_eq!((found.pod_name, found.is_assumed), (None, true));
    }

    #[tokio::test]
    async fn unreadable_checkpoint_is_replaced_by_no_other_answer() {
        let dir = kubelet("{");
        let (resolver, ids) = (resolver(dir.path(), &[settings("uid-1")]), ids());
        let resolved = resolver.resolve(Resource::DeviceMemory, &ids, Duration::ZERO);
        let error = resolved.await.unwrap_err();
        assert!(
            matches!(error, ResolveError::Unreadable { .. }),
            "{error:?}"
        );
    }

    #[tokio::test]
    async fn checkpoint_on_a_disk_that_hangs_is_unreadable() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(device_checkpoint::FILE_NAME);
        // The open of a pipe without a writer hangs.
        rustix::fs::mkfifoat(rustix::fs::CWD, &file, 0o600.into()).unwrap();
        let identities = resolver(dir.path(), &[]);
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

    #[test]
    fn weight_is_that_of_all_containers_of_the_pod() {
        let entry = |container: &str, resource, device_ids: std::ops::Range<u16>| CheckpointEntry {
            resource,
            device_ids: DeviceIdSet::from_indexes(device_ids).unwrap(),
            ..held("uid-1", container)
        };
        let mut all = vec![
            entry("init", Resource::Compute, 0..25),
            entry("main", Resource::Compute, 0..25),
            entry("main", Resource::DeviceMemory, 0..4),
            entry("side", Resource::Compute, 25..60),
        ];
        let pod = "uid-1".parse().unwrap();
        let weight = |container, resource, all: &[CheckpointEntry]| {
            let weight = weight_of(&pod, container, resource, all);
            weight.map_err(|error| error.to_string())
        };
        for resource in [Resource::Compute, Resource::DeviceMemory] {
            assert_eq!(weight("main", resource, &all), Ok(60));
        }
        let refused = weight("side", Resource::Compute, &all).unwrap_err();
        assert!(refused.contains("without GPU memory"), "{refused}");
        all.push(entry("more", Resource::Compute, 60..101));
        let refused = weight("main", Resource::DeviceMemory, &all).unwrap_err();
        assert!(refused.contains("asks for 101 hundredths"), "{refused}");
        assert_eq!(
            weight_of(
                &"uid-2".parse().unwrap(),
                "main",
                Resource::DeviceMemory,
                &all
            )
            .unwrap(),
            0
        );
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
    fn two_pods_with_the_same_device_ids_are_ambiguous() {
        let of_two = vec![held("uid-1", "a"), held("uid-2", "a")];
        let found = entry_of_one_pod(&of_two, 0, &ids());
        assert!(matches!(found, Err(ResolveError::Ambiguous(_))));
        let error = entry_of_one_pod(&Vec::new(), 3, &ids()).unwrap_err();
        assert!(error.to_string().contains("3 of its entries"), "{error}");
    }
}
