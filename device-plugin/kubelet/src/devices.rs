//! Builds the ListAndWatch message of a resource and checks its limits.

use bursar_ledger::units::{DeviceId, MAX_DEVICE_IDS, Resource};
use prost::Message as _;

use super::api::deviceplugin::{Device, HEALTHY, ListAndWatchResponse, UNHEALTHY};

/// The largest message to send. The kubelet closes the stream at 4 MiB (gRPC's default).
pub(crate) const MAX_MESSAGE_BYTES: usize = 3 << 20;

/// The reason why devices cannot be advertised, for a condition and an event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DevicesError {
    /// All resources of the node have too many devices together.
    #[error(
        "failed to advertise {count} device ids: at most {MAX_DEVICE_IDS} can be registered; \
         use a larger quantum"
    )]
    TooManyDeviceIds {
        /// The number of devices of all resources.
        count: usize,
    },
    /// The message of one resource is too large.
    #[error(
        "failed to advertise {count} device ids of {resource}: their list takes {bytes} bytes, \
         and at most {MAX_MESSAGE_BYTES} can be sent; use a larger quantum"
    )]
    MessageTooLarge {
        /// The resource.
        resource: Resource,
        /// The number of its devices.
        count: usize,
        /// The size of the message.
        bytes: usize,
    },
}

impl DevicesError {
    /// A bounded name for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooManyDeviceIds { .. } => "TooManyDeviceIds",
            Self::MessageTooLarge { .. } => "DeviceListTooLarge",
        }
    }
}

/// Whether the kubelet may allocate a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceHealth {
    /// A healthy GPU has a quantum for the device.
    Healthy,
    /// The agent has advertised more devices than healthy GPUs have quanta.
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

/// The devices of one resource: the health of ids 0, 1, 2, ...
///
/// A value of this type fits into one message; [`Devices::new`] checks that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    resource: Resource,
    health: Vec<DeviceHealth>,
}

impl Devices {
    /// The devices of `resource` with their health, by index.
    ///
    /// # Errors
    /// [`DevicesError`] where there are too many.
    pub fn new(resource: Resource, health: Vec<DeviceHealth>) -> Result<Self, DevicesError> {
        check_node_total([health.len()])?;
        let devices = Self { resource, health };
        let bytes = devices.to_message().encoded_len();
        if bytes > MAX_MESSAGE_BYTES {
            let count = devices.health.len();
            return Err(DevicesError::MessageTooLarge {
                resource,
                count,
                bytes,
            });
        }
        Ok(devices)
    }

    /// The devices of a ListAndWatch message; `None` if an id is not the one of its place.
    pub fn from_message(resource: Resource, message: &ListAndWatchResponse) -> Option<Self> {
        let mut ids = DeviceId::first(resource, MAX_DEVICE_IDS);
        let health = message.devices.iter().map(|device| {
            let is_next = ids.next().is_some_and(|id| id.to_string() == device.id);
            is_next.then_some(match device.health == HEALTHY {
                true => DeviceHealth::Healthy,
                false => DeviceHealth::Unhealthy,
            })
        });
        Self::new(resource, health.collect::<Option<_>>()?).ok()
    }

    /// The resource.
    pub fn resource(&self) -> Resource {
        self.resource
    }

    /// The health of each device, by index.
    pub fn health(&self) -> &[DeviceHealth] {
        &self.health
    }

    /// The number of devices, unhealthy ones included: the kubelet's capacity.
    pub fn len(&self) -> usize {
        self.health.len()
    }

    /// Whether there is no device.
    pub fn is_empty(&self) -> bool {
        self.health.is_empty()
    }

    /// The number of healthy devices: the kubelet's allocatable.
    pub fn healthy_count(&self) -> usize {
        self.health
            .iter()
            .filter(|health| **health == DeviceHealth::Healthy)
            .count()
    }

    /// The ListAndWatch message.
    pub fn to_message(&self) -> ListAndWatchResponse {
        let ids = DeviceId::first(self.resource, MAX_DEVICE_IDS);
        let devices = ids.zip(&self.health).map(|(id, health)| Device {
            id: id.to_string(),
            health: health.as_str().to_owned(),
            topology: None,
        });
        ListAndWatchResponse {
            devices: devices.collect(),
        }
    }
}

/// Checks that the resources of a node together have at most [`MAX_DEVICE_IDS`] devices.
///
/// # Errors
/// [`DevicesError::TooManyDeviceIds`].
pub fn check_node_total(counts: impl IntoIterator<Item = usize>) -> Result<(), DevicesError> {
    let count = counts.into_iter().fold(0, usize::saturating_add);
    if count > usize::from(MAX_DEVICE_IDS) {
        return Err(DevicesError::TooManyDeviceIds { count });
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
        assert_eq!(error, DevicesError::TooManyDeviceIds { count: 4097 });
        assert_eq!(error.reason(), "TooManyDeviceIds");
    }

    #[test]
    fn devices_of_two_resources_are_limited_together() {
        assert_eq!(check_node_total([4000, 96]), Ok(()));
        let error = check_node_total([4000, 1000]).unwrap_err();
        assert_eq!(error, DevicesError::TooManyDeviceIds { count: 5000 });
        assert_eq!(
            error.to_string(),
            "failed to advertise 5000 device ids: at most 4096 can be registered; use a larger quantum"
        );
    }

    #[test]
    fn device_id_is_independent_of_health() {
        let health = vec![DeviceHealth::Healthy, DeviceHealth::Unhealthy];
        let devices = Devices::new(Resource::ManagedMemory, health).unwrap();
        let message = devices.to_message();
        let health_by_id: Vec<_> = message
            .devices
            .iter()
            .map(|d| (d.id.as_str(), d.health.as_str()))
            .collect();
        assert_eq!(
            health_by_id,
            [("u-0000", "Healthy"), ("u-0001", "Unhealthy")]
        );
        assert_eq!((devices.len(), devices.healthy_count()), (2, 1));
    }
}
