//! Manages the run folder of one cluster: its name, its files, and the remains of a killed harness.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::node::{Cgroup, CgroupError};
use crate::paths;

/// `<temp>/bursar-e2e/<name>`, with logs, certificates and sockets. The node's own files are in its
/// mount namespace. Names are short, because paths of Unix sockets have at most 107 bytes
/// (unix(7)).
#[derive(Debug, Clone)]
pub struct RunFolder {
    name: String,
    path: PathBuf,
}

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// The name does not fit a folder, a cgroup and a node.
    #[error("cluster name {0:?}: 1 to 20 lower-case letters, digits and dashes")]
    Name(String),
    /// A cluster of this name is up.
    #[error(
        "cluster {name} is up already (process {pid}, {path}); `bursar-e2e down --name {name}` ends it"
    )]
    InUse {
        /// The cluster's name.
        name: String,
        /// The id of its node process.
        pid: String,
        /// Its run folder.
        path: PathBuf,
    },
    /// A file cannot be used.
    #[error("{path}: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The cgroup of a killed cluster cannot be removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

impl RunFolder {
    /// Returns the run folder of the cluster `name`, which need not exist.
    ///
    /// # Errors
    /// When the name does not fit.
    pub fn of(name: &str) -> Result<Self, RunFolderError> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty()
            || name.len() > 20
            || !name.chars().all(fits)
            || name.starts_with('-')
            || name.ends_with('-')
        {
            return Err(RunFolderError::Name(name.to_owned()));
        }
        Ok(Self {
            name: name.to_owned(),
            path: paths::runs().join(name),
        })
    }

    /// Makes the folder, and removes the remains of a killed cluster of this name.
    ///
    /// # Errors
    /// When a cluster of this name is up, or its remains cannot be removed.
    pub fn prepare(&self) -> Result<(), RunFolderError> {
        self.clean_up()?;
        for folder in [
            self.path.clone(),
            self.logs(),
            self.scratch(),
            self.configs(),
        ] {
            fs::create_dir_all(&folder).map_err(self.file_error(&folder))?;
        }
        Ok(())
    }

    /// Removes the remains of a killed cluster.
    ///
    /// # Errors
    /// When the cluster is up, or its remains cannot be removed.
    pub fn clean_up(&self) -> Result<(), RunFolderError> {
        if self.is_up()? {
            let pid = fs::read_to_string(self.pid()).unwrap_or_else(|_| "unknown".to_owned());
            return Err(RunFolderError::InUse {
                name: self.name.clone(),
                pid,
                path: self.path.clone(),
            });
        }
        let cgroup = self.cgroup()?;
        if cgroup.exists() {
            cgroup.kill(Duration::from_secs(10))?;
            cgroup.remove(Duration::from_secs(10))?;
        }
        self.remove().map_err(self.file_error(&self.path))
    }

    /// Returns whether a node process holds the lock of the folder.
    ///
    /// # Errors
    /// When the lock cannot be opened or tested.
    pub fn is_up(&self) -> Result<bool, RunFolderError> {
        let path = self.lock();
        let lock = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(self.file_error(&path))?,
        };
        match lock.try_lock() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(source)) => Err(RunFolderError::File { path, source }),
        }
    }

    /// Removes the folder, if it exists.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => {
                // The removal of the parent succeeds for the last cluster only.
                let _ = fs::remove_dir(paths::runs());
                Ok(())
            }
        }
    }

    fn file_error(&self, path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
        let path = path.to_path_buf();
        move |source| RunFolderError::File { path, source }
    }

    /// The cluster's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the cgroup of every process of the cluster.
    ///
    /// # Errors
    /// When the system's cgroups cannot be listed.
    pub fn cgroup(&self) -> Result<Cgroup, CgroupError> {
        Cgroup::new(Path::new("bursar-e2e").join(&self.name))
    }

    /// Returns the lock file, which the node process locks while it runs.
    pub fn lock(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// Returns the file with the node process's id.
    pub fn pid(&self) -> PathBuf {
        self.path.join("pid")
    }

    /// Returns the file with the host's port of the API server.
    pub fn port(&self) -> PathBuf {
        self.path.join("port")
    }

    /// Returns the path of the node process's socket.
    pub fn control_socket(&self) -> PathBuf {
        self.path.join("control")
    }

    /// Returns the folder of all logs.
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// Returns the log file of one component.
    pub fn log(&self, component: &str) -> PathBuf {
        self.logs().join(format!("{component}.log"))
    }

    /// Returns a folder that is private to the node's namespaces.
    pub fn scratch(&self) -> PathBuf {
        self.path.join("scratch")
    }

    /// Returns the folder of certificates and configuration files.
    pub fn configs(&self) -> PathBuf {
        self.path.join("config")
    }

    /// Returns the path of one certificate or configuration file.
    pub fn config(&self, name: &str) -> PathBuf {
        self.configs().join(name)
    }

    /// Returns the administrator's kubeconfig file, for use on the host.
    pub fn kubeconfig(&self) -> PathBuf {
        self.path.join("kubeconfig")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_folder_rejects_names_that_leave_the_folder() {
        for name in ["", "..", "a/b", "A", "-a", "a-", "abcdefghijklmnopqrstu"] {
            assert!(RunFolder::of(name).is_err(), "{name}");
        }
        assert!(RunFolder::of("demo-1").is_ok());
    }
}
