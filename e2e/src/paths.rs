//! Locates the repository, the cache and the run folders.

use std::path::{Path, PathBuf};

/// Returns the repository that this program was built from.
pub fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// Returns `$XDG_CACHE_HOME/bursar`, or `~/.cache/bursar` (XDG Base Directory Specification).
pub fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir);
    base.join("bursar")
}

/// Returns the folder of all clusters' run folders.
pub fn runs() -> PathBuf {
    std::env::temp_dir().join("bursar-e2e")
}
