//! The folder of CDI files: written atomically, removed, listed back.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::{CdiBinding, CdiNode, ContainerEdits, Spec, build_spec};
use crate::units::AllocationId;

const PREFIX: &str = "bursar.dev-gpu-";
const SUFFIX: &str = ".json";

/// The runtime's folder of CDI files.
#[derive(Clone, Debug)]
pub struct CdiDir {
    dir: PathBuf,
}

/// What the folder holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiListing {
    /// The bindings of our files, by allocation.
    pub bindings: Vec<CdiBinding>,
    /// The allocations of files with our name that hold no binding which this agent can read.
    pub unreadable: BTreeSet<AllocationId>,
}

/// What went wrong with a CDI file.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// The file could not be written: the container cannot start.
    #[error("write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file could not be removed.
    #[error("remove {}: {source}", path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The folder could not be read.
    #[error("list {}: {source}", path.display())]
    List {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl CdiError {
    /// A bounded word for conditions and metric labels.
    pub fn reason(&self) -> &'static str {
        match self {
            CdiError::Write { .. } => "CdiWriteFailed",
            CdiError::Remove { .. } => "CdiRemoveFailed",
            CdiError::List { .. } => "CdiUnreadable",
        }
    }
}

impl CdiDir {
    /// Our files in `dir`.
    pub fn new(dir: PathBuf) -> CdiDir {
        CdiDir { dir }
    }

    /// Where they are.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Writes the file of `binding` on `node`; a second write replaces the first. A reader sees all of
    /// it or nothing: the runtime reads every file in the folder at every container start.
    ///
    /// # Errors
    /// [`CdiError::WriteStatus`]; the folder then holds what it held before.
    pub fn write(&self, node: &CdiNode, binding: &CdiBinding) -> Result<(), CdiError> {
        let path = self.file_path(&binding.allocation);
        let text = serde_json::to_vec_pretty(&build_spec(node, binding))
            .expect("a spec has no map with keys that are not text");
        // The runtime takes `.json` and `.yaml` only: it does not look at this one.
        let temporary = self
            .dir
            .join(format!(".{PREFIX}{}.tmp", binding.allocation));
        let written = std::fs::create_dir_all(&self.dir)
            .and_then(|()| std::fs::write(&temporary, text))
            .and_then(|()| std::fs::rename(&temporary, &path));
        written.map_err(|source| {
            // Best effort: the next write of this allocation replaces it anyway.
            let _ = std::fs::remove_file(&temporary);
            CdiError::Write { path, source }
        })
    }

    /// What the file of `allocation` does to its container; none where it is not there or not ours.
    pub fn read_edits(&self, allocation: &AllocationId) -> Option<ContainerEdits> {
        let text = std::fs::read(self.file_path(allocation)).ok()?;
        let spec: Spec = serde_json::from_slice(&text).ok()?;
        Some(spec.devices.into_iter().next()?.container_edits)
    }

    /// The host's paths that our files mount; `None` where a file cannot be read.
    pub fn mounted_host_paths(&self) -> Option<Vec<PathBuf>> {
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

    /// Removes the file of `allocation`; one that is not there is removed already.
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

    /// The bindings of every file of ours; a folder that is not there has none.
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
