//! Finds the NVIDIA driver's files and device nodes on a host.
//!
//! The driver lies in one of a few folders, by distribution ([`LIBRARY_DIRS`]); the first that
//! holds `libcuda.so.1` is the driver's, and everything else is taken from there, so that versions
//! never mix. Symbolic links are followed inside the root only: the agent sees the host's root
//! folder under another name.

mod rooted;

use std::path::{Path, PathBuf};

/// Where a driver's libraries are looked for below the driver's root, in this order.
///
/// | folder | who puts it there |
/// |---|---|
/// | `usr/lib/<arch>-linux-gnu` | Debian, Ubuntu |
/// | `usr/lib64` | RHEL, SUSE, Amazon Linux |
/// | `run/nvidia/driver/...` | NVIDIA's GPU operator, as a container on the host |
/// | `home/kubernetes/bin/nvidia/lib64` | Google's Container-Optimized OS |
/// | `usr/lib/nvidia/tesla`, `<arch>-bottlerocket-linux-gnu/...` | Bottlerocket |
/// | `usr/lib`, `usr/local/nvidia/lib64` | Arch Linux; images of cloud vendors |
pub const LIBRARY_DIRS: &[&str] = &[
    #[cfg(target_arch = "x86_64")]
    "usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    #[cfg(target_arch = "x86_64")]
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "run/nvidia/driver/usr/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "usr/lib/nvidia/tesla",
    #[cfg(target_arch = "x86_64")]
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    #[cfg(target_arch = "aarch64")]
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "usr/lib",
    "usr/local/nvidia/lib64",
];

/// The driver API library.
pub const LIBCUDA: &str = "libcuda.so.1";
/// The management library.
pub const LIBNVML: &str = "libnvidia-ml.so.1";

/// Libraries that `libcuda` loads by name when it has to: the JIT compilers and the debugger's
/// back end. Older drivers lack some of them.
const HELPERS: &[&str] = &[
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libcudadebugger.so.1",
];

/// Libraries whose file name carries the driver's version.
const VERSIONED_HELPERS: &[&str] = &["libnvidia-gpucomp.so"];

/// Device nodes that every GPU container needs, whatever its GPUs.
const CONTROL_NODES: &[&str] = &["nvidiactl", "nvidia-uvm"];

/// Device nodes that profilers need and that not every host has.
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
    /// The driver's version (`580.95.05`), where the library's file name carries it.
    pub version: Option<String>,
    /// Names of the device nodes that every GPU container gets, below `dev_root`.
    pub control_nodes: Vec<String>,
    /// The folder of the device nodes.
    pub dev_root: PathBuf,
}

/// One library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// The name by which programs ask for it.
    pub soname: String,
    /// The file as the agent sees it, links followed: to open it from the agent's own process.
    pub path: PathBuf,
    /// The same file as the container runtime sees it.
    pub host_path: PathBuf,
}

/// Why there is no usable driver. The message names the path and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// None of the folders has a `libcuda.so.1`.
    #[error(
        "no {LIBCUDA} below {root} (looked in {looked}): install the NVIDIA driver on this node, \
         or set driver.root to the folder that it is installed under",
        root = root.display(), looked = LIBRARY_DIRS.join(", ")
    )]
    NoLibrary {
        /// The folder that was searched.
        root: PathBuf,
    },
    /// The driver's folder lacks a library that every driver has.
    #[error("{} is missing beside {LIBCUDA}: the driver's installation is not complete", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A device node is not there.
    #[error(
        "device node {} is missing: load the driver's modules (nvidia-modprobe -c 0 -u), \
         or set driver.dev-root to the folder that has them",
        path.display()
    )]
    NoDeviceNode {
        /// The node.
        path: PathBuf,
    },
    /// A path could not be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl DriverError {
    /// A bounded word for conditions and metric labels.
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
    /// Finds the driver below `root`, which the container runtime knows as `host_root`, with its
    /// device nodes in `dev_root`.
    ///
    /// # Errors
    /// [`DriverError`] when a library or a control device node is not there.
    pub fn find(root: &Path, host_root: &Path, dev_root: &Path) -> Result<Driver, DriverError> {
        let search = Search { root, host_root };
        let (dir, libcuda) = search.driver_dir()?;
        let version = version_of(&libcuda);
        let required = |soname: &str| {
            let missing = || DriverError::MissingFile {
                path: root.join(dir).join(soname),
            };
            search.file(dir, soname)?.ok_or_else(missing)
        };
        let versioned = VERSIONED_HELPERS.iter().filter_map(|stem| {
            version
                .as_deref()
                .map(|version| format!("{stem}.{version}"))
        });
        let mut helpers = Vec::new();
        for soname in HELPERS
            .iter()
            .map(|soname| (*soname).to_owned())
            .chain(versioned)
        {
            helpers.extend(search.file(dir, &soname)?);
        }
        Ok(Driver {
            libnvml: required(LIBNVML)?,
            libcuda,
            helpers,
            version,
            control_nodes: control_nodes(dev_root)?,
            dev_root: dev_root.to_owned(),
        })
    }

    /// Every file, the driver API library first.
    pub fn files(&self) -> impl Iterator<Item = &DriverFile> {
        [&self.libcuda, &self.libnvml]
            .into_iter()
            .chain(&self.helpers)
    }
}

/// The names of the control nodes that are there.
fn control_nodes(dev_root: &Path) -> Result<Vec<String>, DriverError> {
    let mut nodes = Vec::new();
    for name in CONTROL_NODES {
        let path = dev_root.join(name);
        if !exists(&path)? {
            return Err(DriverError::NoDeviceNode { path });
        }
        nodes.push((*name).to_owned());
    }
    for name in OPTIONAL_NODES {
        if exists(&dev_root.join(name))? {
            nodes.push((*name).to_owned());
        }
    }
    Ok(nodes)
}

fn exists(path: &Path) -> Result<bool, DriverError> {
    path.try_exists().map_err(|source| DriverError::Read {
        path: path.to_owned(),
        source,
    })
}

/// `580.95.05` of `libcuda.so.580.95.05`.
fn version_of(libcuda: &DriverFile) -> Option<String> {
    let name = libcuda.path.file_name()?.to_str()?;
    let version = name.strip_prefix("libcuda.so.")?;
    version.contains('.').then(|| version.to_owned())
}

struct Search<'a> {
    root: &'a Path,
    host_root: &'a Path,
}

impl Search<'_> {
    /// The first folder with a `libcuda.so.1`, and that library.
    fn driver_dir(&self) -> Result<(&'static str, DriverFile), DriverError> {
        for dir in LIBRARY_DIRS {
            if let Some(libcuda) = self.file(dir, LIBCUDA)? {
                return Ok((dir, libcuda));
            }
        }
        Err(DriverError::NoLibrary {
            root: self.root.to_owned(),
        })
    }

    /// The file `soname` in `dir`, if it is there.
    fn file(&self, dir: &str, soname: &str) -> Result<Option<DriverFile>, DriverError> {
        let inside = Path::new(dir).join(soname);
        let found = rooted::resolve(self.root, &inside).map_err(|source| DriverError::Read {
            path: self.root.join(&inside),
            source,
        })?;
        Ok(found.map(|inside| DriverFile {
            soname: soname.to_owned(),
            path: self.root.join(&inside),
            host_path: self.host_root.join(&inside),
        }))
    }
}

#[cfg(test)]
mod tests;
