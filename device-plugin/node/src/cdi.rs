//! Builds the CDI device of one allocation.
//!
//! A device has mounts, device nodes and two variables. The device has no hooks, so that it needs
//! no NVIDIA container runtime and works in user namespaces. Its file also has the [`CdiBinding`]
//! as an annotation, from which the agent can restore its bindings. [`dir`] manages the files.

pub mod dir;
mod spec;

use std::path::{Path, PathBuf};

use bursar_config::HostMount;
use bursar_host::driver_files::{Driver, DriverFile, LIBCUDA, NVIDIA_SMI};
use bursar_kubelet::plugin::CDI_KIND;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid};
use serde::{Deserialize, Serialize};

use crate::shim_install::{ENTRIES, PRELOAD_FILE};

pub use dir::CdiDir;
pub(crate) use dir::CdiError;
pub use spec::{ContainerEdits, Device, Mount};
pub(crate) use spec::{DeviceNode, Spec};

/// The CDI version: the first one with annotations. containerd 2.x reads 0.3.0 to 1.1.0.
pub(crate) const CDI_VERSION: &str = "0.6.0";

pub(crate) const BINDING_ANNOTATION: &str = "bursar.dev/binding";

/// The directory of the shims in a container.
pub(crate) const CONTAINER_LIB_DIR: &str = "/opt/bursar/lib";

/// The directory of the driver's files in a container. The file names do not start with `lib`, so
/// that `ldconfig` takes none of them for a library.
pub const CONTAINER_DRIVER_DIR: &str = "/opt/bursar/drv";

/// The default library directories of Debian, Red Hat and Arch; musl uses Arch's too.
///
/// A preloaded library precedes all of them. The shims are mounted here for loaders that preload
/// nothing (musl's, a static program's, `dlmopen`'s new namespace) and for programs that name a
/// file.
pub const CONTAINER_DEFAULT_DIRS: &[&str] = &[
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// The directory in which programs expect `nvidia-smi`.
const TOOLS_DIR: &str = "/usr/bin";

/// The loader's list of libraries to load into every program.
const PRELOAD: &str = "/etc/ld.so.preload";

/// The binding of one container: enough to build its device and to restore the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiBinding {
    /// The allocation, which names the device, the file and the socket's directory.
    pub allocation: AllocationId,
    /// The pod's UID.
    pub pod: PodUid,
    /// The container's name in its pod.
    pub container: String,
    /// The device ids that the kubelet allocated.
    pub device_ids: DeviceIdSet,
    /// The GPUs that the container may use, with a quota each.
    pub gpus: Vec<BoundGpu>,
}

/// One GPU of a binding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundGpu {
    /// The GPU or MIG instance.
    pub uuid: GpuUuid,
    /// The bytes that the container may use.
    pub quota: Bytes,
    /// The device nodes below the driver's device directory: `nvidia0`, and for a MIG instance also
    /// its capabilities, `nvidia-caps/nvidia-cap21`.
    pub nodes: Vec<String>,
}

/// The inputs that all CDI devices of this node share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdiNode {
    /// The driver.
    pub driver: Driver,
    /// The shim's build directory ([`crate::shim_install`]).
    pub shim_dir: PathBuf,
    /// The parent of the allocations' directories, `<run-dir>/alloc`.
    pub alloc_dir: PathBuf,
    /// The administrator's mounts for every container.
    pub extra_mounts: Vec<HostMount>,
}

/// Builds the CDI file of `binding`.
pub fn build_spec(node: &CdiNode, binding: &CdiBinding) -> Spec {
    Spec {
        cdi_version: CDI_VERSION.to_owned(),
        kind: CDI_KIND.to_owned(),
        annotations: spec::binding_annotations(binding),
        devices: vec![Device {
            name: binding.allocation.to_string(),
            container_edits: ContainerEdits {
                env: vec![
                    "NVIDIA_VISIBLE_DEVICES=void".to_owned(),
                    format!("TRITON_LIBCUDA_PATH={CONTAINER_LIB_DIR}"),
                ],
                device_nodes: device_nodes(&node.driver, binding),
                mounts: container_mounts(node, binding),
            },
        }],
    }
}

fn device_nodes(driver: &Driver, binding: &CdiBinding) -> Vec<DeviceNode> {
    let gpus = binding.gpus.iter().flat_map(|gpu| &gpu.nodes);
    let mut names: Vec<&String> = driver.control_nodes.iter().chain(gpus).collect();
    // Two MIG instances of one GPU share its device node.
    names.sort();
    names.dedup();
    names
        .into_iter()
        .map(|name| DeviceNode {
            path: Path::new("/dev").join(name),
            host_path: driver.dev_root.join(name),
            permissions: "rw".to_owned(),
        })
        .collect()
}

fn container_mounts(node: &CdiNode, binding: &CdiBinding) -> Vec<Mount> {
    let mut mounts = vec![
        Mount::read_only(&node.shim_dir, CONTAINER_LIB_DIR),
        Mount::read_only(&node.shim_dir.join(PRELOAD_FILE), PRELOAD),
        Mount::read_only(
            &node.alloc_dir.join(binding.allocation.to_string()),
            bursar_protocol::CONTAINER_RUN_DIR,
        ),
    ];
    for file in node.driver.files() {
        let hidden = file.soname.strip_prefix("lib").unwrap_or(&file.soname);
        mounts.push(Mount::read_only(
            &file.host_path,
            Path::new(CONTAINER_DRIVER_DIR).join(hidden),
        ));
    }
    let has_entry = |file: &&DriverFile| ENTRIES.iter().any(|entry| entry.soname == file.soname);
    for dir in CONTAINER_DEFAULT_DIRS.iter().map(Path::new) {
        for entry in ENTRIES.map(|entry| entry.soname) {
            mounts.push(Mount::read_only(
                &node.shim_dir.join(entry),
                dir.join(entry),
            ));
        }
        let cuda = node.shim_dir.join(LIBCUDA);
        mounts.push(Mount::read_only(&cuda, dir.join("libcuda.so")));
        for file in node.driver.files().filter(|file| !has_entry(file)) {
            mounts.push(Mount::read_only(&file.host_path, dir.join(&file.soname)));
        }
    }
    if let Some(smi) = &node.driver.smi {
        mounts.push(Mount::read_only(
            &smi.host_path,
            Path::new(TOOLS_DIR).join(NVIDIA_SMI),
        ));
    }
    mounts.extend(node.extra_mounts.iter().map(Mount::from_host_mount));
    mounts
}

#[cfg(test)]
mod tests;
