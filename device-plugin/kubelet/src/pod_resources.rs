//! Reads from the kubelet which pods have which device ids, and which devices plugins offer.
//!
//! The pods' names serve messages, priorities and metrics. This API reports neither pod UIDs nor
//! plain init containers, so identity comes from [`device_checkpoint`](super::device_checkpoint).
//! Allocate must never list pods: the call makes the kubelet forget those that are not active yet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_ledger::units::{DeviceIdSet, Resource};
use tonic::transport::Channel;

use super::api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use super::api::podresources::{
    AllocatableResourcesRequest, ContainerDevices, ListPodResourcesRequest, PodResources,
};
use super::connect::connect_when_called;
use super::error_text::status_chain;

/// The timeout of a call, retries included.
pub const LIMIT: Duration = Duration::from_secs(2);
/// The attempts while the kubelet's rate limit refuses: it allows bursts of ten calls and 100 per
/// second.
const MAX_TRIES: usize = 10;
const RATE_LIMIT_PAUSE: Duration = Duration::from_millis(100);
/// The largest response to read. The kubelet's own limit for this API is 16 MiB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The reason why the kubelet did not list the pods.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// No server answers at the socket.
    #[error("failed to call the kubelet's pod-resources API at {path}: {}", status_chain(.status))]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The transport error.
        status: Box<tonic::Status>,
    },
    /// The kubelet answered with an error.
    #[error("failed to call the kubelet's pod-resources API: {}", .0.message())]
    Refused(Box<tonic::Status>),
    /// The kubelet did not answer within [`LIMIT`].
    #[error("failed to call the kubelet's pod-resources API: no answer within {LIMIT:?}")]
    TimedOut,
}

/// The names of a container and its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRef {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
}

/// A container and its device ids of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedContainer {
    /// The names of the container.
    pub name: ContainerRef,
    /// The device ids.
    pub device_ids: DeviceIdSet,
}

/// A client of the kubelet's PodResources API that reconnects after a kubelet restart.
#[derive(Debug, Clone)]
pub struct PodResourcesClient {
    socket: PathBuf,
    api: PodResourcesListerClient<Channel>,
}

impl PodResourcesClient {
    /// A client of the socket, which connects with the first call. The caller has to be inside a
    /// runtime.
    pub fn new(socket: &Path) -> Self {
        let channel = connect_when_called(socket, LIMIT);
        let api =
            PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Self {
            socket: socket.to_owned(),
            api,
        }
    }

    /// The containers of all active pods with device ids of `resource`, registered as `name`.
    ///
    /// # Errors
    /// [`PodResourcesError`], within [`LIMIT`].
    pub async fn list(
        &self,
        resource: Resource,
        name: &str,
    ) -> Result<Vec<ListedContainer>, PodResourcesError> {
        let pods = self
            .call(|mut api| async move {
                let answer = api.list(ListPodResourcesRequest {}).await?;
                Ok(answer.into_inner().pod_resources)
            })
            .await?;
        Ok(listed_containers(resource, name, &pods))
    }

    /// The number of healthy devices of each resource of the node, of all plugins.
    ///
    /// # Errors
    /// [`PodResourcesError`], within [`LIMIT`].
    pub async fn offered_devices(&self) -> Result<BTreeMap<String, usize>, PodResourcesError> {
        let devices = self
            .call(|mut api| async move {
                let request = AllocatableResourcesRequest {};
                let answer = api.get_allocatable_resources(request).await?;
                Ok(answer.into_inner().devices)
            })
            .await?;
        Ok(device_counts(devices))
    }

    /// Calls the kubelet. Retries once after a lost connection, and while the rate limit refuses.
    async fn call<T, F>(
        &self,
        request: impl Fn(PodResourcesListerClient<Channel>) -> F,
    ) -> Result<T, PodResourcesError>
    where
        F: Future<Output = Result<T, tonic::Status>>,
    {
        let attempts = async {
            let mut tries = 0;
            loop {
                tries += 1;
                match request(self.api.clone()).await {
                    Err(error) if tries == 1 && is_transport_error(&error) => {}
                    Err(error) if tries < MAX_TRIES && is_rate_limited(&error) => {
                        tokio::time::sleep(RATE_LIMIT_PAUSE).await;
                    }
                    answer => break answer,
                }
            }
        };
        let answer = tokio::time::timeout(LIMIT, attempts).await;
        answer
            .map_err(|_| PodResourcesError::TimedOut)?
            .map_err(|status| match is_transport_error(&status) {
                true => PodResourcesError::Unreachable {
                    path: self.socket.clone(),
                    status: Box::new(status),
                },
                false => PodResourcesError::Refused(Box::new(status)),
            })
    }
}

/// Whether the transport failed, and not the kubelet.
///
/// A connection that is cut during a call yields `Unknown` or `Cancelled` with a source.
fn is_transport_error(status: &tonic::Status) -> bool {
    status.code() == tonic::Code::Unavailable || std::error::Error::source(status).is_some()
}

/// Whether the kubelet's rate limit refused (its `pkg/kubelet/apis/grpc/ratelimit.go`).
fn is_rate_limited(status: &tonic::Status) -> bool {
    status.code() == tonic::Code::ResourceExhausted
}

