//! The folder that holds a simulated machine: its paths, and how it is laid out.

use crate::config::{Config, ConfigError, Version};
use crate::table::{Table, TableError};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where a machine's files are.
#[derive(Debug, Clone)]
pub struct MachineDir(PathBuf);

/// Why a folder could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The configuration was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The table could not be made.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A file could not be made.
    #[error("{step} {path}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A library is neither of the two.
    #[error("{0} is neither libbursar_sim_cuda.so nor libbursar_sim_nvml.so")]
    UnknownLibrary(PathBuf),
}

impl MachineDir {
    /// A folder at this path, which need not exist.
    pub fn at(path: impl Into<PathBuf>) -> MachineDir {
        MachineDir(path.into())
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }
    /// The configuration.
    pub fn config(&self) -> PathBuf {
        self.0.join("config.toml")
    }
    /// The shared table.
    pub fn table(&self) -> PathBuf {
        self.0.join("state/table")
    }
    /// One locked byte per living image.
    pub fn images_lock(&self) -> PathBuf {
        self.0.join("state/images.lock")
    }
    /// One locked byte per living image, for its pid.
    pub fn pids_lock(&self) -> PathBuf {
        self.0.join("state/pids.lock")
    }
    /// The file of a shared allocation.
    pub fn object(&self, id: u64) -> PathBuf {
        self.0.join(format!("state/mem/{id:016x}"))
    }
    /// What freed memory of a unit held last, with scrubbing off.
    pub fn residue(&self, unit: usize) -> PathBuf {
        self.0.join(format!("state/residue-{unit}"))
    }
    /// The memory limits that NVML was told, a line each: UUID, soft, hard, cgroup.
    pub fn memory_limits(&self) -> PathBuf {
        self.0.join("state/memory-limits")
    }
    /// The log of calls that the libraries do not know.
    pub fn log(&self) -> PathBuf {
        self.0.join("state/log")
    }
    /// What the kernel would log of the driver: a line an XID.
    pub fn kernel_log(&self) -> PathBuf {
        self.0.join("state/kernel-log")
    }
    /// The pid namespace that the folder was laid out in: the machine's own, which the kernel's log speaks of.
    pub fn pid_namespace(&self) -> PathBuf {
        self.0.join("state/pid-namespace")
    }
    /// The device nodes.
    pub fn dev(&self) -> PathBuf {
        self.0.join("dev")
    }
    /// The folder that holds the two libraries.
    pub fn libraries(&self) -> PathBuf {
        self.0.join("driver/usr/lib/x86_64-linux-gnu")
    }

    /// Lays the folder out: configuration, empty state, device nodes, and copies of `libraries`.
    /// What was there before is forgotten; processes that run over it keep the old state.
    ///
    /// # Errors
    /// A bad configuration, or a file that cannot be written; the message says which.
    pub fn init(&self, config: &Path, libraries: &[PathBuf]) -> Result<(), InitError> {
        let parsed = Config::read(config)?;
        let _ = std::fs::remove_dir_all(self.0.join("state"));
        for folder in [
            "state",
            "state/mem",
            "dev",
            "driver/usr/lib/x86_64-linux-gnu",
        ] {
            create_dir(&self.0.join(folder))?;
        }
        let text = std::fs::read(config).map_err(io_error("reading", config))?;
        write_file(&self.config(), &text)?;
        for file in [
            self.images_lock(),
            self.pids_lock(),
            self.log(),
            self.kernel_log(),
        ] {
            write_file(&file, b"")?;
            set_mode(&file, 0o666)?;
        }
        let namespace = crate::lock::pid_namespace();
        let namespace = namespace.map_err(io_error("asking for", &self.pid_namespace()))?;
        write_file(&self.pid_namespace(), namespace.to_string().as_bytes())?;
        for mode in [
            (self.0.join("state"), 0o777),
            (self.0.join("state/mem"), 0o777),
        ] {
            set_mode(&mode.0, mode.1)?;
        }
        Table::create(&self.table(), &parsed)?;
        for gpu in &parsed.gpu {
            let node = format!("nvidia{}", gpu.minor);
            create_node(&self.dev().join(node), gpu_device_number(gpu.minor))?;
        }
        // `/dev/zero` underneath: libcuda opens and maps it in `cuInit`.
        create_node(&self.dev().join("nvidiactl"), libc::makedev(1, 5))?;
        let others = ["nvidia-uvm", "nvidia-uvm-tools"];
        for (node, minor) in others.into_iter().zip(0..) {
            create_node(&self.dev().join(node), libc::makedev(UVM_MAJOR, minor))?;
        }
        libraries
            .iter()
            .try_for_each(|library| self.install(library, parsed.cuda_version))
    }

