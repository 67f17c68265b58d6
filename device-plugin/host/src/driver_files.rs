//! Finds the NVIDIA driver's files and device nodes on a host.
//!
//! The driver's directory depends on the distribution ([`LIBRARY_DIRS`]). The first one with
//! `libcuda.so.1` provides all files, so that versions never mix. Symbolic links are resolved below
//! the root only: the agent sees the host's root directory under another name.

mod chroot_path;
mod search;

/// A path with the architecture's name.
macro_rules! arch_dir {
    ($before:literal, $after:literal) => {
        if cfg!(target_arch = "x86_64") {
            concat!($before, "x86_64", $after)
        } else {
            concat!($before, "aarch64", $after)
        }
    };
}

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use bursar_config::DriverConfig;

use search::DriverSearch;

/// The directories to search for the driver's libraries, relative to the driver's root, in order.
///
/// | directory | distribution |
/// |---|---|
/// | `usr/lib/<arch>-linux-gnu`, `.../nvidia/current` | Debian (by its alternatives), Ubuntu |
/// | `usr/lib64` | RHEL, SUSE, Amazon Linux |
/// | `run/nvidia/driver/...` | the GPU operator's driver container, mounted on the host |
/// | `home/kubernetes/bin/nvidia/lib64` | Google's Container-Optimized OS |
/// | `<arch>-bottlerocket-.../nvidia/tesla`, `.../usr/lib` | Bottlerocket, before and since 580 |
/// | `usr/lib/nvidia/tesla`, `usr/lib` | Bottlerocket seen through its `/usr`; Arch Linux |
/// | `usr/local/nvidia/lib64` | images of cloud vendors |
///
/// Sources: nvidia-container-toolkit `pkg/lookup/library.go`; k8s-device-plugin issue 632 (COS);
/// bottlerocket-kernel-kit pull requests 425 and 473.
pub(crate) const LIBRARY_DIRS: &[&str] = &[
    arch_dir!("usr/lib/", "-linux-gnu"),
    arch_dir!("usr/lib/", "-linux-gnu/nvidia/current"),
    "usr/lib64",
    arch_dir!("run/nvidia/driver/usr/lib/", "-linux-gnu"),
    "run/nvidia/driver/usr/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    arch_dir!("", "-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla"),
    arch_dir!("", "-bottlerocket-linux-gnu/sys-root/usr/lib"),
    "usr/lib/nvidia/tesla",
    "usr/lib",
    "usr/local/nvidia/lib64",
];

/// The root of the GPU operator's driver container. It has its own device nodes; the host may have
/// none.
const DRIVER_CONTAINER: &str = "run/nvidia/driver";

/// The driver API library.
pub const LIBCUDA: &str = "libcuda.so.1";
/// The management library.
pub const LIBNVML: &str = "libnvidia-ml.so.1";

/// Libraries that `libcuda` loads by name on demand: the JIT compilers and the debugger's back end.
///
/// The second compiler is for GPUs before Blackwell, from driver 580 on. Older drivers lack some.
const HELPERS: &[&str] = &[
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-nvvm70.so.4",
    "libcudadebugger.so.1",
];

/// Helper libraries whose file name has the driver's version: compilers, and those of confidential
/// computing.
const VERSIONED_HELPERS: &[&str] = &[
    "libnvidia-gpucomp.so",
    "libnvidia-tileiras.so",
    "libnvidia-pkcs11.so",
    "libnvidia-pkcs11-openssl3.so",
];

/// NVIDIA's tool that shows devices, in the `bin` directory beside the libraries' directory.
pub const NVIDIA_SMI: &str = "nvidia-smi";

/// The device nodes that every GPU container needs.
const CONTROL_NODES: &[&str] = &["nvidiactl", "nvidia-uvm"];

/// The device nodes that profilers need and some hosts lack.
const OPTIONAL_NODES: &[&str] = &["nvidia-uvm-tools"];

/// A driver on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The driver API library.
    pub libcuda: DriverFile,
    /// The management library.
    pub libnvml: DriverFile,
    /// Libraries that the driver loads by name.
    pub helpers: Vec<DriverFile>,
    /// The tool [`NVIDIA_SMI`], where the driver has it.
    pub smi: Option<DriverFile>,
    /// The driver's version (`580.95.05`), if the library's file name has one.
    pub version: Option<String>,
    /// The names below `dev_root` of the device nodes that every GPU container gets.
    pub control_nodes: Vec<String>,
    /// The directory of the device nodes as the container runtime sees it.
    pub dev_root: PathBuf,
}

/// The versions of both halves of a driver, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverVersions {
    /// Of the libraries on disk, which containers get.
    pub files: Option<String>,
    /// Of the kernel module that is loaded.
    pub module: Option<String>,
}

