//! Sets up the mount and network namespaces of the node process.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::thread::UnshareFlags;

use super::netlink;
use crate::environment::has_driver;

/// Folders over which the node process mounts a tmpfs, so that they begin empty whatever the host
/// has in them.
const PRIVATE_FOLDERS: &[&str] = &[
    "/var/lib/kubelet",
    "/var/lib/bursar",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/run/bursar",
    "/run/cdi",
    "/run/cni",
    "/run/containerd",
    "/run/netns",
    "/run/simgpu",
    "/var/log/containers",
    "/var/log/pods",
];

/// The folders of [`PRIVATE_FOLDERS`] whose content a reboot removes. `/run/simgpu` stays, because
/// the simulated GPUs are hardware. The simulator frees their memory when its processes are gone.
const VOLATILE_FOLDERS: &[&str] = &[
    "/run/bursar",
    "/run/cdi",
    "/run/cni",
    "/run/containerd",
    "/run/netns",
];

/// The file systems mounted in `/dev`.
const DEV_FILE_SYSTEMS: &[&str] = &["/dev/pts", "/dev/shm"];

/// Kernel settings that the kubelet would change (kubernetes
/// `pkg/kubelet/cm/container_manager_linux.go`, `setupKernelTunables`). The kubelet reads its
/// desired values from bind mounts, so that the host's settings stay.
const SYSCTLS: &[(&str, &str)] = &[
    ("/proc/sys/vm/overcommit_memory", "1"),
    ("/proc/sys/vm/panic_on_oom", "0"),
    ("/proc/sys/kernel/panic", "10"),
    ("/proc/sys/kernel/panic_on_oops", "1"),
    ("/proc/sys/kernel/keys/root_maxkeys", "1000000"),
    ("/proc/sys/kernel/keys/root_maxbytes", "25000000"),
];

/// The error of a step of the set-up.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct NamespaceError {
    step: String,
    source: io::Error,
}

fn at(step: impl Into<String>) -> impl FnOnce(io::Error) -> NamespaceError {
    let step = step.into();
    move |source| NamespaceError { step, source }
}

/// Moves this thread into a mount and a network namespace of its own and sets both up. Threads that
/// this thread starts later are in the same namespaces. `scratch` is an empty folder of the run
/// folder.
///
/// # Errors
/// When the kernel refuses a step; root is needed.
pub(super) fn enter(scratch: &Path) -> Result<(), NamespaceError> {
    #[expect(
        deprecated,
        reason = "unsound only with UnshareFlags::FILES, which is not set; the new form is unsafe"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET)
        .map_err(|error| at("new mount and network namespaces (root is needed)")(error.into()))?;
    set_up_mounts(scratch)?;
    let network = |source| at("the node's loopback link")(source);
    netlink::set_link_up(netlink::LOOPBACK).map_err(network)?;
    // Every node has the addresses of all: forwarders listen on those of the other nodes.
    let nodes = (1..=super::MAX_NODES).map(super::address);
    for address in nodes.chain([super::SERVICE_ADDRESS]) {
        netlink::add_address(netlink::LOOPBACK, address).map_err(network)?;
    }
    Ok(())
}

/// The ids of the mounts of this process (proc_pid_mountinfo(5)).
pub(super) type MountIds = BTreeSet<String>;

/// Returns the id and the mount point of each mount of this process.
fn mounts() -> io::Result<Vec<(String, String)>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let id = fields.next()?.to_owned();
        Some((id, fields.nth(3)?.to_owned()))
    };
    Ok(text.lines().filter_map(parse).collect())
}

/// Returns the mounts of this process.
///
/// # Errors
/// When they cannot be read.
pub(super) fn mount_ids() -> io::Result<MountIds> {
    Ok(mounts()?.into_iter().map(|(id, _)| id).collect())
}

/// Removes what a machine loses with its power: all mounts except `kept`, those of the set-up, with
/// the content of [`VOLATILE_FOLDERS`]. The caller has killed all processes.
///
/// # Errors
/// When a mount or a file cannot be removed.
pub(super) fn forget_volatile_state(kept: &MountIds) -> io::Result<()> {
    for (id, mount_point) in mounts()?.iter().rev() {
        if !kept.contains(id) {
            match unmount(mount_point.as_str(), UnmountFlags::DETACH) {
                // The kernel has unmounted the mount already, with another of its peer group.
                Err(Errno::INVAL | Errno::NOENT) => {}
                other => other?,
            }
        }
    }
    for folder in VOLATILE_FOLDERS {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
    }
    Ok(())
}

