//! The CDI file format, as much of it as we write.
//!
//! Source: CNCF Container Device Interface, SPEC.md, version 0.6.0.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BINDING_ANNOTATION, CdiBinding, HostMount};

/// A CDI file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The version of the format.
    pub cdi_version: String,
    /// Vendor and class of the devices.
    pub kind: String,
    /// Free text for whoever wrote the file.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    pub devices: Vec<Device>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Its name within its kind.
    pub name: String,
    /// What it does to a container.
    pub container_edits: ContainerEdits,
}

/// What a device does to a container. There is no field for hooks: we have none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    /// Variables, as `NAME=value`.
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
    /// Where the container sees it.
    pub path: PathBuf,
    /// Where it is on the host; the runtime takes type and numbers from there.
    pub host_path: PathBuf,
    /// What the container's device cgroup allows.
    pub permissions: String,
}

/// A bind mount in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Where it is on the host.
    pub host_path: PathBuf,
    /// Where the container sees it.
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

/// The file's annotations: the binding, as JSON.
pub(super) fn binding_annotations(binding: &CdiBinding) -> BTreeMap<String, String> {
    let text =
        serde_json::to_string(binding).expect("a binding has no map with keys that are not text");
    BTreeMap::from([(BINDING_ANNOTATION.to_owned(), text)])
}

impl Spec {
    /// The binding that the file was made for; `None` if the file is not one of ours.
    pub fn binding(&self) -> Option<CdiBinding> {
        serde_json::from_str(self.annotations.get(BINDING_ANNOTATION)?).ok()
    }
}
