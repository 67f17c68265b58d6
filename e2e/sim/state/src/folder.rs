//! Lays out the directory of a simulated machine and names the paths in it.

use crate::config::{Config, ConfigError, Version};
use crate::table::{Table, TableError};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The directory of a simulated machine.
#[derive(Debug, Clone)]
pub struct MachineDir(PathBuf);

/// Reasons why the directory could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The configuration was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The table could not be created.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A file could not be created.
    #[error("failed to {step} {path}")]
    Io {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A library is neither the simulated libcuda nor the simulated NVML.
    #[error("{0} is neither libbursar_sim_cuda.so nor libbursar_sim_nvml.so")]
    UnknownLibrary(PathBuf),
}

impl MachineDir {
    /// Refers to the directory at this path, which need not exist.
    pub fn at(path: impl Into<PathBuf>) -> MachineDir {
        MachineDir(path.into())
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }
    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.0.join("config.toml")
    }
    /// The table that all processes map.
    pub fn table(&self) -> PathBuf {
        self.0.join("state/table")
    }
    /// The lock file in which each live image locks a byte.
    pub fn images_lock(&self) -> PathBuf {
        self.0.join("state/images.lock")
    }
    /// The lock file in which each live image locks a byte so that observers learn its pid.
    pub fn pids_lock(&self) -> PathBuf {
        self.0.join("state/pids.lock")
    }
    /// The file of a shared allocation.
    pub fn object(&self, id: u64) -> PathBuf {
        self.0.join(format!("state/mem/{id:016x}"))
    }
    /// The contents of a unit's last freed memory, recorded while scrubbing is off.
    pub fn residue(&self, unit: usize) -> PathBuf {
        self.0.join(format!("state/residue-{unit}"))
    }
    /// How `cuInit` fails in processes that see a unit.
    pub fn init_fault(&self, unit: usize) -> PathBuf {
        self.0.join(format!("state/init-fault-{unit}"))
    }
    /// The memory limits set through NVML, a line each: UUID, soft, hard, cgroup.
    pub fn memory_limits(&self) -> PathBuf {
        self.0.join("state/memory-limits")
    }
    /// The log of calls that the libraries do not support.
    pub fn log(&self) -> PathBuf {
        self.0.join("state/log")
    }
    /// The simulated kernel log, with a line for each XID.
    pub fn kernel_log(&self) -> PathBuf {
        self.0.join("state/kernel-log")
    }
    /// A file with the inode of the host's pid namespace, in which `simgpu init` ran.
    ///
    /// Pids in the kernel log are pids of that namespace.
    pub fn pid_namespace(&self) -> PathBuf {
        self.0.join("state/pid-namespace")
    }
    /// A file that says under which boot, and in which pid namespace, the state was made.
    fn origin(&self) -> PathBuf {
        self.0.join("state/origin")
    }
    /// The directory of device nodes.
    pub fn dev(&self) -> PathBuf {
        self.0.join("dev")
    }
    /// The directory of the parameters of the driver's module for managed memory, as in `/sys`.
    pub fn uvm_parameters(&self) -> PathBuf {
        self.0.join("sys/module/nvidia_uvm/parameters")
    }
    /// The version of the loaded module, as in `/sys`.
    pub fn module_version(&self) -> PathBuf {
        self.0.join("sys/module/nvidia/version")
    }
    /// The directory of the two driver libraries.
    pub fn libraries(&self) -> PathBuf {
        self.0.join("driver/usr/lib/x86_64-linux-gnu")
    }

    /// Lays the directory out: configuration, empty state, device nodes, and copies of `libraries`.
    ///
    /// Replaces previous state; processes that already run over the directory keep the old one.
    ///
    /// # Errors
    /// The configuration is invalid or a file cannot be written; the error names the file.
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
        let text = std::fs::read(config).map_err(io_error("read", config))?;
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
        let namespace = namespace.map_err(io_error(
            "read the pid namespace for",
            &self.pid_namespace(),
        ))?;
        write_file(&self.pid_namespace(), namespace.to_string().as_bytes())?;
        for mode in [
            (self.0.join("state"), 0o777),
            (self.0.join("state/mem"), 0o777),
        ] {
            set_mode(&mode.0, mode.1)?;
        }
        Table::create(&self.table(), &parsed)?;
        let origin = current_origin().map_err(io_error("read the boot for", &self.origin()))?;
        write_file(&self.origin(), origin.as_bytes())?;
        self.install_driver(&parsed, libraries)
    }

    /// Lays the directory out as [`MachineDir::init`] does, but may keep the state. It keeps the
    /// state if the machine has not started anew, and the configuration and the format of the table
    /// are the same.
    ///
    /// # Errors
    /// As [`MachineDir::init`].
    pub fn init_or_keep(&self, config: &Path, libraries: &[PathBuf]) -> Result<(), InitError> {
        let parsed = Config::read(config)?;
        let text = std::fs::read(config).map_err(io_error("read", config))?;
        let origin = current_origin().map_err(io_error("read the boot for", &self.origin()))?;
        let keeps = std::fs::read(self.config()).is_ok_and(|there| there == text)
            && std::fs::read_to_string(self.origin()).is_ok_and(|there| there == origin)
            && Table::open(&self.table()).is_ok();
        if !keeps {
            return self.init(config, libraries);
        }
        self.install_driver(&parsed, libraries)
    }

    /// Creates the device nodes and what `/sys` has of the modules, and copies `libraries`.
    fn install_driver(&self, parsed: &Config, libraries: &[PathBuf]) -> Result<(), InitError> {
        for gpu in &parsed.gpu {
            let node = format!("nvidia{}", gpu.minor);
            create_node(&self.dev().join(node), gpu_device_number(gpu.minor))?;
        }
        // These nodes have the device number of `/dev/zero`, because libcuda opens and maps them:
        // the first in `cuInit`, the other for managed memory.
        for node in ["nvidiactl", "nvidia-uvm"] {
            create_node(&self.dev().join(node), libc::makedev(1, 5))?;
        }
        create_node(
            &self.dev().join("nvidia-uvm-tools"),
            libc::makedev(UVM_MAJOR, 1),
        )?;
        let (parameters, version) = (self.uvm_parameters(), self.module_version());
        create_dir(&parameters)?;
        create_dir(version.parent().unwrap_or(&self.0))?;
        write_file(&version, format!("{}\n", parsed.driver_version).as_bytes())?;
        let oversubscription = u8::from(parsed.uvm_oversubscription).to_string();
        let hmm_disabled = if parsed.pageable_memory { "N" } else { "Y" };
        for (parameter, value) in [
            ("uvm_global_oversubscription", oversubscription.as_str()),
            ("uvm_disable_hmm", hmm_disabled),
        ] {
            write_file(&parameters.join(parameter), value.as_bytes())?;
        }
        libraries
            .iter()
            .try_for_each(|library| self.install(library, parsed.cuda_version))
    }

    /// Replaces the control node by a link to the file that a simulated kernel module serves, and
    /// the GPUs' nodes by ones that can be opened, like `/dev/zero`.
    ///
    /// # Errors
    /// A node cannot be replaced; the error names it.
    pub fn lead_control_node_to(&self, file: &Path, minors: &[u32]) -> Result<(), InitError> {
        let control = self.dev().join("nvidiactl");
        let _ = std::fs::remove_file(&control);
        std::os::unix::fs::symlink(file, &control).map_err(io_error("link", &control))?;
        for minor in minors {
            let node = self.dev().join(format!("nvidia{minor}"));
            create_node(&node, libc::makedev(1, 5))?;
        }
        Ok(())
    }

    fn install(&self, library: &Path, version: Version) -> Result<(), InitError> {
        let name = match library.file_name().and_then(|name| name.to_str()) {
            Some("libbursar_sim_cuda.so" | "libcuda.so.1") => "libcuda.so.1",
            Some("libbursar_sim_nvml.so" | "libnvidia-ml.so.1") => "libnvidia-ml.so.1",
            _ => return Err(InitError::UnknownLibrary(library.to_owned())),
        };
        // A rename leaves the old file to processes that have it mapped.
        let (target, fresh) = (
            self.libraries().join(name),
            self.libraries().join(format!(".{name}")),
        );
        std::fs::copy(library, &fresh).map_err(io_error("copy", library))?;
        if (version.major, version.minor) < (12, 2) {
            hide_symbols(&fresh, SYMBOLS_SINCE_CUDA_12_2)
                .map_err(io_error("hide symbols of", &fresh))?;
        }
        std::fs::rename(&fresh, &target).map_err(io_error("rename to", &target))
    }
}

