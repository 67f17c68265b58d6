//! Puts the shim's files where containers can map them: once per build, never over a file in use.
//!
//! A container maps `<state-dir>/shim/<id>/libcuda.so.1` for as long as it runs. So a build has a
//! folder of its own, named after its content; an upgrade adds a folder and touches no other. It is on disk
//! before it has its name, and one that is not what was written, after a loss of power or by hand, is mended
//! file by file: who has a file mapped keeps the one that he has.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::cdi::CONTAINER_LIB_DIR;
use crate::driver::LIBCUDA;

/// The loader's list, beside the shim; mounted as the container's `/etc/ld.so.preload`.
pub const PRELOAD_FILE: &str = "ld.so.preload";

/// The developer's name for the shim, beside it.
const LINK: &str = "libcuda.so";

/// How old a temporary folder is whose agent has certainly died.
const STALE: Duration = Duration::from_secs(3600);

/// What went wrong with the shim's files.
#[derive(Debug, thiserror::Error)]
pub enum ShimFilesError {
    /// The image lacks the shim.
    #[error("read the shim {}: {source} (set paths.shim-dir to the folder that has it)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
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

/// Copies the shim of `shim_dir` to its folder below `state_dir` unless it is there as it should be, and
/// returns that folder. Two agents that do so at the same time both end with the one folder.
///
/// # Errors
/// [`ShimFilesError`].
pub fn install(shim_dir: &Path, state_dir: &Path) -> Result<PathBuf, ShimFilesError> {
    let source_path = shim_dir.join(LIBCUDA);
    let library = fs::read(&source_path).map_err(|source| ShimFilesError::Read {
        path: source_path,
        source,
    })?;
    let builds = state_dir.join("shim");
    let path = builds.join(build_id(&library));
    let installed = fs::create_dir_all(&builds).and_then(|()| {
        remove_stale(&builds);
        match path.is_dir() {
            true => mend(&path, &library),
            false => make(&path, &library),
        }
    });
    match installed {
        Ok(()) => Ok(path),
        Err(source) => Err(ShimFilesError::Install { path, source }),
    }
}

/// A name beside `path` that no other agent has, and that no container is given.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// A new folder, whole and on disk before it has its name.
fn make(path: &Path, library: &[u8]) -> io::Result<()> {
    let temporary = beside(path);
    remove_if_there(&temporary)?;
    fs::create_dir(&temporary)?;
    readable(&temporary, 0o755)?;
    mend(&temporary, library)?;
    match fs::rename(&temporary, path) {
        Err(_) if path.is_dir() => fs::remove_dir_all(&temporary),
        renamed => renamed,
    }?;
    sync(path.parent().unwrap_or(path))
}

/// Writes what is not in `folder` as it should be; nothing where all is.
fn mend(folder: &Path, library: &[u8]) -> io::Result<()> {
    let preload = format!("{CONTAINER_LIB_DIR}/{LIBCUDA}\n");
    let files = [
        (LIBCUDA, library, 0o755),
        (PRELOAD_FILE, preload.as_bytes(), 0o644),
    ];
    let mut mended = false;
    for (name, content, mode) in files {
        let path = folder.join(name);
        if !holds(&path, content) {
            replace(&path, |temporary| write_readable(temporary, content, mode))?;
            mended = true;
        }
    }
    let link = folder.join(LINK);
    if fs::read_link(&link).ok().as_deref() != Some(Path::new(LIBCUDA)) {
        replace(&link, |temporary| symlink(LIBCUDA, temporary))?;
        mended = true;
    }
    if mended { sync(folder) } else { Ok(()) }
}

fn holds(path: &Path, content: &[u8]) -> bool {
    // Its length first: what a loss of power leaves is mostly empty.
    path.metadata()
        .is_ok_and(|file| file.len() == content.len() as u64)
        && fs::read(path).is_ok_and(|found| found == content)
}

fn replace(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = beside(path);
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
        if hidden && age.is_some_and(|age| age > STALE) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The first 16 hex digits of the content's SHA-256.
fn build_id(library: &[u8]) -> String {
    Sha256::digest(library)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Containers run as any user: the mode must not depend on the agent's umask.
fn write_readable(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    fs::write(path, content)?;
    readable(path, mode)?;
    sync(path)
}

fn readable(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn remove_if_there(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn image(content: &str) -> tempfile::TempDir {
        let image = tempfile::tempdir().unwrap();
        std::fs::write(image.path().join(LIBCUDA), content).unwrap();
        image
    }

    #[test]
    fn a_second_start_of_the_same_build_touches_nothing() {
        let (image, state) = (image("build 1"), tempfile::tempdir().unwrap());
        let first = install(image.path(), state.path()).unwrap();
        let inode = first.join(LIBCUDA).metadata().unwrap().ino();
        assert_eq!(install(image.path(), state.path()).unwrap(), first);
        assert_eq!(first.join(LIBCUDA).metadata().unwrap().ino(), inode);
        assert_eq!(
            std::fs::read_dir(state.path().join("shim"))
                .unwrap()
                .count(),
            1
        );
    }

    #[test]
    fn an_upgrade_leaves_the_files_that_containers_have_mapped() {
        let state = tempfile::tempdir().unwrap();
        let old = install(image("build 1").path(), state.path()).unwrap();
        let new = install(image("build 2").path(), state.path()).unwrap();
        assert_ne!(old, new);
        assert_eq!(std::fs::read(old.join(LIBCUDA)).unwrap(), b"build 1");
        assert_eq!(std::fs::read(new.join("libcuda.so")).unwrap(), b"build 2");
    }

    #[test]
    fn any_user_can_read_the_files_and_the_loaders_list_names_the_shim() {
        let (image, state) = (image("build"), tempfile::tempdir().unwrap());
        let build = install(image.path(), state.path()).unwrap();
        assert_eq!(
            build.join(LIBCUDA).metadata().unwrap().mode() & 0o777,
            0o755
        );
        assert_eq!(build.metadata().unwrap().mode() & 0o777, 0o755);
        assert_eq!(
            std::fs::read_to_string(build.join(PRELOAD_FILE)).unwrap(),
            "/opt/bursar/lib/libcuda.so.1\n"
        );
    }

    #[test]
    fn an_image_without_the_shim_is_told_which_file_is_missing() {
        let empty = tempfile::tempdir().unwrap();
        let error = install(empty.path(), empty.path()).unwrap_err().to_string();
        assert!(
            error.contains("libcuda.so.1") && error.contains("paths.shim-dir"),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_build_is_mended_and_who_has_it_mapped_keeps_his_file() {
        let (image, state) = (image("build"), tempfile::tempdir().unwrap());
        let build = install(image.path(), state.path()).unwrap();
        for damage in ["", "bui", "BUILD"] {
            let mapped = File::open(build.join(LIBCUDA)).unwrap();
            fs::write(build.join(LIBCUDA), damage).unwrap();
            fs::remove_file(build.join(PRELOAD_FILE)).unwrap();
            fs::remove_file(build.join(LINK)).unwrap();
            assert_eq!(install(image.path(), state.path()).unwrap(), build);
            assert_eq!(fs::read(build.join("libcuda.so")).unwrap(), b"build");
            assert!(build.join(PRELOAD_FILE).is_file());
            assert_eq!(mapped.metadata().unwrap().len(), damage.len() as u64);
            assert_eq!(fs::read_dir(&build).unwrap().count(), 3);
        }
    }

    #[test]
    fn what_an_agent_that_died_left_half_done_is_removed_and_what_another_does_now_is_not() {
        let (image, state) = (image("build"), tempfile::tempdir().unwrap());
        let builds = state.path().join("shim");
        for name in [".old.1", ".new.2"] {
            fs::create_dir_all(builds.join(name)).unwrap();
        }
        let long_ago = std::time::SystemTime::now() - 2 * STALE;
        File::open(builds.join(".old.1"))
            .and_then(|folder| folder.set_modified(long_ago))
            .unwrap();
        install(image.path(), state.path()).unwrap();
        assert!(!builds.join(".old.1").exists() && builds.join(".new.2").exists());
    }
}
