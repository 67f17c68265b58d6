//! Caches results in folders that are complete or absent, never half made.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The error of [`get_or_make`].
#[derive(Debug, thiserror::Error)]
pub enum CacheError<E: std::error::Error + 'static> {
    /// The cache's own folder cannot be used.
    #[error("cache folder {path}: {source}")]
    Folder {
        /// The affected folder or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The result could not be made.
    #[error(transparent)]
    Make(E),
}

/// Returns the folder `root/name`, and fills it by `make` unless it exists.
///
/// `make` fills an empty folder beside the final path, which is renamed once `make` returns. A
/// second process that wants the same result waits for the first. Both take an advisory lock, which
/// the kernel releases when its holder exits.
///
/// # Errors
/// When the cache cannot be written, or with the error of `make`.
pub fn get_or_make<E: std::error::Error + 'static>(
    root: &Path,
    name: &str,
    make: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<PathBuf, CacheError<E>> {
    let done = root.join(name);
    if done.is_dir() {
        return Ok(done);
    }
    let at = |path: &Path| {
        let path = path.to_path_buf();
        move |source| CacheError::Folder { path, source }
    };
    fs::create_dir_all(root).map_err(at(root))?;
    let lock_path = root.join(format!("{name}.lock"));
    let lock = File::create(&lock_path).map_err(at(&lock_path))?;
    lock.lock().map_err(at(&lock_path))?;
    if done.is_dir() {
        return Ok(done);
    }
    let half = root.join(format!("{name}.half"));
    match fs::remove_dir_all(&half) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&half)(error)),
        _ => {}
    }
    fs::create_dir(&half).map_err(at(&half))?;
    make(&half).map_err(CacheError::Make)?;
    fs::rename(&half, &done).map_err(at(&done))?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn get_or_make_makes_once_when_called_concurrently() {
        let root = tempfile::tempdir().unwrap();
        let calls = AtomicUsize::new(0);
        let make = |folder: &Path| {
            calls.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(50));
            fs::write(folder.join("result"), "42")
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let folder = get_or_make(root.path(), "key", make).unwrap();
                    assert_eq!(fs::read_to_string(folder.join("result")).unwrap(), "42");
                });
            }
        });
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn get_or_make_retries_after_a_failed_attempt() {
        let root = tempfile::tempdir().unwrap();
        let fails = |folder: &Path| -> io::Result<()> {
            fs::write(folder.join("half"), "")?;
            Err(io::Error::other("no network"))
        };
        assert!(get_or_make(root.path(), "key", fails).is_err());
        let folder = get_or_make(root.path(), "key", |_| Ok::<(), io::Error>(())).unwrap();
        assert!(!folder.join("half").exists());
    }
}
