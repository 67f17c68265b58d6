//! Answers the kubelet's calls for one resource.
//!
//! An [`Allocator`] makes the decisions. This module parses device ids, puts the allocation id into
//! the response, and bounds times and messages.

mod allocator;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bursar_ledger::units::{AllocationId, DeviceIdSet, Resource, UnitError};
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use super::api::deviceplugin as api;
use super::devices::Devices;
use super::in_flight::InFlight;

pub use allocator::{AllocateError, Allocator, PrepareError};

/// The CDI kind: an Allocate response for device memory names `<kind>=<allocation>`.
pub const CDI_KIND: &str = "bursar.dev/gpu";

/// The annotation of an Allocate response for managed memory, with the allocation id as its value.
pub(crate) const MANAGED_ANNOTATION: &str = "bursar.dev/managed-allocation";

/// The annotation of an Allocate response for compute time.
const COMPUTE_ANNOTATION: &str = "bursar.dev/compute-allocation";

/// The gRPC metadata of an Allocate call from the plugin relay. It has the allocation ids that the
/// relay has already given to the kubelet, one for each container.
pub const ALLOCATION_ID_METADATA: &str = "bursar-allocation-id";

/// The timeout of a PreStartContainer call. The kubelet gives up after 30 s
/// (`KubeletPreStartContainerRPCTimeoutInSecs`) and would discard a later answer with its reason.
pub const PREPARE_TIMEOUT: Duration = Duration::from_secs(28);
/// The part of a PreStartContainer call's time that is left for its answer.
pub const ANSWER_TIME: Duration = Duration::from_secs(1);
/// The timeout of an Allocate call. The kubelet itself waits without a limit.
pub(crate) const ALLOCATE_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest message in a pod's status, in characters.
const MAX_MESSAGE_CHARS: usize = 512;

/// The DevicePlugin service of one resource.
#[derive(Debug)]
pub struct Plugin<A> {
    resource: Resource,
    /// The allocator, which decides.
    allocator: Arc<A>,
    /// The devices that ListAndWatch sends.
    devices: watch::Receiver<Devices>,
    /// The open ListAndWatch streams, for the lifecycle.
    streams: InFlight,
    /// The Allocate calls in flight: the end of a stream would cut them and fail their pods for
    /// ever.
    allocate_calls: InFlight,
    end_streams: CancellationToken,
}

impl<A: Allocator> Plugin<A> {
    /// A plugin that counts its streams and calls, and whose streams end with `end_streams`.
    pub(super) fn new(
        resource: Resource,
        allocator: Arc<A>,
        devices: watch::Receiver<Devices>,
        streams: InFlight,
        allocate_calls: InFlight,
        end_streams: CancellationToken,
    ) -> Self {
        Self {
            resource,
            allocator,
            devices,
            streams,
            allocate_calls,
            end_streams,
        }
    }

    fn parse_device_ids(&self, ids: &[String]) -> Result<DeviceIdSet, Status> {
        DeviceIdSet::from_ids(self.resource, ids).map_err(|error: UnitError| {
            Status::invalid_argument(truncated(&format!(
                "failed to parse the device ids of {}: {error}",
                self.resource
            )))
        })
    }

    async fn allocate_container(
        &self,
        ids: &[String],
        allocation: Option<AllocationId>,
    ) -> Result<api::ContainerAllocateResponse, Status> {
        let device_ids = self.parse_device_ids(ids)?;
        let allocating = self
            .allocator
            .allocate(self.resource, device_ids, allocation);
        let id = tokio::time::timeout(ALLOCATE_TIMEOUT, allocating)
            .await
            .map_err(|_| {
                Status::deadline_exceeded(format!(
                    "failed to allocate {}: the agent took longer than {ALLOCATE_TIMEOUT:?}; \
                     delete the pod: its controller makes another",
                    self.resource
                ))
            })?
            .map_err(|error| match error {
                AllocateError::Stopping => Status::unavailable(error.to_string()),
            })?;
        Ok(container_response(self.resource, id))
    }
}

/// The annotation with the allocation id; none for device memory, whose CDI device names it.
const fn annotation(resource: Resource) -> Option<&'static str> {
    match resource {
        Resource::DeviceMemory => None,
        Resource::ManagedMemory => Some(MANAGED_ANNOTATION),
        Resource::Compute => Some(COMPUTE_ANNOTATION),
    }
}

