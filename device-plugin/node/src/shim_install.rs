//! Installs the shims' files for containers to map: once per build and driver, never over a file in
//! use.
//!
//! A container maps `<state-dir>/shim/<id>/libcuda.so.1` for as long as it runs. Each build
//! therefore has its own directory, named after its content: an upgrade of shim or driver adds a
//! directory. The agent syncs a build to disk before the rename to its final name.
//!
//! The agent repairs a damaged build file by file, after a loss of power or a manual change.
//! Processes keep the files that they have mapped. The agent removes an old build once no CDI file
//! names it: the container runtime reads that file again when the kubelet restarts a container.
//!
//! | file | content |
//! |---|---|
//! | `libcuda.so.1`, `libnvidia-ml.so.1` | the entries, less symbols that the driver lacks |
//! | `cuda-shim.so`, `nvml-shim.so` | the shims, which the entries open at the first call |
//! | `libcuda.so` | a link to the entry, for compilers (`-lcuda`) |
//! | `cuda-stub.so` | a library with the SONAME `libcuda.so`, for loaders ([`stub`]) |
//! | `ld.so.preload` | the loader's list of them, a container's `/etc/ld.so.preload` |

mod stub;
mod symbols;

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_host::driver_files::{Driver, LIBCUDA, LIBNVML};
use sha2::{Digest, Sha256};
use tracing::info;

use crate::cdi::CONTAINER_LIB_DIR;

/// The loader's list, mounted as the container's `/etc/ld.so.preload`.
pub(crate) const PRELOAD_FILE: &str = "ld.so.preload";

/// A library that containers get in place of one of the driver's, and that opens a shim at the
/// first call.
pub(crate) struct Entry {
    /// The name of the driver's library, and of the shim in the agent's image.
    pub(crate) soname: &'static str,
    /// The compiled entry (`shim/entry`).
    library: &'static [u8],
    /// The shim's file name in the container. `bursar-node`'s build script compiles it into the
    /// entry, because the entry opens the shim by this name.
    shim: &'static str,
}

/// The entry of each library.
pub(crate) const ENTRIES: [Entry; 2] = [
    Entry {
        soname: LIBCUDA,
        library: include_bytes!(concat!(env!("OUT_DIR"), "/libcuda.so.1")),
        shim: "cuda-shim.so",
    },
    Entry {
        soname: LIBNVML,
        library: include_bytes!(concat!(env!("OUT_DIR"), "/libnvidia-ml.so.1")),
        shim: "nvml-shim.so",
    },
];

/// The shim's name for compilers.
const DEV_LINK: &str = "libcuda.so";

/// The stub's file name, which `ldconfig` takes for no library.
const STUB: &str = "cuda-stub.so";

/// The age at which a temporary directory certainly belongs to an agent that has died.
const STALE_AFTER: Duration = Duration::from_secs(3600);

/// The reason why the shim's files could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum ShimInstallError {
    /// The image lacks the shim.
    #[error("failed to read the shim {}: {source}; set paths.shim-dir to its directory", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The symbols of a library could not be read.
    #[error("failed to read the symbols of {}: {source}", path.display())]
    Symbols {
        /// The driver's library.
        path: PathBuf,
        /// The error of the file or of its format.
        source: io::Error,
    },
    /// The directory of the build could not be created.
    #[error("failed to install the shim in {}: {source}", path.display())]
    Install {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
}

/// A file of a build.
struct ShimFile {
    name: &'static str,
    bytes: Vec<u8>,
    mode: u32,
}

/// Installs the shims for `driver` below `state_dir` and returns the build's directory.
///
/// Two agents that install the same build at the same time end with one directory.
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

/// Removes the builds below `state_dir` that contain no path of `in_use`.
///
/// # Errors
/// The first build that could not be removed.
pub(crate) fn remove_unused(state_dir: &Path, in_use: &[PathBuf]) -> io::Result<()> {
    for entry in fs::read_dir(state_dir.join("shim"))? {
        let entry = entry?;
        let path = entry.path();
        // A hidden directory may be the work of another running agent.
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
    for entry in ENTRIES {
        let path = shim_dir.join(entry.soname);
        let shim = fs::read(&path).map_err(|source| ShimInstallError::Read { path, source })?;
        for (name, bytes) in [
            (entry.soname, hide_missing_symbols(&entry, driver)?),
            (entry.shim, shim),
        ] {
            files.push(ShimFile {
                name,
                bytes,
                mode: 0o755,
            });
        }
    }
    let preload: String = ENTRIES
        .iter()
        .map(|entry| entry.soname)
        .chain([STUB])
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

/// Copies an entry without the symbols that the driver's library of the same name lacks.
fn hide_missing_symbols(entry: &Entry, driver: &Driver) -> Result<Vec<u8>, ShimInstallError> {
    let mut library = entry.library.to_vec();
    if let Some(real) = driver.files().find(|file| file.soname == entry.soname) {
        let symbols = |source| ShimInstallError::Symbols {
            path: real.path.clone(),
            source,
        };
        let exported = symbols::exported_names(&real.path).map_err(symbols)?;
        symbols::hide_names(&mut library, &exported).map_err(symbols)?;
    }
    Ok(library)
}

/// A path beside `path` that no other agent uses and no container mounts.
fn temporary_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Creates a build: it is complete and on disk before it gets its final name.
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

/// Writes the files of `folder` that are missing or differ.
fn repair_build(folder: &Path, files: &[ShimFile]) -> io::Result<()> {
    let mut is_repaired = false;
    for ShimFile { name, bytes, mode } in files {
        let path = folder.join(name);
        if !has_content(&path, bytes) {
            replace_file(&path, |temporary| write_synced(temporary, bytes, *mode))?;
            is_repaired = true;
        }
    }
    let link = folder.join(DEV_LINK);
    if fs::read_link(&link).ok().as_deref() != Some(Path::new(LIBCUDA)) {
        replace_file(&link, |temporary| symlink(LIBCUDA, temporary))?;
        is_repaired = true;
    }
    if is_repaired {
        sync_to_disk(folder)
    } else {
        Ok(())
    }
}

fn has_content(path: &Path, content: &[u8]) -> bool {
    // The length first: after a loss of power a file is mostly empty.
    path.metadata()
        .is_ok_and(|file| file.len() == content.len() as u64)
        && fs::read(path).is_ok_and(|found| found == content)
}

fn replace_file(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary_path(path);
    // A dead agent with the same pid may have left a file of this name.
    let _ = fs::remove_file(&temporary);
    write(&temporary)?;
    fs::rename(&temporary, path)
}

/// An error is harmless: the next installation tries again.
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

/// Containers run as any user, so the mode must not depend on the agent's umask.
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
