//! Puts the shim's files where containers can map them: once per build, never over a file in use.
//!
//! A container maps `<state-dir>/shim/<id>/libcuda.so.1` for as long as it runs. So a build has a
//! folder of its own, named after its content; an upgrade adds a folder and touches no other.

use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::cdi::CONTAINER_LIB_DIR;
use crate::driver::LIBCUDA;

/// The loader's list, beside the shim; mounted as the container's `/etc/ld.so.preload`.
pub const PRELOAD_FILE: &str = "ld.so.preload";

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

/// Copies the shim of `shim_dir` to its folder below `state_dir` unless it is there, and returns
/// that folder. Two agents that do so at the same time both end with the one folder.
///
/// # Errors
/// [`ShimFilesError`].
pub fn install(shim_dir: &Path, state_dir: &Path) -> Result<PathBuf, ShimFilesError> {
    let source_path = shim_dir.join(LIBCUDA);
    let library = std::fs::read(&source_path).map_err(|source| ShimFilesError::Read {
        path: source_path,
        source,
    })?;
    let builds = state_dir.join("shim");
    let id = build_id(&library);
    let path = builds.join(&id);
    let failed = |source| ShimFilesError::Install {
        path: path.clone(),
        source,
    };
    if path.is_dir() {
        return Ok(path);
    }
    let temporary = builds.join(format!(".{id}.{}", std::process::id()));
    let result = remove_if_there(&temporary)
        .and_then(|()| write_build(&temporary, &library))
        .and_then(|()| match std::fs::rename(&temporary, &path) {
            Err(_) if path.is_dir() => std::fs::remove_dir_all(&temporary),
            renamed => renamed,
        });
    result.map_err(failed)?;
    Ok(path)
}

/// The first 16 hex digits of the content's SHA-256.
fn build_id(library: &[u8]) -> String {
    Sha256::digest(library)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn write_build(folder: &Path, library: &[u8]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    readable(folder, 0o755)?;
    write_readable(&folder.join(LIBCUDA), library, 0o755)?;
    symlink(LIBCUDA, folder.join("libcuda.so"))?;
    let preload = format!("{CONTAINER_LIB_DIR}/{LIBCUDA}\n");
    write_readable(&folder.join(PRELOAD_FILE), preload.as_bytes(), 0o644)
}

/// Containers run as any user: the mode must not depend on the agent's umask.
fn write_readable(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    std::fs::write(path, content)?;
    readable(path, mode)
}

fn readable(path: &Path, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

fn remove_if_there(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder) {
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
}
