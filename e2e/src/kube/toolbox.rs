//! Where the built programs are.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The folders that hold etcd, Kubernetes, containerd, runc, the CNI plugins and helm.
#[derive(Debug, Clone)]
pub struct Toolbox {
    folders: Vec<PathBuf>,
}

impl Toolbox {
    /// Programs in these folders.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders }
    }

    /// The program of this name; a bare name, left to `PATH`, if no folder has it.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folders
            .iter()
            .map(|folder| folder.join(name))
            .find(|path| path.exists())
            .unwrap_or_else(|| PathBuf::from(name))
    }

    /// The folder that has `name`.
    pub fn folder_of(&self, name: &str) -> Option<&Path> {
        self.folders
            .iter()
            .map(PathBuf::as_path)
            .find(|folder| folder.join(name).exists())
    }

    /// `PATH` with every folder first.
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
