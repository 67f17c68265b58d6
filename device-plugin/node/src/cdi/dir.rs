//! Writes, removes and lists the agent's CDI files.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use bursar_ledger::units::AllocationId;

use super::{CdiBinding, CdiNode, ContainerEdits, Spec, build_spec};

const PREFIX: &str = "bursar.dev-gpu-";
const SUFFIX: &str = ".json";

/// The container runtime's directory of CDI files.
#[derive(Clone, Debug)]
pub struct CdiDir {
    dir: PathBuf,
}

/// The agent's files in the directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiListing {
    /// The bindings of the files, sorted by allocation.
    pub bindings: Vec<CdiBinding>,
    /// The allocations of files that have no binding which this agent can read.
    pub unreadable: BTreeSet<AllocationId>,
}

/// The reason why an operation on CDI files failed.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// The file could not be written, so the container cannot start.
    #[error("failed to write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file could not be removed.
    #[error("failed to remove {}: {source}", path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The directory could not be read.
    #[error("failed to list {}: {source}", path.display())]
    List {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
}

impl CdiError {
    /// A bounded name for conditions and metric labels.
    pub fn reason(&self) -> &'static str {
        match self {
            CdiError::Write { .. } => "CdiWriteFailed",
            CdiError::Remove { .. } => "CdiRemoveFailed",
            CdiError::List { .. } => "CdiUnreadable",
        }
    }
}

impl CdiDir {
    /// The agent's files in `dir`.
    pub fn new(dir: PathBuf) -> CdiDir {
        CdiDir { dir }
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Writes the file of `binding` and replaces an earlier one.
    ///
    /// A reader sees the whole file or none: the runtime reads every file of the directory at each
    /// container start.
    ///
    /// # Errors
    /// [`CdiError::Write`]; the directory is then unchanged.
    pub fn write(&self, node: &CdiNode, binding: &CdiBinding) -> Result<(), CdiError> {
        let path = self.file_path(&binding.allocation);
        let text = serde_json::to_vec_pretty(&build_spec(node, binding))
            .expect("a spec has no map with keys that are not text");
        // The runtime reads `.json` and `.yaml` files only, so it ignores this one.
        let temporary = self
            .dir
            .join(format!(".{PREFIX}{}.tmp", binding.allocation));
        let written = std::fs::create_dir_all(&self.dir)
            .and_then(|()| std::fs::write(&temporary, text))
            .and_then(|()| std::fs::rename(&temporary, &path));
        written.map_err(|source| {
            // An error is harmless: the next write of this allocation replaces the temporary file.
            let _ = std::fs::remove_file(&temporary);
            CdiError::Write { path, source }
        })
    }

    /// Reads the container edits of an allocation's file; `None` for a missing or foreign file.
    pub fn read_edits(&self, allocation: &AllocationId) -> Option<ContainerEdits> {
        let text = std::fs::read(self.file_path(allocation)).ok()?;
        let spec: Spec = serde_json::from_slice(&text).ok()?;
        Some(spec.devices.into_iter().next()?.container_edits)
    }

    /// The host paths that the agent's files mount; `None` where a file is unreadable.
    pub(crate) fn mounted_host_paths(&self) -> Option<Vec<PathBuf>> {
        let mut mounted = Vec::new();
        for entry in std::fs::read_dir(&self.dir).ok()? {
            let path = entry.ok()?.path();
            if allocation_of(&path).is_none() {
                continue;
            }
            let spec: Spec = match std::fs::read(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                text => serde_json::from_slice(&text.ok()?).ok()?,
            };
            let mounts = spec.devices.into_iter();
            let mounts = mounts.flat_map(|device| device.container_edits.mounts);
            mounted.extend(mounts.map(|mount| mount.host_path));
        }
        Some(mounted)
    }

    /// Removes the file of `allocation`; a missing file counts as removed.
    ///
    /// # Errors
    /// [`CdiError::Remove`].
    pub fn remove(&self, allocation: &AllocationId) -> Result<(), CdiError> {
        let path = self.file_path(allocation);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(CdiError::Remove { path, source })
            }
            _ => Ok(()),
        }
    }

    /// Lists the bindings of the agent's files; a missing directory has none.
    ///
    /// # Errors
    /// [`CdiError::List`].
    pub fn list(&self) -> Result<CdiListing, CdiError> {
        let failed = |source| CdiError::List {
            path: self.dir.clone(),
            source,
        };
        let mut listed = CdiListing::default();
        let entries = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(listed),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let Some(allocation) = allocation_of(&path) else {
                continue;
            };
            match read_binding(&path) {
                Some(binding) if binding.allocation == allocation => listed.bindings.push(binding),
                _ => drop(listed.unreadable.insert(allocation)),
            }
        }
        listed.bindings.sort_by_key(|binding| binding.allocation);
        Ok(listed)
    }

    fn file_path(&self, allocation: &AllocationId) -> PathBuf {
        self.dir.join(format!("{PREFIX}{allocation}{SUFFIX}"))
    }
}

fn allocation_of(path: &Path) -> Option<AllocationId> {
    path.file_name()?
        .to_str()?
        .strip_prefix(PREFIX)?
        .strip_suffix(SUFFIX)?
        .parse()
        .ok()
}

fn read_binding(path: &Path) -> Option<CdiBinding> {
    let text = std::fs::read(path).ok()?;
    serde_json::from_slice::<Spec>(&text).ok()?.binding()
}
