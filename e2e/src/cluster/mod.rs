//! Provides the cluster of a run: a local one, or the user's by `KUBECONFIG`.

mod certs;
mod components;
mod control;
mod local;
mod run_folder;
mod worker;

use std::path::{Path, PathBuf};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

pub use local::{ClusterOptions, ClusterScope, LocalCluster, LocalError, down};
pub use run_folder::{RunFolder, RunFolderError};
pub use worker::WorkerNode;

/// The cluster of a run.
pub enum Cluster {
    /// A cluster that the harness has started on this machine.
    Local(Box<LocalCluster>),
    /// A cluster of the user.
    External {
        /// A client with the user's rights.
        client: Client,
        /// The file named by `KUBECONFIG`.
        kubeconfig: PathBuf,
    },
}

/// The user's cluster cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("KUBECONFIG={path}: {why}")]
pub struct KubeconfigError {
    path: PathBuf,
    why: String,
}

impl Cluster {
    /// Connects to the user's cluster.
    ///
    /// # Errors
    /// When the file cannot be read or used.
    pub async fn external(kubeconfig: PathBuf) -> Result<Self, KubeconfigError> {
        let client = client(&kubeconfig).await?;
        Ok(Self::External { client, kubeconfig })
    }

    /// Returns a client with the rights of an administrator, or of the user.
    pub fn client(&self) -> Client {
        match self {
            Self::Local(local) => local.client(),
            Self::External { client, .. } => client.clone(),
        }
    }

    /// Returns the kubeconfig file for other programs.
    pub fn kubeconfig(&self) -> PathBuf {
        match self {
            Self::Local(local) => local.kubeconfig(),
            Self::External { kubeconfig, .. } => kubeconfig.clone(),
        }
    }

    /// Returns the local cluster, whose node the harness can operate.
    pub fn local(&self) -> Option<&LocalCluster> {
        match self {
            Self::Local(local) => Some(local),
            Self::External { .. } => None,
        }
    }

    /// Returns the local cluster as [`Self::local`] does, for changes.
    pub fn local_mut(&mut self) -> Option<&mut LocalCluster> {
        match self {
            Self::Local(local) => Some(local),
            Self::External { .. } => None,
        }
    }
}

/// Makes a client from a kubeconfig file.
async fn client(path: &Path) -> Result<Client, KubeconfigError> {
    let failed = |why: String| KubeconfigError {
        path: path.to_path_buf(),
        why,
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| failed(error.to_string()))?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options);
    let config = config.await.map_err(|error| failed(error.to_string()))?;
    Client::try_from(config).map_err(|error| failed(error.to_string()))
}