/// The response that the kubelet saves for a container and passes to the runtime.
pub(crate) fn container_response(
    resource: Resource,
    id: AllocationId,
) -> api::ContainerAllocateResponse {
    let mut answer = api::ContainerAllocateResponse::default();
    match annotation(resource) {
        None => {
            answer.cdi_devices.push(api::CdiDevice {
                name: format!("{}={id}", CDI_KIND),
            });
        }
        Some(annotation) => {
            let (annotation, id) = (annotation.to_owned(), id.to_string());
            answer.annotations.insert(annotation, id);
        }
    }
    answer
}

/// The allocation id in a response of [`container_response`].
pub(crate) fn allocation_id_of(
    resource: Resource,
    answer: &api::ContainerAllocateResponse,
) -> Option<AllocationId> {
    match annotation(resource) {
        None => answer.cdi_devices.iter().find_map(|device| {
            device
                .name
                .strip_prefix(CDI_KIND)?
                .strip_prefix('=')?
                .parse()
                .ok()
        }),
        Some(annotation) => answer.annotations.get(annotation)?.parse().ok(),
    }
}

type DeviceStream =
    Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send + 'static>>;

#[tonic::async_trait]
impl<A: Allocator> api::device_plugin_server::DevicePlugin for Plugin<A> {
    type ListAndWatchStream = DeviceStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(plugin_options()))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<DeviceStream>, Status> {
        let counted = self.streams.start();
        let ended = self.end_streams.clone().cancelled_owned();
        let updates = device_updates(self.devices.clone()).map(move |devices| {
            let _lives_as_long_as_the_stream = &counted;
            Ok(devices.to_message())
        });
        Ok(Response::new(updates.take_until(ended).boxed()))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented(
            "device ids are interchangeable: there is no preferred allocation",
        ))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let _counted = self.allocate_calls.start();
        let mut assigned_ids = parse_allocation_ids(request.metadata())?.into_iter();
        let containers = request.into_inner().container_requests;
        let mut container_responses = Vec::with_capacity(containers.len());
        for container in &containers {
            let allocated = self.allocate_container(&container.devices_ids, assigned_ids.next());
            container_responses.push(allocated.await?);
        }
        Ok(Response::new(api::AllocateResponse {
            container_responses,
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        let caller_limit = caller_timeout(request.metadata()).unwrap_or(PREPARE_TIMEOUT);
        let limit = caller_limit
            .min(PREPARE_TIMEOUT)
            .saturating_sub(ANSWER_TIME);
        let device_ids = self.parse_device_ids(&request.into_inner().devices_ids)?;
        match tokio::time::timeout(
            PREPARE_TIMEOUT,
            self.allocator.prepare(self.resource, device_ids, limit),
        )
        .await
        {
            Ok(Ok(())) => Ok(Response::new(api::PreStartContainerResponse {})),
            Ok(Err(error)) => Err(status_of(&error)),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "failed to bind {}: the agent took longer than {PREPARE_TIMEOUT:?}; \
                 the kubelet tries again",
                self.resource
            ))),
        }
    }
}

/// The allocation ids that the plugin relay has given to the kubelet.
pub(crate) fn parse_allocation_ids(metadata: &MetadataMap) -> Result<Vec<AllocationId>, Status> {
    let ids = metadata.get_all(ALLOCATION_ID_METADATA).into_iter();
    let parse = |id: &MetadataValue<Ascii>| id.to_str().ok()?.parse().ok();
    ids.map(|id| {
        parse(id).ok_or_else(|| {
            Status::invalid_argument(format!(
                "failed to parse {ALLOCATION_ID_METADATA}: it is no allocation id"
            ))
        })
    })
    .collect()
}

/// The caller's timeout of a call: at most eight digits and a unit (gRPC's `PROTOCOL-HTTP2.md`).
fn caller_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (count, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit = match unit {
        "H" => Duration::from_secs(3600),
        "M" => Duration::from_secs(60),
        "S" => Duration::from_secs(1),
        "m" => Duration::from_millis(1),
        "u" => Duration::from_micros(1),
        "n" => Duration::from_nanos(1),
        _ => return None,
    };
    unit.checked_mul(count.parse().ok()?)
}

/// The options of this plugin.
pub(super) fn plugin_options() -> api::DevicePluginOptions {
    api::DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: false,
    }
}

/// The devices now and after each change. The stream does not end with its sender.
fn device_updates(devices: watch::Receiver<Devices>) -> impl Stream<Item = Devices> + Send {
    let start = (devices, None::<Devices>);
    futures::stream::unfold(start, |(mut devices, mut last)| async move {
        loop {
            if last.is_some() && devices.changed().await.is_err() {
                futures::future::pending::<()>().await;
            }
            let update = devices.borrow_and_update().clone();
            if last.as_ref() != Some(&update) {
                last = Some(update.clone());
                return Some((update, (devices, last)));
            }
        }
    })
}

