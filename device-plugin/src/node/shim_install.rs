//! Puts the shims' files where containers can map them: once per build and driver, never over a file in use.
//!
//! A container maps `<state-dir>/shim/<id>/libcuda.so.1` for as long as it runs. So what is written has a
//! folder of its own, named after its content; an upgrade of shim or driver adds a folder and changes no other. It is
//! on disk before it has its name, and one that is not what was written, after a loss of power or by hand, is mended
//! file by file: who has a file mapped keeps the one that he has. The agent removes a
//! folder of another build once no CDI file names it: the container runtime reads that file again when the kubelet
//! restarts a container.
//!
//! | file | what |
//! |---|---|
//! | `libcuda.so.1`, `libnvidia-ml.so.1` | the shims, without the names that this node's driver lacks ([`symbols`]) |
//! | `libcuda.so` | a link to the shim, for compilers (`-lcuda`) |
//! | `cuda-stub.so` | the name `libcuda.so` for loaders ([`build_stub`]) |
//! | `ld.so.preload` | the loader's list of them, a container's `/etc/ld.so.preload` |

mod stub;
mod symbols;

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tracing::info;

use crate::node::cdi::CONTAINER_LIB_DIR;
use crate::node::driver_files::{Driver, LIBCUDA, LIBNVML};

/// The loader's list, beside the shim; mounted as the container's `/etc/ld.so.preload`.
pub const PRELOAD_FILE: &str = "ld.so.preload";

/// The libraries of the driver that a container gets a shim for.
pub const SHIMS: &[&str] = &[LIBCUDA, LIBNVML];

/// The developer's name for the shim, beside it.
const DEV_LINK: &str = "libcuda.so";

/// The stub's file: its name is none that `ldconfig` takes for a library.
const STUB: &str = "cuda-stub.so";

/// How old a temporary folder is whose agent has certainly died.
const STALE_AFTER: Duration = Duration::from_secs(3600);