/// Counts the device ids of each resource, which may be listed several times.
fn device_counts(listed: Vec<ContainerDevices>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for devices in listed {
        *counts.entry(devices.resource_name).or_default() += devices.device_ids.len();
    }
    counts
}

/// The containers of `pods` with device ids of `resource`; containers with malformed ids are left
/// out.
pub(crate) fn listed_containers(
    resource: Resource,
    name: &str,
    pods: &[PodResources],
) -> Vec<ListedContainer> {
    let containers = pods
        .iter()
        .flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)));
    let holder =
        |(pod, container): (&PodResources, &super::api::podresources::ContainerResources)| {
            let devices = container.devices.iter().filter(|d| d.resource_name == name);
            let ids = devices.flat_map(|d| &d.device_ids);
            Some(ListedContainer {
                name: ContainerRef {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                },
                device_ids: DeviceIdSet::from_ids(resource, ids).ok()?,
            })
        };
    containers.filter_map(holder).collect()
}

/// Finds a container with any of the device ids. Containers of a pod may share ids in turn: an
/// equal set precedes an overlapping one.
pub fn find_container<'a>(
    holders: &'a [ListedContainer],
    device_ids: &DeviceIdSet,
) -> Option<&'a ContainerRef> {
    let same = holders
        .iter()
        .find(|holder| holder.device_ids == *device_ids);
    let any = || {
        holders
            .iter()
            .find(|holder| holder.device_ids.overlaps(device_ids))
    };
    same.or_else(any).map(|holder| &holder.name)
}

#[cfg(test)]
mod tests {
    use super::super::api::podresources::{ContainerDevices, ContainerResources};
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const NAME: &str = "bursar.dev/gpu-memory-gib";

    /// The device ids of one resource, as the kubelet lists them.
    type Listed<'a> = (&'a str, &'a [&'a str]);

    fn pod(name: &str, containers: &[(&str, &[Listed<'_>])]) -> PodResources {
        let device = |(resource, ids): &Listed<'_>| ContainerDevices {
            resource_name: (*resource).to_owned(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        let container = |(name, devices): &(&str, &[Listed<'_>])| ContainerResources {
            name: (*name).to_owned(),
            devices: devices.iter().map(device).collect(),
        };
        PodResources {
            name: name.to_owned(),
            namespace: "team".to_owned(),
            containers: containers.iter().map(container).collect(),
        }
    }

    fn device_ids(indexes: &[u16]) -> DeviceIdSet {
        DeviceIdSet::from_indexes(indexes.iter().copied()).unwrap()
    }

    #[tokio::test]
    async fn rate_limited_call_is_retried_and_refused_call_is_not() {
        let client = PodResourcesClient::new(Path::new("/nobody/listens/here"));
        let tries = |code: tonic::Code, fails: usize| {
            let (client, calls) = (client.clone(), AtomicUsize::new(0));
            async move {
                let answer = client.call(|_| async {
                    match calls.fetch_add(1, Ordering::Relaxed) < fails {
                        true => Err(tonic::Status::new(code, "rejected by rate limit")),
                        false => Ok(()),
                    }
                });
                let answer = answer.await;
                (answer.is_ok(), calls.load(Ordering::Relaxed))
            }
        };
        let limited = tonic::Code::ResourceExhausted;
        assert_eq!(tries(limited, 2).await, (true, 3));
        assert_eq!(tries(limited, usize::MAX).await, (false, 10));
        assert_eq!(tries(tonic::Code::Internal, 2).await, (false, 1));
        assert_eq!(tries(tonic::Code::Unavailable, 1).await, (true, 2));
        assert_eq!(tries(tonic::Code::Unavailable, 2).await, (false, 2));
    }

    #[test]
    fn devices_of_several_entries_are_one_set() {
        let pods = [pod(
            "a",
            &[("main", &[(NAME, &["m-0002"]), (NAME, &["m-0001"])])],
        )];
        let holders = listed_containers(Resource::DeviceMemory, NAME, &pods);
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0].device_ids, device_ids(&[1, 2]));
    }

    #[test]
    fn other_resources_and_foreign_device_ids_are_ignored() {
        let pods = [pod(
            "a",
            &[
                ("other", &[("nvidia.com/gpu", &["m-0001"])]),
                ("strange", &[(NAME, &["GPU-1"])]),
                ("none", &[]),
            ],
        )];
        assert_eq!(listed_containers(Resource::DeviceMemory, NAME, &pods), []);
    }

    #[test]
    fn container_is_found_by_any_shared_device_id_best_by_all() {
        let pods = [
            pod("a", &[("first", &[(NAME, &["m-0001", "m-0002"])])]),
            pod("a", &[("second", &[(NAME, &["m-0001"])])]),
        ];
        let holders = listed_containers(Resource::DeviceMemory, NAME, &pods);
        let container =
            |set: &[u16]| find_container(&holders, &device_ids(set)).map(|n| &*n.container);
        assert_eq!(container(&[1]), Some("second"));
        assert_eq!(container(&[2, 3]), Some("first"));
        assert_eq!(container(&[4]), None);
    }
}
