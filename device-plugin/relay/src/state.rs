//! The relay's files, which live in memory until the node's next boot.
//!
//! - `offers.json`: the device lists that an agent sent last. After a restart the relay registers
//!   them without an agent. After a boot no GPU is offered before an agent has seen it.
//! - `registrations.json`: whether the kubelet follows each resource, which the agent reads.

use std::collections::BTreeMap;
use std::path::Path;

use bursar_host::checkpoint::{Checkpoint, LoadError, SaveError};
use bursar_kubelet::devices::{DeviceHealth, Devices};
use bursar_kubelet::lifecycle::Registration;
use bursar_ledger::units::Resource;
use serde::{Deserialize, Serialize};

/// The last device list of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    resource: Resource,
    /// Whether each device is healthy, by index.
    healthy: Vec<bool>,
}

impl From<&Devices> for Offer {
    fn from(devices: &Devices) -> Self {
        let healthy = devices.health().iter();
        Self {
            resource: devices.resource(),
            healthy: healthy
                .map(|health| *health == DeviceHealth::Healthy)
                .collect(),
        }
    }
}

impl Offer {
    /// The device list; `None` if it is larger than the kubelet accepts.
    pub fn devices(&self) -> Option<Devices> {
        let health = self.healthy.iter().map(|healthy| match healthy {
            true => DeviceHealth::Healthy,
            false => DeviceHealth::Unhealthy,
        });
        Devices::new(self.resource, health.collect()).ok()
    }
}

/// The offers by the extended resource's name.
pub type Offers = BTreeMap<String, Offer>;

/// The reason why the kubelet does not follow a resource, by the extended resource's name; `None`
/// where the kubelet does.
pub type Registrations = BTreeMap<String, Option<String>>;

/// The reason in [`Registrations`].
pub fn reason(registration: &Registration) -> Option<String> {
    match registration {
        Registration::Registered => None,
        Registration::NotRegistered(why) => Some(why.to_string()),
    }
}

fn registrations_file(folder: &Path) -> Checkpoint {
    Checkpoint::new(folder.join("registrations.json"))
}

fn offers_file(folder: &Path) -> Checkpoint {
    Checkpoint::new(folder.join("offers.json"))
}

/// Reads what the relay in `folder` has registered; empty where no relay has run since the boot.
///
/// # Errors
/// The file is unreadable.
pub fn load_registrations(folder: &Path) -> Result<Registrations, LoadError> {
    Ok(registrations_file(folder).load()?.unwrap_or_default())
}

/// Replaces the record of what is registered.
///
/// # Errors
/// The file cannot be written.
pub fn save_registrations(folder: &Path, now: &Registrations) -> Result<(), SaveError> {
    registrations_file(folder).save(now)
}

pub(crate) fn load_offers(folder: &Path) -> Result<Offers, LoadError> {
    Ok(offers_file(folder).load_or_set_aside()?.unwrap_or_default())
}

pub(crate) fn save_offers(folder: &Path, offers: &Offers) -> Result<(), SaveError> {
    offers_file(folder).save(offers)
}

#[cfg(test)]
mod tests {
    use bursar_host::testing::assert_golden_checkpoint;

    use super::*;

    const DEVICE: &str = "bursar.dev/gpu-memory-gib";
    const MANAGED: &str = "bursar.dev/gpu-managed-memory-gib";

    #[test]
    fn golden_offers_are_read() {
        let offer = |resource, healthy: &[bool]| Offer {
            resource,
            healthy: healthy.to_vec(),
        };
        let device = offer(Resource::DeviceMemory, &[true, true, false]);
        let managed = offer(Resource::ManagedMemory, &[true]);
        let offers: Offers = [(DEVICE.to_owned(), device), (MANAGED.to_owned(), managed)].into();
        assert_golden_checkpoint("offers.json", &offers);
    }

    #[test]
    fn golden_registrations_are_read() {
        let reason = Some("no kubelet.sock".to_owned());
        let registrations: Registrations =
            [(DEVICE.to_owned(), None), (MANAGED.to_owned(), reason)].into();
        assert_golden_checkpoint("registrations.json", &registrations);
    }

    #[test]
    fn offers_of_a_later_version_are_kept_beside() {
        let folder = tempfile::tempdir().unwrap();
        let later = r#"{"version":2,"offers":[]}"#;
        for name in ["offers.json", "registrations.json"] {
            std::fs::write(folder.path().join(name), later).unwrap();
        }
        assert!(load_offers(folder.path()).is_err());
        save_offers(folder.path(), &Offers::new()).unwrap();
        let kept = std::fs::read_to_string(folder.path().join("offers.unread"));
        assert_eq!(kept.unwrap(), later);
        assert!(load_registrations(folder.path()).is_err());
        let relays = folder.path().join("registrations.json");
        assert!(relays.exists(), "the agent leaves the relay's file alone");
    }
}