/// Unmounts the tmpfs of `scratch`, so that the run folder around it can be removed.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn leave(scratch: &Path) -> io::Result<()> {
    Ok(unmount(scratch, UnmountFlags::DETACH)?)
}

fn set_up_mounts(scratch: &Path) -> Result<(), NamespaceError> {
    // No mount propagates to the host; inside the namespace, mounts propagate from the kubelet to
    // containers.
    for change in [
        MountPropagationFlags::PRIVATE,
        MountPropagationFlags::SHARED,
    ] {
        mount_change("/", change | MountPropagationFlags::REC)
            .map_err(|error| at("mount propagation of /")(error.into()))?;
    }
    tmpfs(scratch)?;
    for folder in ["/run", "/var/lib", "/var/log"] {
        copy_on_write(scratch, Path::new(folder))?;
    }
    for folder in PRIVATE_FOLDERS {
        fs::create_dir_all(folder).map_err(at(*folder))?;
        tmpfs(Path::new(folder))?;
    }
    for (path, value) in SYSCTLS {
        bind_value(scratch, Path::new(path), value)?;
    }
    mount_proc(scratch)?;
    if has_driver() {
        return Ok(());
    }
    private_dev(scratch)
}

/// Mounts a `/dev` with room for device nodes of simulated GPUs, which the host's `/dev` must not
/// get.
fn private_dev(scratch: &Path) -> Result<(), NamespaceError> {
    let bind = |from: &Path, to: &Path| {
        let step = || format!("bind {} to {}", from.display(), to.display());
        mount_bind(from, to).map_err(|error| at(step())(error.into()))
    };
    let kept = |folder: &str| scratch.join(folder.replace('/', "_"));
    for folder in DEV_FILE_SYSTEMS {
        fs::create_dir_all(kept(folder)).map_err(at(*folder))?;
        bind(Path::new(folder), &kept(folder))?;
    }
    copy_on_write(scratch, Path::new("/dev"))?;
    for folder in DEV_FILE_SYSTEMS {
        bind(&kept(folder), Path::new(folder))?;
    }
    Ok(())
}

/// Mounts a `/proc` without bind mounts over its files. Within a user namespace the kernel refuses
/// to mount a `/proc` unless such a whole one exists (`fs/namespace.c`, `mount_too_revealing`).
fn mount_proc(scratch: &Path) -> Result<(), NamespaceError> {
    let folder = scratch.join("proc");
    fs::create_dir_all(&folder).map_err(at(folder.display().to_string()))?;
    mount("proc", &folder, "proc", MountFlags::empty(), None)
        .map_err(|error| at(format!("proc on {}", folder.display()))(error.into()))
}

fn tmpfs(folder: &Path) -> Result<(), NamespaceError> {
    mount("tmpfs", folder, "tmpfs", MountFlags::empty(), None)
        .map_err(|error| at(format!("tmpfs on {}", folder.display()))(error.into()))
}

/// Mounts an overlay in the scratch folder over `folder`, so that the host's folder is only read.
fn copy_on_write(scratch: &Path, folder: &Path) -> Result<(), NamespaceError> {
    let layer = |kind: &str| -> Result<PathBuf, NamespaceError> {
        let name = folder.display().to_string().replace('/', "_");
        let path = scratch.join(format!("{kind}{name}"));
        fs::create_dir_all(&path).map_err(at(path.display().to_string()))?;
        Ok(path)
    };
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        folder.display(),
        layer("upper")?.display(),
        layer("work")?.display()
    );
    let options =
        std::ffi::CString::new(options).map_err(|error| at("overlay options")(error.into()))?;
    mount(
        "overlay",
        folder,
        "overlay",
        MountFlags::empty(),
        Some(options.as_c_str()),
    )
    .map_err(|error| at(format!("overlay on {}", folder.display()))(error.into()))
}

/// Binds a file with `value` over the kernel setting `path`, if the setting exists.
fn bind_value(scratch: &Path, path: &Path, value: &str) -> Result<(), NamespaceError> {
    if !path.exists() {
        return Ok(());
    }
    let file = scratch.join(path.display().to_string().replace('/', "_"));
    fs::write(&file, format!("{value}\n")).map_err(at(file.display().to_string()))?;
    mount_bind(&file, path)
        .map_err(|error| at(format!("bind over {}", path.display()))(error.into()))
}
