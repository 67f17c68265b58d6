//! Finds the capability nodes that open a MIG instance: `/dev/nvidia-caps/nvidia-cap<N>`.
//!
//! An instance needs two, for its GPU instance and its compute instance. The driver lists the
//! number of each capability in `/proc/driver/nvidia/capabilities`, in the line `DeviceFileMinor:
//! <N>` (NVIDIA's MIG user guide, "Device Nodes and Capabilities").

use std::path::Path;

use nvml_wrapper::{Device, Nvml};

/// The folder in which the driver lists its capabilities.
pub(crate) const CAPABILITIES_DIR: &str = "/proc/driver/nvidia/capabilities";

/// A MIG instance by NVML's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigInstance {
    /// The number of the GPU instance.
    pub gpu_instance: u32,
    /// The number of the compute instance in it.
    pub compute_instance: u32,
}

impl MigInstance {
    /// Asks NVML for the numbers of `device`; none where the driver reports none.
    #[expect(unsafe_code, reason = "nvml-wrapper has no call for the two numbers")]
    pub fn query(nvml: &Nvml, device: &Device<'_>) -> Option<Self> {
        let library = nvml.lib();
        let (get_gpu_instance, get_compute_instance) = (
            library.nvmlDeviceGetGpuInstanceId.as_ref().ok()?,
            library.nvmlDeviceGetComputeInstanceId.as_ref().ok()?,
        );
        let (mut gpu, mut compute) = (0, 0);
        // SAFETY: the handle is used within this block only, while `device` borrows its library.
        // Both functions take the handle and write one number each, to this stack.
        let is_known = unsafe {
            let handle = device.handle();
            get_gpu_instance(handle, &mut gpu) == 0
                && get_compute_instance(handle, &mut compute) == 0
        };
        is_known.then_some(Self {
            gpu_instance: gpu,
            compute_instance: compute,
        })
    }

    /// The numbers of its capability nodes, on the GPU with this minor number. Empty where the
    /// driver has none, as on a node without MIG's own device nodes.
    pub(crate) fn capability_minors(self, folder: &Path, minor: u32) -> Vec<u32> {
        let Self {
            gpu_instance: gpu,
            compute_instance: compute,
        } = self;
        let instance = folder.join(format!("gpu{minor}/mig/gi{gpu}"));
        let files = [
            instance.join("access"),
            instance.join(format!("ci{compute}/access")),
        ];
        let numbers = files.iter().map(|file| {
            let text = std::fs::read_to_string(file).ok()?;
            parse_device_minor(&text)
        });
        // A container needs both nodes to open the instance.
        numbers.collect::<Option<_>>().unwrap_or_default()
    }
}

/// Parses the device number in the text of an `access` file.
fn parse_device_minor(text: &str) -> Option<u32> {
    let minor = text
        .lines()
        .find_map(|line| line.strip_prefix("DeviceFileMinor:"))?;
    minor.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(files: &[(&str, &str)]) -> Vec<u32> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let instance = MigInstance {
            gpu_instance: 3,
            compute_instance: 1,
        };
        instance.capability_minors(folder.path(), 2)
    }

    const OF_GPU: (&str, &str) = (
        "gpu2/mig/gi3/access",
        "DeviceFileMinor: 30\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
    );
    const OF_COMPUTE: (&str, &str) = (
        "gpu2/mig/gi3/ci1/access",
        "DeviceFileMinor: 32\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
    );

    #[test]
    fn instance_has_capability_nodes_of_gpu_and_compute_instance() {
        assert_eq!(capabilities(&[OF_GPU, OF_COMPUTE]), [30, 32]);
    }

    #[test]
    fn instance_has_no_capabilities_when_a_file_is_missing() {
        assert_eq!(capabilities(&[]), [0_u32; 0]);
        assert_eq!(capabilities(&[OF_GPU]), [0_u32; 0]);
        assert_eq!(
            capabilities(&[OF_GPU, (OF_COMPUTE.0, "garbage")]),
            [0_u32; 0]
        );
    }
}