/// One file of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// The name by which programs load the file.
    pub soname: String,
    /// The resolved path as the agent sees it.
    pub path: PathBuf,
    /// The resolved path as the container runtime sees it.
    pub host_path: PathBuf,
    /// Which file that is.
    pub stamp: FileStamp,
}

/// The identity and the age of a file. A package that replaces a file changes one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds since 1970.
    modified: (i64, i64),
}

impl FileStamp {
    fn read(path: &Path) -> std::io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// The reason why there is no usable driver. The message names the path and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// None of the directories has a `libcuda.so.1`.
    #[error(
        "no {LIBCUDA} below {root} (looked in {looked}): install the NVIDIA driver on this node, \
         or set driver.root to the folder that it is installed under",
        root = root.display(), looked = LIBRARY_DIRS.join(", ")
    )]
    NoLibrary {
        /// The root directory of the search.
        root: PathBuf,
    },
    /// The driver's directory lacks a library that every driver has.
    #[error("{} is missing beside {LIBCUDA}: the driver's installation is not complete", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A device node is missing.
    #[error(
        "device node {} is missing: load the driver's modules (nvidia-modprobe -c 0 -u), \
         or set driver.dev-root to the folder that has them",
        path.display()
    )]
    NoDeviceNode {
        /// The device node.
        path: PathBuf,
    },
    /// A path could not be read.
    #[error("failed to read {}: {source}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
}

impl DriverError {
    /// A bounded name for conditions and metric labels.
    pub fn reason(&self) -> &'static str {
        match self {
            DriverError::NoLibrary { .. } => "DriverNotFound",
            DriverError::MissingFile { .. } => "DriverIncomplete",
            DriverError::NoDeviceNode { .. } => "DeviceNodeMissing",
            DriverError::Read { .. } => "DriverUnreadable",
        }
    }
}

impl Driver {
    /// Finds the driver at the configured paths.
    ///
    /// # Errors
    /// Those of [`Driver::find`].
    pub fn find_configured(config: &DriverConfig) -> Result<Driver, DriverError> {
        Self::find(&config.root, &config.host_root, &config.dev_root)
    }

    /// Finds the driver below `root`, which the container runtime knows as `host_root`.
    ///
    /// The device nodes are those in `dev_root`, or else those of the driver's container.
    ///
    /// # Errors
    /// [`DriverError`] where a library or a control device node is missing.
    pub fn find(root: &Path, host_root: &Path, dev_root: &Path) -> Result<Driver, DriverError> {
        let search = DriverSearch { root, host_root };
        let (dir, libcuda) = search.find_driver_dir()?;
        let version = version_of(&libcuda);
        let versioned = VERSIONED_HELPERS.iter().filter_map(|stem| {
            version
                .as_deref()
                .map(|version| format!("{stem}.{version}"))
        });
        let names = HELPERS.iter().map(|soname| (*soname).to_owned());
        let mut helpers = Vec::new();
        for soname in names.chain(versioned) {
            helpers.extend(search.find_beside(dir, &libcuda, &soname)?);
        }
        let missing = || DriverError::MissingFile {
            path: root.join(dir).join(LIBNVML),
        };
        let (control_nodes, dev_root) = search.find_device_nodes(dir, dev_root)?;
        Ok(Driver {
            libnvml: search
                .find_beside(dir, &libcuda, LIBNVML)?
                .ok_or_else(missing)?,
            libcuda,
            helpers,
            smi: search.find_file(tools_dir(dir), NVIDIA_SMI)?,
            version,
            control_nodes,
            dev_root,
        })
    }

    /// All libraries, the driver API library first.
    pub fn files(&self) -> impl Iterator<Item = &DriverFile> {
        [&self.libcuda, &self.libnvml]
            .into_iter()
            .chain(&self.helpers)
    }
}

/// The `bin` directory beside a library directory: `usr/bin` for `usr/lib64` and
/// `usr/lib/<arch>-linux-gnu`.
fn tools_dir(dir: &str) -> PathBuf {
    let above = Path::new(dir).iter();
    let above: PathBuf = above
        .take_while(|part| !part.as_encoded_bytes().starts_with(b"lib"))
        .collect();
    above.join("bin")
}

/// The version in the file name: `580.95.05` of `libcuda.so.580.95.05`.
fn version_of(libcuda: &DriverFile) -> Option<String> {
    let name = libcuda.path.file_name()?.to_str()?;
    let version = name.strip_prefix("libcuda.so.")?;
    version.contains('.').then(|| version.to_owned())
}

#[cfg(test)]
mod tests;
