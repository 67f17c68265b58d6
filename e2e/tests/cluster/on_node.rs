//! Reads and changes Bursar's files on the node.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_e2e::cluster::LocalCluster;
use bursar_e2e::wait::{self, Poll, WaitError};
use serde_json::Value;

const CDI: &str = "/run/cdi";
const ALLOCATIONS: &str = "/run/bursar/alloc";
const CHECKPOINT: &str = "/run/bursar/checkpoint.json";
const PLUGINS: &str = "/var/lib/kubelet/device-plugins";
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Bursar's files in the node's mount namespace.
#[derive(Debug, Clone)]
pub(crate) struct NodeFiles {
    /// The node's root folder, as this process can open it.
    root: PathBuf,
}

/// The state of pods with GPU memory that the agent has on the node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PodStateOnNode {
    /// The names of CDI files.
    cdi: BTreeSet<String>,
    /// The folders of allocations, with their sockets.
    allocations: BTreeSet<String>,
    /// The ids of pending allocations in the checkpoint.
    pending: BTreeSet<String>,
    /// The number of claims in the checkpoint.
    claims: usize,
}

impl NodeFiles {
    pub(crate) fn of(local: &LocalCluster) -> Self {
        Self::at(local.host_path("/"))
    }

    /// Returns the files of the node with this root folder.
    pub(crate) fn at(root: PathBuf) -> Self {
        Self { root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Reads Bursar's CDI files. Each contains the binding of one container.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) fn cdi_files(&self) -> io::Result<BTreeMap<String, String>> {
        let folder = self.path(CDI);
        let ours = names(&folder)?
            .into_iter()
            .filter(|name| name.starts_with("bursar"));
        let mut files = BTreeMap::new();
        for name in ours {
            match fs::read_to_string(folder.join(&name)) {
                // The agent has removed the file meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                text => drop(files.insert(name, text?)),
            }
        }
        Ok(files)
    }

    /// Reads all state of pods.
    ///
    /// # Errors
    /// When a file cannot be read, for instance because the agent is replacing it.
    pub(crate) fn pod_state(&self) -> io::Result<PodStateOnNode> {
        let text = fs::read_to_string(self.path(CHECKPOINT))?;
        let checkpoint: Value = serde_json::from_str(&text)?;
        let ledger = &checkpoint["data"]["ledger"];
        let (Value::Array(pending), Value::Array(claims)) = (&ledger["pending"], &ledger["claims"])
        else {
            return Err(io::Error::other("the checkpoint has no ledger"));
        };
        Ok(PodStateOnNode {
            cdi: self.cdi_files()?.into_keys().collect(),
            allocations: names(&self.path(ALLOCATIONS))?,
            pending: pending
                .iter()
                .map(|pending| pending[0].as_str().unwrap_or_default().to_owned())
                .collect(),
            claims: claims.len(),
        })
    }

    /// Waits until the agent has no state of any pod.
    ///
    /// # Errors
    /// After `bound`, with the remaining state.
    pub(crate) async fn wait_until_no_pod_state(&self, bound: Duration) -> Result<(), WaitError> {
        let poll = async || match self.pod_state() {
            Ok(holdings) if holdings == PodStateOnNode::default() => Poll::Ready(()),
            Ok(holdings) => Poll::Pending(format!("{holdings:?}")),
            Err(error) => Poll::Pending(error.to_string()),
        };
        wait::poll_until("nothing to be held on the node", bound, POLL_INTERVAL, poll).await
    }

    /// Removes the agent's checkpoint.
    ///
    /// # Errors
    /// When the checkpoint does not exist.
    pub(crate) fn remove_checkpoint(&self) -> io::Result<()> {
        fs::remove_file(self.path(CHECKPOINT))
    }

    /// Truncates the agent's checkpoint to half of its size.
    ///
    /// # Errors
    /// When the checkpoint does not exist.
    pub(crate) fn truncate_checkpoint(&self) -> io::Result<()> {
        let path = self.path(CHECKPOINT);
        let whole = fs::read(&path)?;
        fs::write(&path, &whole[..whole.len() / 2])
    }

    /// Returns the cgroups of the pod, one in each hierarchy.
    pub(crate) fn cgroups(&self, uid: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        find_folders(
            &self.path("/sys/fs/cgroup"),
            &format!("pod{uid}"),
            &mut found,
        );
        found
    }

    /// Removes the files of plugins from the kubelet's plugin folder, and leaves the kubelet's own.
    ///
    /// # Errors
    /// When no plugin has a file in the folder.
    pub(crate) fn wipe_plugins(&self) -> io::Result<()> {
        let folder = self.path(PLUGINS);
        let theirs = names(&folder)?
            .into_iter()
            .filter(|name| !name.starts_with("kubelet"));
        let mut removed = 0;
        for name in theirs {
            fs::remove_file(folder.join(name))?;
            removed += 1;
        }
        if removed == 0 {
            return Err(io::Error::other("no plugin has a socket there"));
        }
        Ok(())
    }

    /// Returns when the kubelet created its registration socket.
    ///
    /// # Errors
    /// When the socket does not exist.
    pub(crate) fn kubelet_socket_time(&self) -> io::Result<std::time::SystemTime> {
        self.path(PLUGINS)
            .join("kubelet.sock")
            .symlink_metadata()?
            .modified()
    }
}

/// Finds every folder called `name` below `folder`.
fn find_folders(folder: &Path, name: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.file_name() == name {
                found.push(entry.path());
            } else {
                find_folders(&entry.path(), name, found);
            }
        }
    }
}

fn names(folder: &Path) -> io::Result<BTreeSet<String>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        other => Ok(other?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()),
    }
}