    fn install(&self, library: &Path, version: Version) -> Result<(), InitError> {
        let name = match library.file_name().and_then(|name| name.to_str()) {
            Some("libbursar_sim_cuda.so" | "libcuda.so.1") => "libcuda.so.1",
            Some("libbursar_sim_nvml.so" | "libnvidia-ml.so.1") => "libnvidia-ml.so.1",
            _ => return Err(InitError::UnknownLibrary(library.to_owned())),
        };
        // A new file and a rename: a process that runs over the old one keeps it.
        let (target, fresh) = (
            self.libraries().join(name),
            self.libraries().join(format!(".{name}")),
        );
        std::fs::copy(library, &fresh).map_err(io_error("copying", library))?;
        if (version.major, version.minor) < (12, 2) {
            hide_symbols(&fresh, SYMBOLS_SINCE_CUDA_12_2).map_err(io_error("changing", &fresh))?;
        }
        std::fs::rename(&fresh, &target).map_err(io_error("renaming to", &target))
    }
}

/// Functions that an older driver does not export.
const SYMBOLS_SINCE_CUDA_12_2: [&str; 2] = ["cuMemAdvise_v2", "cuMemPrefetchAsync_v2"];

/// Has a library export functions under names that nobody asks for.
fn hide_symbols(library: &Path, names: [&str; 2]) -> io::Result<()> {
    let mut bytes = std::fs::read(library)?;
    for name in names.map(|name| format!("\0{name}\0")) {
        let find = |bytes: &[u8]| {
            bytes
                .windows(name.len())
                .position(|at| at == name.as_bytes())
        };
        while let Some(at) = find(&bytes) {
            bytes[at + 1] = b'_';
        }
    }
    std::fs::write(library, bytes)
}

fn io_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InitError {
    let path = path.to_owned();
    move |source| InitError::Io { step, path, source }
}

fn create_dir(path: &Path) -> Result<(), InitError> {
    std::fs::create_dir_all(path).map_err(io_error("creating", path))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), InitError> {
    std::fs::write(path, bytes).map_err(io_error("writing", path))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), InitError> {
    let mode = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, mode).map_err(io_error("changing the mode of", path))
}

/// Majors that no driver has (Documentation/admin-guide/devices.txt: local and experimental use). A device cgroup tells
/// GPUs apart by the number, and who opens one gets ENXIO.
const GPU_MAJOR: u32 = 120;
const UVM_MAJOR: u32 = 121;

/// The number of the device of the GPU with that minor.
fn gpu_device_number(minor: u32) -> libc::dev_t {
    libc::makedev(GPU_MAJOR, minor)
}

/// Makes the node of a GPU in `dev`, as libcuda does in `cuInit` for every GPU of the machine: where the process is
/// root and has `CAP_MKNOD` (seen on an H200 with driver 580). Elsewhere nothing happens.
pub fn create_gpu_node(dev: &Path, minor: u32) {
    let path = dev.join(format!("nvidia{minor}"));
    if is_initial_user_namespace()
        && path.symlink_metadata().is_err()
        && mknod(&path, gpu_device_number(minor)).is_ok()
    {
        let _ = set_mode(&path, 0o666);
    }
}

/// Whether this process has users of the host's: no other process can make a node that is of any use.
fn is_initial_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Whether a container was given this node: libcuda makes those of other GPUs too, but the device cgroup lets the
/// process open its own only, as access(2) says. In a user namespace of its own a process makes none.
pub fn is_device_allowed(path: &Path) -> bool {
    if !is_initial_user_namespace() {
        return path.exists();
    }
    let name = CString::new(path.as_os_str().as_bytes());
    // SAFETY: `name` is a NUL-terminated string that lives through the call.
    name.is_ok_and(|name| unsafe { libc::access(name.as_ptr(), libc::R_OK | libc::W_OK) } == 0)
}

fn mknod(path: &Path, number: libc::dev_t) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `name` is a NUL-terminated string that lives through the call.
    match unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o666, number) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A character device: real enough to be mounted as a device, and for a device cgroup. Where the
/// system does not let us make one, a plain file: the libraries only ask whether the node may be opened.
fn create_node(path: &Path, number: libc::dev_t) -> Result<(), InitError> {
    let _ = std::fs::remove_file(path);
    match mknod(path, number) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => write_file(path, b"")?,
        made => made.map_err(io_error("making", path))?,
    }
    set_mode(path, 0o666)
}