/// The boot and the pid namespace of this process: what another one of them refers to is gone.
fn current_origin() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(format!("{} {}", boot.trim(), crate::lock::pid_namespace()?))
}

/// Functions that drivers before CUDA 12.2 do not export.
const SYMBOLS_SINCE_CUDA_12_2: [&str; 2] = ["cuMemAdvise_v2", "cuMemPrefetchAsync_v2"];

/// Renames exported functions in place, so that no program finds them.
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
    std::fs::create_dir_all(path).map_err(io_error("create", path))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), InitError> {
    std::fs::write(path, bytes).map_err(io_error("write", path))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), InitError> {
    let mode = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, mode).map_err(io_error("set the mode of", path))
}

/// Major numbers for local and experimental use (Documentation/admin-guide/devices.txt).
///
/// No driver serves them: a device cgroup can tell the nodes apart, and opening one fails with
/// ENXIO.
const GPU_MAJOR: u32 = 120;
const UVM_MAJOR: u32 = 121;

fn gpu_device_number(minor: u32) -> libc::dev_t {
    libc::makedev(GPU_MAJOR, minor)
}

/// Creates a GPU's node in `dev`, as libcuda does in `cuInit` for every GPU of the machine.
///
/// libcuda does so only as root with `CAP_MKNOD` (seen on an H200 with driver 580); other processes
/// create nothing.
pub fn create_gpu_node(dev: &Path, minor: u32) {
    let path = dev.join(format!("nvidia{minor}"));
    if is_initial_user_namespace()
        && path.symlink_metadata().is_err()
        && mknod(&path, gpu_device_number(minor)).is_ok()
    {
        let _ = set_mode(&path, 0o666);
    }
}