fn status_of(error: &PrepareError) -> Status {
    let message = truncated(&error.to_string());
    match error {
        PrepareError::NoRoom(_) => Status::resource_exhausted(message),
        PrepareError::NotAllocated { .. } => Status::not_found(message),
        PrepareError::Stopping => Status::unavailable(message),
        PrepareError::PodDeleted => Status::aborted(message),
        PrepareError::Drained(_) => Status::failed_precondition(message),
        PrepareError::Failed(_) => Status::internal(message),
        PrepareError::AgentAway(_) => Status::unavailable(message),
        PrepareError::Agent(status) => Status::new(status.code(), message),
    }
}

/// Truncates a message to the length that a pod's status may have.
fn truncated(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE_CHARS) {
        None => message.to_owned(),
        Some((end, _)) => format!("{}...", &message[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_id_is_read_back_from_the_response() {
        let id = AllocationId::from_bits(7);
        use Resource::{Compute, DeviceMemory, ManagedMemory};
        for resource in [DeviceMemory, ManagedMemory, Compute] {
            assert_eq!(
                allocation_id_of(resource, &container_response(resource, id)),
                Some(id)
            );
        }
    }

    #[test]
    fn device_memory_response_has_a_cdi_device_only() {
        let answer = container_response(Resource::DeviceMemory, AllocationId::from_bits(7));
        assert_eq!(
            answer.cdi_devices[0].name,
            "bursar.dev/gpu=0000000000000007"
        );
        assert!(answer.annotations.is_empty() && answer.envs.is_empty());
        assert!(answer.mounts.is_empty() && answer.devices.is_empty());
    }

    #[test]
    fn managed_memory_response_has_an_annotation_only() {
        let answer = container_response(Resource::ManagedMemory, AllocationId::from_bits(7));
        assert_eq!(answer.annotations[MANAGED_ANNOTATION], "0000000000000007");
        assert!(answer.cdi_devices.is_empty() && answer.envs.is_empty());
    }

    #[test]
    fn foreign_response_has_no_allocation_id() {
        let mut answer = api::ContainerAllocateResponse::default();
        for name in ["nvidia.com/gpu=0", "bursar.dev/gpu", "bursar.dev/gpu=zz"] {
            answer.cdi_devices.push(api::CdiDevice {
                name: name.to_owned(),
            });
        }
        assert_eq!(allocation_id_of(Resource::DeviceMemory, &answer), None);
    }

    #[test]
    fn long_message_is_truncated_between_characters() {
        let long = "é".repeat(600);
        let cut = truncated(&long);
        assert_eq!(cut.chars().count(), MAX_MESSAGE_CHARS + 3);
        assert_eq!(truncated("short"), "short");
    }

    #[test]
    fn timeout_of_the_caller_is_read_in_each_unit() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            caller_timeout(&metadata)
        };
        let mut request = Request::new(());
        request.set_timeout(PREPARE_TIMEOUT);
        assert_eq!(caller_timeout(request.metadata()), Some(PREPARE_TIMEOUT));
        for (text, millis) in [
            ("1H", 3_600_000),
            ("1M", 60_000),
            ("29S", 29_000),
            ("5m", 5),
        ] {
            assert_eq!(read(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(read("99999999n"), Some(Duration::from_nanos(99_999_999)));
        for bad in ["", "S", "28", "-1S", "4294967296H"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn waiting_pod_gets_the_reason_in_its_status() {
        let reason = "waiting for 12 GiB on one GPU: largest free 4 GiB (GPU-1)";
        let status = status_of(&PrepareError::NoRoom(reason.to_owned()));
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert_eq!(status.message(), reason);
    }

    #[tokio::test]
    async fn unchanged_devices_are_not_sent_again() {
        use crate::devices::DeviceHealth::{Healthy, Unhealthy};
        let update = |health| Devices::new(Resource::DeviceMemory, vec![health]).unwrap();
        let (sender, receiver) = watch::channel(update(Healthy));
        let mut updates = std::pin::pin!(device_updates(receiver));
        assert_eq!(updates.next().await, Some(update(Healthy)));
        sender.send_replace(update(Healthy));
        assert!(futures::poll!(updates.next()).is_pending());
        sender.send_replace(update(Unhealthy));
        assert_eq!(updates.next().await, Some(update(Unhealthy)));
        drop(sender);
        assert!(
            futures::poll!(updates.next()).is_pending(),
            "the last update stands"
        );
    }
}
