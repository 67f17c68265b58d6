//! A resource's tokens as one ListAndWatch message, held to its limits.

use prost::Message as _;

use super::api::deviceplugin::{Device, HEALTHY, ListAndWatchResponse, UNHEALTHY};
use crate::units::{DeviceId, MAX_DEVICE_IDS, Resource};

/// The largest message that is ever sent. The kubelet closes the stream at 4 MiB (gRPC's default).
pub const MAX_MESSAGE_BYTES: usize = 3 << 20;

/// Why tokens cannot be advertised; the caller turns it into a condition and an event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DevicesError {
    /// All resources of a node together.
    #[error(
        "{tokens} tokens on this node, at most {MAX_DEVICE_IDS} can be registered: use a larger quantum"
    )]
    TooManyTokens {
        /// Tokens of all resources together.
        tokens: usize,
    },
    /// One resource's message.
    #[error(
        "the list of {tokens} tokens of {resource} takes {bytes} bytes, \
         at most {MAX_MESSAGE_BYTES} can be sent"
    )]
    MessageTooLarge {
        /// What the tokens count.
        resource: Resource,
        /// How many there are.
        tokens: usize,
        /// Size of their message.
        bytes: usize,
    },
}

impl DevicesError {
    /// A bounded name for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooManyTokens { .. } => "TooManyTokens",
            Self::MessageTooLarge { .. } => "DeviceListTooLarge",
        }
    }
}

/// Whether a token may be given to a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceHealth {
    /// The node has a quantum for it.
    Healthy,
    /// More tokens were advertised than healthy GPUs have quanta.
    Unhealthy,
}

impl DeviceHealth {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => HEALTHY,
            Self::Unhealthy => UNHEALTHY,
        }
    }
}

/// What the kubelet is told about one resource: the health of tokens 0, 1, 2, ...
///
/// A value of this type fits in one message; [`Devices::new`] is the only way to one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    resource: Resource,
    health: Vec<DeviceHealth>,
}

impl Devices {
    /// The tokens of `resource` with their health, by index.
    ///
    /// # Errors
    /// [`DevicesError`] where they are too many to advertise.
    pub fn new(resource: Resource, health: Vec<DeviceHealth>) -> Result<Self, DevicesError> {
        check_node_total([health.len()])?;
        let devices = Self { resource, health };
        let bytes = devices.to_message().encoded_len();
        if bytes > MAX_MESSAGE_BYTES {
            let tokens = devices.health.len();
            return Err(DevicesError::MessageTooLarge {
                resource,
                tokens,
                bytes,
            });
        }
        Ok(devices)
    }

    /// What the tokens count.
    pub fn resource(&self) -> Resource {
        self.resource
    }

    /// How many tokens there are, healthy or not: the kubelet's capacity.
    pub fn len(&self) -> usize {
        self.health.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.health.is_empty()
    }

    /// How many tokens are healthy: the kubelet's allocatable.
    pub fn healthy_count(&self) -> usize {
        self.health
            .iter()
            .filter(|health| **health == DeviceHealth::Healthy)
            .count()
    }

    /// The message for ListAndWatch.
    pub fn to_message(&self) -> ListAndWatchResponse {
        let tokens = DeviceId::first(self.resource, MAX_DEVICE_IDS);
        let devices = tokens.zip(&self.health).map(|(token, health)| Device {
            id: token.to_string(),
            health: health.as_str().to_owned(),
            topology: None,
        });
        ListAndWatchResponse {
            devices: devices.collect(),
        }
    }
}

/// Checks that a node's resources together stay within [`MAX_DEVICE_IDS`].
///
/// # Errors
/// [`DevicesError::TooManyTokens`].
pub fn check_node_total(tokens: impl IntoIterator<Item = usize>) -> Result<(), DevicesError> {
    let tokens = tokens.into_iter().fold(0, usize::saturating_add);
    if tokens > usize::from(MAX_DEVICE_IDS) {
        return Err(DevicesError::TooManyTokens { tokens });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(count: usize) -> Vec<DeviceHealth> {
        vec![DeviceHealth::Healthy; count]
    }

    #[test]
    fn message_of_eight_h200_is_below_100_kilobytes() {
        let devices = Devices::new(Resource::DeviceMemory, healthy(8 * 141)).unwrap();
        assert!(devices.to_message().encoded_len() <= 100_000);
    }

    #[test]
    fn maximum_of_devices_fits_and_one_more_is_refused() {
        assert!(Devices::new(Resource::DeviceMemory, healthy(4096)).is_ok());
        let error = Devices::new(Resource::DeviceMemory, healthy(4097)).unwrap_err();
        assert_eq!(error, DevicesError::TooManyTokens { tokens: 4097 });
        assert_eq!(error.reason(), "TooManyTokens");
    }

    #[test]
    fn devices_of_two_resources_are_limited_together() {
        assert_eq!(check_node_total([4000, 96]), Ok(()));
        let error = check_node_total([4000, 1000]).unwrap_err();
        assert_eq!(error, DevicesError::TooManyTokens { tokens: 5000 });
        assert_eq!(
            error.to_string(),
            "5000 tokens on this node, at most 4096 can be registered: use a larger quantum"
        );
    }

    #[test]
    fn device_id_is_independent_of_health() {
        let health = vec![DeviceHealth::Healthy, DeviceHealth::Unhealthy];
        let devices = Devices::new(Resource::ManagedMemory, health).unwrap();
        let message = devices.to_message();
        let told: Vec<_> = message
            .devices
            .iter()
            .map(|d| (d.id.as_str(), d.health.as_str()))
            .collect();
        assert_eq!(told, [("u-0000", "Healthy"), ("u-0001", "Unhealthy")]);
        assert_eq!((devices.len(), devices.healthy_count()), (2, 1));
    }
}
