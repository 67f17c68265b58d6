//! The CDI device of one allocation, as a value.
//!
//! A device is mounts, device nodes and two variables; it has no hooks, so it needs no NVIDIA
//! container runtime and works in user namespaces. The file that holds it also carries the
//! [`CdiBinding`] that it was made for, as an annotation: the node's bindings can be read back from
//! the host alone. [`dir`] keeps the files.

pub mod dir;
mod spec;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::node::driver_files::{Driver, DriverFile, LIBCUDA, NVIDIA_SMI};
use crate::node::shim_install::{PRELOAD_FILE, SHIMS};
use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid};

pub use dir::{CdiDir, CdiError, CdiListing};
pub use spec::{ContainerEdits, Device, DeviceNode, Mount, Spec};

/// The CDI kind of our devices: an Allocate answer for device memory names `<kind>=<allocation>`.
pub const KIND: &str = "bursar.dev/gpu";

/// The CDI version of our files: the first with annotations. containerd 2.x reads 0.3.0 to 1.1.0.
pub const CDI_VERSION: &str = "0.6.0";

/// The annotation that holds the binding.
pub const BINDING_ANNOTATION: &str = "bursar.dev/binding";

/// The folder of the shims in a container.
pub const CONTAINER_LIB_DIR: &str = "/opt/bursar/lib";

/// The folder of the real driver's files in a container. Their names do not start with `lib`, so
/// `ldconfig` takes none of them for a library.
pub const CONTAINER_DRIVER_DIR: &str = "/opt/bursar/drv";

/// Where a container's loader looks by default: Debian's folder, Red Hat's, and Arch's, which musl has too.
/// A preloaded library is found before any of them; they are for loaders that preload nothing (musl's, a static
/// program's, `dlmopen`'s new namespace) and for programs that name a file.
pub const CONTAINER_DEFAULT_DIRS: &[&str] = &[
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// Where programs look for NVIDIA's tool.
const TOOLS_DIR: &str = "/usr/bin";

/// The loader's own list of libraries that every program gets.
const PRELOAD: &str = "/etc/ld.so.preload";

/// What one container was given: enough to make its device, and to rebuild the node's ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiBinding {
    /// Names the device, the file and the socket's folder.
    pub allocation: AllocationId,
    /// The pod.
    pub pod: PodUid,
    /// The container's name in its pod.
    pub container: String,
    /// The tokens that the kubelet counted for it.
    pub tokens: DeviceIdSet,
    /// The GPUs that it may use, and how much of each.
    pub gpus: Vec<BoundGpu>,
}

/// One GPU of a binding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundGpu {
    /// The GPU, or MIG instance.
    pub uuid: GpuUuid,
    /// What the container may use of it.
    pub quota: Bytes,
    /// Its device nodes below the driver's device folder: `nvidia0`; for a MIG instance also its
    /// capabilities, `nvidia-caps/nvidia-cap21`.
    pub nodes: Vec<String>,
}

/// A folder or file of the host that a container sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMount {
    /// Where it is on the host.
    pub host_path: PathBuf,
    /// Where the container sees it.
    pub container_path: PathBuf,
    /// Whether the container may only read it.
    pub read_only: bool,
}

/// Everything about this node that its devices have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdiNode {
    /// The driver.
    pub driver: Driver,
    /// The shim's versioned folder ([`crate::shim_files`]).
    pub shim_dir: PathBuf,
    /// The folder of the allocations' folders, `<run-dir>/alloc`.
    pub alloc_dir: PathBuf,
    /// What the admin wants in every container.
    pub extra_mounts: Vec<HostMount>,
}

/// The CDI file of `binding` on `node`.
pub fn build_spec(node: &CdiNode, binding: &CdiBinding) -> Spec {
    Spec {
        cdi_version: CDI_VERSION.to_owned(),
        kind: KIND.to_owned(),
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
    // Two MIG instances of one GPU share its node.
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
    let has_shim = |file: &&DriverFile| SHIMS.contains(&file.soname.as_str());
    for dir in CONTAINER_DEFAULT_DIRS.iter().map(Path::new) {
        for shim in SHIMS {
            mounts.push(Mount::read_only(&node.shim_dir.join(shim), dir.join(shim)));
        }
        let cuda = node.shim_dir.join(LIBCUDA);
        mounts.push(Mount::read_only(&cuda, dir.join("libcuda.so")));
        for file in node.driver.files().filter(|file| !has_shim(file)) {
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