/// Whether this process runs in the initial user namespace.
///
/// The device nodes that a process creates in another user namespace cannot be opened.
fn is_initial_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Whether the container runtime gave this node to the container.
///
/// In the initial user namespace libcuda creates the nodes of all GPUs, so access(2) decides, which
/// respects the device cgroup. In another user namespace libcuda creates none, so existence
/// decides.
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

/// Creates a character device, which can be mounted as a device and matched by a device cgroup.
///
/// Without permission it creates a regular file instead: the libraries only check access to the
/// node.
fn create_node(path: &Path, number: libc::dev_t) -> Result<(), InitError> {
    let _ = std::fs::remove_file(path);
    match mknod(path, number) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => write_file(path, b"")?,
        created => created.map_err(io_error("create", path))?,
    }
    set_mode(path, 0o666)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sim;

    fn config(folder: &Path, memory: &str) -> PathBuf {
        let path = folder.join("config.toml");
        let text = format!(
            "[[gpu]]\nname = \"x\"\nuuid = \"GPU-00000000-0000-4000-8000-000000000000\"\n\
             memory = \"{memory}\"\nminor = 0\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn state_is_kept_on_the_same_boot_with_the_same_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let machine = MachineDir::at(folder.path().join("machine"));
        let is_lost = || Sim::open(machine.path()).unwrap().is_lost(0);
        let lose = || Sim::open(machine.path()).unwrap().set_lost(0, true);
        let small = config(folder.path(), "1Gi");
        machine.init_or_keep(&small, &[]).unwrap();
        lose();
        std::fs::remove_file(machine.dev().join("nvidia0")).unwrap();
        machine.init_or_keep(&small, &[]).unwrap();
        assert!(is_lost() && machine.dev().join("nvidia0").exists());

        let large = config(folder.path(), "2Gi");
        machine.init_or_keep(&large, &[]).unwrap();
        assert!(!is_lost(), "other GPUs have a new state");
        lose();
        std::fs::write(machine.origin(), "another boot").unwrap();
        machine.init_or_keep(&large, &[]).unwrap();
        assert!(!is_lost(), "another boot has a new state");
    }
}
