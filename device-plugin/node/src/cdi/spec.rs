//! Defines the part of the CDI file format that the agent writes.
//!
//! Source: CNCF Container Device Interface, SPEC.md, version 0.6.0.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bursar_config::HostMount;
use bursar_host::checkpoint::version::Versioned;
use serde::{Deserialize, Serialize};

use super::{BINDING_ANNOTATION, CdiBinding};

/// A CDI file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The version of the format.
    pub(crate) cdi_version: String,
    /// The vendor and class of the devices.
    pub kind: String,
    /// Free text of the file's author.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    pub devices: Vec<Device>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The device's name within its kind.
    pub name: String,
    /// The changes to a container.
    pub container_edits: ContainerEdits,
}

/// The changes that a device makes to a container. The agent writes no hooks, so there is no field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    /// Environment variables, as `NAME=value`.
    pub env: Vec<String>,
    /// Device nodes.
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts.
    pub mounts: Vec<Mount>,
}

/// A device node in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// The path in the container.
    pub path: PathBuf,
    /// The path on the host, from which the runtime takes type and numbers.
    pub host_path: PathBuf,
    /// The access that the container's device cgroup allows.
    pub permissions: String,
}

/// A bind mount in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// The path on the host.
    pub host_path: PathBuf,
    /// The path in the container.
    pub container_path: PathBuf,
    /// Mount options.
    pub options: Vec<String>,
}

impl Mount {
    pub(super) fn read_only(host_path: &Path, container_path: impl Into<PathBuf>) -> Mount {
        Mount::new(host_path, container_path, "ro")
    }

    pub(super) fn from_host_mount(mount: &HostMount) -> Mount {
        let access = if mount.read_only { "ro" } else { "rw" };
        Mount::new(&mount.host_path, &mount.container_path, access)
    }

    fn new(host_path: &Path, container_path: impl Into<PathBuf>, access: &str) -> Mount {
        Mount {
            host_path: host_path.to_owned(),
            container_path: container_path.into(),
            options: [access, "nosuid", "nodev", "bind"]
                .map(str::to_owned)
                .to_vec(),
        }
    }
}

/// The annotations of a file: its binding, as JSON.
pub(super) fn binding_annotations(binding: &CdiBinding) -> BTreeMap<String, String> {
    let text = serde_json::to_string(&Versioned::from(binding))
        .expect("a binding has no map with keys that are not text");
    BTreeMap::from([(BINDING_ANNOTATION.to_owned(), text)])
}

impl Spec {
    /// The binding of the file; `None` for a file of another program or version.
    pub fn binding(&self) -> Option<CdiBinding> {
        let text = self.annotations.get(BINDING_ANNOTATION)?;
        let versioned: Versioned<CdiBinding> = serde_json::from_str(text).ok()?;
        Some(versioned.record)
    }
}
