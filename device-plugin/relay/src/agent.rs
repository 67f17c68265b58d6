//! Follows one resource's plugin in the agent, and forwards the kubelet's calls to it.

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use bursar_kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use bursar_kubelet::api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, Empty, PreStartContainerRequest,
};
use bursar_kubelet::connect::connect_watched;
use bursar_kubelet::devices::Devices;
use bursar_kubelet::error_text::{error_chain, status_chain};
use bursar_kubelet::plugin::{
    ALLOCATION_ID_METADATA, ANSWER_TIME, AllocateError, Allocator, PREPARE_TIMEOUT, PrepareError,
};
use bursar_ledger::units::{AllocationId, DeviceIdSet, Resource};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tracing::debug;

/// An agent that answers no ping for this time counts as gone: stopped, or hung.
const SILENCE: Duration = Duration::from_secs(10);
/// The time for the agent to accept a connection and to answer about its options.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The time for which PreStartContainer waits for an agent, within the kubelet's limit.
pub const AWAY_TIMEOUT: Duration = PREPARE_TIMEOUT.saturating_sub(ANSWER_TIME);
/// The pause before a call to an agent that has just gone is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The timeout of the note about an allocation.
const NOTE_TIMEOUT: Duration = Duration::from_secs(5);

/// The agent's plugin of a resource.
#[derive(Debug, Clone)]
pub(crate) enum AgentLink {
    /// Connected to the plugin whose registration has this number.
    Up(u64, Channel),
    /// No agent since this time.
    Away(Instant),
}

impl AgentLink {
    /// The number of the registration; `None` while no agent is connected.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::Up(number, _) => Some(*number),
            Self::Away(_) => None,
        }
    }

    fn client(&self) -> Option<DevicePluginClient<Channel>> {
        match self {
            Self::Up(_, channel) => Some(DevicePluginClient::new(channel.clone())),
            Self::Away(_) => None,
        }
    }
}

/// Connects to the plugin's socket, and asks for its options as the kubelet does.
///
/// # Errors
/// The kubelet's answer to a registration that fails.
pub(crate) async fn dial(socket: &Path) -> Result<Channel, Status> {
    let failed = |cause: String| {
        Status::unknown(format!(
            "failed to dial the plugin at {}: {cause}",
            socket.display()
        ))
    };
    let options = async {
        let channel = connect_watched(socket, DIAL_TIMEOUT, SILENCE)
            .await
            .map_err(|error| failed(error_chain(&error)))?;
        DevicePluginClient::new(channel.clone())
            .get_device_plugin_options(Empty {})
            .await
            .map_err(|status| failed(status_chain(&status)))?;
        Ok(channel)
    };
    tokio::time::timeout(DIAL_TIMEOUT, options)
        .await
        .map_err(|_| failed("no answer".to_owned()))?
}

/// Passes each device list of the plugin on until the stream ends. `accept` returns false for a
/// plugin that another one has replaced.
pub(crate) async fn follow(
    channel: Channel,
    resource: Resource,
    mut accept: impl FnMut(Devices) -> bool,
) -> Result<(), Status> {
    let mut client = DevicePluginClient::new(channel);
    let mut list = client.list_and_watch(Empty {}).await?.into_inner();
    while let Some(message) = list.message().await? {
        let devices = Devices::from_message(resource, &message).ok_or_else(|| {
            Status::invalid_argument(format!(
                "failed to read the device list of {resource}: its device ids are not the relay's; \
                 install agent and relay of the same version"
            ))
        })?;
        if !accept(devices) {
            break;
        }
    }
    Ok(())
}

/// Answers Allocate, and forwards PreStartContainer to the agent.
#[derive(Debug)]
pub(crate) struct Forwarder {
    pub(crate) link: watch::Receiver<AgentLink>,
    /// The time for which PreStartContainer waits for an agent.
    pub(crate) away_timeout: Duration,
}

impl Forwarder {
    fn away(&self, now: Instant) -> Duration {
        match *self.link.borrow() {
            AgentLink::Up(..) => Duration::ZERO,
            AgentLink::Away(since) => now - since,
        }
    }
}

fn ids(resource: Resource, device_ids: &DeviceIdSet) -> Vec<String> {
    device_ids.ids(resource).map(|id| id.to_string()).collect()
}

impl Allocator for Forwarder {
    /// Never fails and waits for nothing: the kubelet admits no other pod meanwhile. The id must
    /// not follow from the device ids, which the kubelet assigns again before the former pod's
    /// memory is released.
    async fn allocate(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        _: Option<AllocationId>,
    ) -> Result<AllocationId, AllocateError> {
        let id = AllocationId::from_bits(rand::random());
        let client = self.link.borrow().client();
        if let Some(mut client) = client {
            let mut request = Request::new(AllocateRequest {
                container_requests: vec![ContainerAllocateRequest {
                    devices_ids: ids(resource, &device_ids),
                }],
            });
            request.set_timeout(NOTE_TIMEOUT);
            if let Ok(value) = id.to_string().parse() {
                request.metadata_mut().insert(ALLOCATION_ID_METADATA, value);
            }
            // An agent that misses the note reads the kubelet's checkpoint.
            tokio::spawn(async move {
                if let Err(status) = client.allocate(request).await {
                    debug!(%id, %status, "the agent was not told of an allocation");
                }
            });
        }
        Ok(id)
    }

    async fn prepare(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        limit: Duration,
    ) -> Result<(), PrepareError> {
        let deadline = Instant::now() + self.away_timeout.min(limit);
        let devices_ids = ids(resource, &device_ids);
        let mut link = self.link.clone();
        loop {
            let up = link.wait_for(|link| matches!(link, AgentLink::Up(..)));
            let up = tokio::time::timeout_at(deadline, up).await;
            // The relay closes the channel when it withdraws the resource.
            let Some(mut client) = up.ok().and_then(Result::ok).and_then(|link| link.client())
            else {
                return Err(PrepareError::AgentAway(self.away(Instant::now())));
            };
            let mut request = Request::new(PreStartContainerRequest {
                devices_ids: devices_ids.clone(),
            });
            // An agent that comes back late has to say why the container waits within this call.
            request.set_timeout(deadline + ANSWER_TIME - Instant::now());
            match client.pre_start_container(request).await {
                Ok(_) => return Ok(()),
                Err(status) if is_lost(&status) && Instant::now() < deadline => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                Err(status) => return Err(PrepareError::Agent(Box::new(status))),
            }
        }
    }
}

/// Whether the agent has stopped, or the connection has ended, before an answer.
fn is_lost(status: &Status) -> bool {
    status.code() == Code::Unavailable || status.source().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn registration_is_refused_with_the_cause() {
        let refused = dial(Path::new("/nowhere")).await.unwrap_err();
        let message = refused.message();
        assert!(message.contains("No such file"), "{message}");
    }

    #[tokio::test]
    async fn container_waits_no_longer_once_the_resource_is_withdrawn() {
        let (link, linked) = watch::channel(AgentLink::Away(Instant::now()));
        let forwarder = Forwarder {
            link: linked,
            away_timeout: Duration::from_secs(20),
        };
        let device_ids = DeviceIdSet::from_indexes([3]).unwrap();
        let start = Instant::now();
        let prepared = forwarder.prepare(Resource::DeviceMemory, device_ids, AWAY_TIMEOUT);
        let withdrawn = async {
            tokio::task::yield_now().await;
            drop(link);
        };
        let (prepared, ()) = tokio::join!(prepared, withdrawn);
        assert!(
            matches!(prepared, Err(PrepareError::AgentAway(_))),
            "{prepared:?}"
        );
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
