//! Everything that a cluster with Bursar is made from, built or unpacked.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::cache::CacheError;
use crate::chart::Chart;
use crate::folders;
use crate::images::{self, Archive, ImageError};
use crate::kube::{self, BuildError, Toolbox};
use crate::progress::Progress;
use crate::sim;
use crate::workspace::{self, Binaries, Profile, WorkspaceError};

/// Programs, images and the simulated driver.
#[derive(Debug, Clone)]
pub struct Supplies {
    /// Kubernetes and its friends.
    pub toolbox: Toolbox,
    /// The program whose subcommand `node` is the node process.
    pub harness: PathBuf,
    /// Our images by name: agent, operator, probe, pause.
    pub images: BTreeMap<&'static str, Archive>,
    /// The simulated driver.
    pub driver: sim::Driver,
    /// The chart.
    pub chart: Chart,
}

/// Why there are no supplies.
#[derive(Debug, thiserror::Error)]
pub enum SuppliesError {
    /// Kubernetes cannot be built.
    #[error(transparent)]
    Kubernetes(#[from] CacheError<BuildError>),
    /// Our own programs cannot be built.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// An image cannot be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The workspace did not build a part of the simulated driver.
    #[error("the workspace does not build {0}")]
    Simulator(&'static str),
}

/// The simulated driver's files, as cargo names them.
pub(crate) const SIMULATOR: [&str; 3] =
    ["simgpu", "libbursar_sim_cuda.so", "libbursar_sim_nvml.so"];

impl Supplies {
    /// Builds everything from this repository.
    ///
    /// # Errors
    /// When a part cannot be built.
    pub fn from_workspace(
        profile: Profile,
        harness: PathBuf,
        progress: &Progress,
    ) -> Result<Self, SuppliesError> {
        let toolbox = kube::build(progress)?;
        progress.say("building Bursar");
        let binaries = workspace::build(profile)?;
        progress.say("writing images");
        let folder = binaries
            .folder()
            .map(|folder| folder.join("bursar-images"))
            .unwrap_or_default();
        let images = images::write_all(&binaries, &folder)?;
        let chart = Chart::Helm {
            helm: toolbox.program("helm"),
            folder: folders::repository().join("charts/bursar"),
        };
        Ok(Self {
            toolbox,
            harness,
            images,
            driver: simulator(&binaries)?,
            chart,
        })
    }

    /// The reference of the image `name`.
    pub fn reference(&self, name: &str) -> &str {
        self.images
            .get(name)
            .map_or("", |archive| archive.reference.as_str())
    }
}

fn simulator(binaries: &Binaries) -> Result<sim::Driver, SuppliesError> {
    let file = |name| {
        binaries
            .get(name)
            .map(PathBuf::from)
            .ok_or(SuppliesError::Simulator(name))
    };
    let [command, cuda, nvml] = SIMULATOR;
    Ok(sim::Driver {
        command: file(command)?,
        libraries: vec![file(cuda)?, file(nvml)?],
    })
}