/// What went wrong with the shim's files.
#[derive(Debug, thiserror::Error)]
pub enum ShimInstallError {
    /// The image lacks the shim.
    #[error("read the shim {}: {source} (set paths.shim-dir to the folder that has it)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The names that a library has could not be read.
    #[error("read the symbols of {}: {source}", path.display())]
    Symbols {
        /// The shim, or the driver's library.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// The folder of this build could not be made.
    #[error("install the shim in {}: {source}", path.display())]
    Install {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A file of the folder.
struct ShimFile {
    name: &'static str,
    bytes: Vec<u8>,
    mode: u32,
}

/// Copies the shims of `shim_dir` to a folder below `state_dir` unless they are there as they should be for `driver`,
/// and returns that folder. Two agents that do so at the same time both end with the one folder.
///
/// # Errors
/// [`ShimInstallError`].
pub fn install(
    shim_dir: &Path,
    driver: &Driver,
    state_dir: &Path,
) -> Result<PathBuf, ShimInstallError> {
    let files = build_files(shim_dir, driver)?;
    let builds = state_dir.join("shim");
    let path = builds.join(build_id(&files));
    let installed = fs::create_dir_all(&builds).and_then(|()| {
        remove_stale(&builds);
        match path.is_dir() {
            true => repair_build(&path, &files),
            false => create_build(&path, &files),
        }
    });
    match installed {
        Ok(()) => Ok(path),
        Err(source) => Err(ShimInstallError::Install { path, source }),
    }
}

/// Removes the builds below `state_dir` that have no path of `in_use`.
///
/// # Errors
/// The first build that could not be removed.
pub fn remove_unused(state_dir: &Path, in_use: &[PathBuf]) -> io::Result<()> {
    for entry in fs::read_dir(state_dir.join("shim"))? {
        let entry = entry?;
        let path = entry.path();
        // Hidden folders may be those that another agent is making.
        let is_build = !entry.file_name().as_encoded_bytes().starts_with(b".");
        let is_used = in_use.iter().any(|used| used.starts_with(&path));
        if is_build && !is_used {
            fs::remove_dir_all(&path)?;
            info!(build = %path.display(), "shim build removed");
        }
    }
    Ok(())
}

fn build_files(shim_dir: &Path, driver: &Driver) -> Result<Vec<ShimFile>, ShimInstallError> {
    let mut files = Vec::new();
    for name in SHIMS {
        let bytes = hide_missing_symbols(&shim_dir.join(name), driver, name)?;
        files.push(ShimFile {
            name,
            bytes,
            mode: 0o755,
        });
    }
    let preload: String = SHIMS
        .iter()
        .chain([&STUB])
        .map(|name| format!("{CONTAINER_LIB_DIR}/{name}\n"))
        .collect();
    files.push(ShimFile {
        name: STUB,
        bytes: stub::build_stub(DEV_LINK, LIBCUDA),
        mode: 0o755,
    });
    files.push(ShimFile {
        name: PRELOAD_FILE,
        bytes: preload.into_bytes(),
        mode: 0o644,
    });
    Ok(files)
}

/// The shim of `path` without the names that the driver's library lacks.
fn hide_missing_symbols(
    path: &Path,
    driver: &Driver,
    name: &str,
) -> Result<Vec<u8>, ShimInstallError> {
    let symbols = |path: &Path| {
        let path = path.to_owned();
        move |source| ShimInstallError::Symbols { path, source }
    };
    let mut library = fs::read(path).map_err(|source| ShimInstallError::Read {
        path: path.to_owned(),
        source,
    })?;
    if let Some(real) = driver.files().find(|file| file.soname == name) {
        let kept = symbols::exported_names(&real.path).map_err(symbols(&real.path))?;
        symbols::hide_names(&mut library, &kept).map_err(symbols(path))?;
    }
    Ok(library)
}

/// A name beside `path` that no other agent has, and that no container is given.
fn temporary_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// A new folder, whole and on disk before it has its name.
fn create_build(path: &Path, files: &[ShimFile]) -> io::Result<()> {
    let temporary = temporary_path(path);
    remove_dir_if_exists(&temporary)?;
    fs::create_dir(&temporary)?;
    set_mode(&temporary, 0o755)?;
    repair_build(&temporary, files)?;
    match fs::rename(&temporary, path) {
        Err(_) if path.is_dir() => fs::remove_dir_all(&temporary),
        renamed => renamed,
    }?;
    sync_to_disk(path.parent().unwrap_or(path))
}

/// Writes what is not in `folder` as it should be; nothing where all is.
fn repair_build(folder: &Path, files: &[ShimFile]) -> io::Result<()> {
    let mut mended = false;
    for ShimFile { name, bytes, mode } in files {
        let path = folder.join(name);
        if !has_content(&path, bytes) {
            replace_file(&path, |temporary| write_synced(temporary, bytes, *mode))?;
            mended = true;
        }
    }
    let link = folder.join(DEV_LINK);
    if fs::read_link(&link).ok().as_deref() != Some(Path::new(LIBCUDA)) {
        replace_file(&link, |temporary| symlink(LIBCUDA, temporary))?;
        mended = true;
    }
    if mended { sync_to_disk(folder) } else { Ok(()) }
}

fn has_content(path: &Path, content: &[u8]) -> bool {
    // Its length first: what a loss of power leaves is mostly empty.
    path.metadata()
        .is_ok_and(|file| file.len() == content.len() as u64)
        && fs::read(path).is_ok_and(|found| found == content)
}

fn replace_file(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary_path(path);
    // One of a predecessor with the same process id.
    let _ = fs::remove_file(&temporary);
    write(&temporary)?;
    fs::rename(&temporary, path)
}

/// Best effort: what stays is looked at again.
fn remove_stale(builds: &Path) {
    for entry in fs::read_dir(builds).into_iter().flatten().flatten() {
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let modified = entry.metadata().and_then(|entry| entry.modified());
        let age = modified.ok().and_then(|modified| modified.elapsed().ok());
        if hidden && age.is_some_and(|age| age > STALE_AFTER) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sync_to_disk(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The first 16 hex digits of a SHA-256 of all names and contents.
fn build_id(files: &[ShimFile]) -> String {
    let mut id = Sha256::new();
    for ShimFile { name, bytes, .. } in files {
        id.update(name);
        id.update(Sha256::digest(bytes));
    }
    let id = id.finalize();
    id.iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Containers run as any user: the mode must not depend on the agent's umask.
fn write_synced(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    fs::write(path, content)?;
    set_mode(path, mode)?;
    sync_to_disk(path)
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn remove_dir_if_exists(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
