//! Where the harness finds the repository, and where it keeps what outlives a run.

use std::path::{Path, PathBuf};

/// The repository that this program was built from.
pub fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// `$XDG_CACHE_HOME/bursar`, or `~/.cache/bursar` (XDG Base Directory Specification).
pub fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir);
    base.join("bursar")
}

/// The folder that holds the run folders of clusters.
pub fn runs() -> PathBuf {
    std::env::temp_dir().join("bursar-e2e")
}
