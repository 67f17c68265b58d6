//! Finds the built programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The folders that hold etcd, Kubernetes, containerd, runc, the CNI plugins and helm.
#[derive(Debug, Clone)]
pub struct Toolbox {
    folders: Vec<PathBuf>,
}

impl Toolbox {
    /// Finds programs in these folders.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders }
    }

    /// Returns the program of this name, or the bare name for `PATH` if no folder has it.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folders
            .iter()
            .map(|folder| folder.join(name))
            .find(|path| path.exists())
            .unwrap_or_else(|| PathBuf::from(name))
    }

    /// Returns the folder that has `name`.
    pub fn folder_of(&self, name: &str) -> Option<&Path> {
        self.folders
            .iter()
            .map(PathBuf::as_path)
            .find(|folder| folder.join(name).exists())
    }

    /// Returns the folders that have programs.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.folders.iter().map(PathBuf::as_path)
    }

    /// Returns a `PATH` that begins with every folder.
    pub fn path(&self) -> OsString {
        let rest = std::env::var_os("PATH").unwrap_or_default();
        let folders = self
            .folders
            .iter()
            .cloned()
            .chain(std::env::split_paths(&rest));
        std::env::join_paths(folders).unwrap_or(rest)
    }
}
