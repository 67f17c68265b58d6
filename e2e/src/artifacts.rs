//! Builds or unpacks the artifacts of a cluster with Bursar.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::cache::CacheError;
use crate::chart::Chart;
use crate::images::{self, Archive, ImageError, Template};
use crate::kube::{self, BuildError, Toolbox};
use crate::progress::Progress;
use crate::sim;
use crate::workspace::{self, Binaries, Profile, WorkspaceError};

/// Programs, images, the simulated driver and the chart.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// The programs of Kubernetes and containerd.
    pub toolbox: Toolbox,
    /// The program whose subcommand `node` is the node process.
    pub harness: PathBuf,
    /// The template of our images' references.
    pub image_template: Template,
    /// Our images by name: agent, operator, probe, pause.
    pub images: BTreeMap<&'static str, Archive>,
    /// The simulated driver.
    pub simulated_driver: sim::SimulatedDriver,
    /// The chart.
    pub chart: Chart,
}

/// The error of a build.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactsError {
    /// Kubernetes cannot be built.
    #[error(transparent)]
    Kubernetes(#[from] CacheError<BuildError>),
    /// Our own programs cannot be built.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// An image cannot be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The workspace did not build a program.
    #[error("the workspace does not build {0}")]
    NotBuilt(&'static str),
}

/// The file names that cargo gives to the simulated driver.
pub(crate) const SIMULATED_DRIVER_FILES: [&str; 3] =
    ["simgpu", "libbursar_sim_cuda.so", "libbursar_sim_nvml.so"];

/// The names of our images.
pub(crate) const IMAGE_NAMES: [&str; 4] = ["agent", "operator", "pause", "probe"];

impl Artifacts {
    /// Builds every artifact of an archive in the release profile.
    ///
    /// # Errors
    /// When an artifact cannot be built.
    pub fn for_archive(progress: &Progress) -> Result<Self, ArtifactsError> {
        Self::build(Profile::Release, None, progress)
    }

    /// Builds every artifact from this repository.
    ///
    /// # Errors
    /// When an artifact cannot be built.
    pub fn from_workspace(
        profile: Profile,
        harness: PathBuf,
        progress: &Progress,
    ) -> Result<Self, ArtifactsError> {
        Self::build(profile, Some(harness), progress)
    }

    fn build(
        profile: Profile,
        harness: Option<PathBuf>,
        progress: &Progress,
    ) -> Result<Self, ArtifactsError> {
        let toolbox = kube::build(progress)?;
        progress.report("building Bursar, which takes minutes the first time");
        let binaries = workspace::build(profile, harness.is_none())?;
        let harness = match harness {
            Some(harness) => harness,
            None => file(&binaries, "bursar-e2e")?,
        };
        progress.report("writing images");
        let folder = binaries
            .folder()
            .map(|folder| folder.join("bursar-images"))
            .unwrap_or_default();
        let (template, images) = images::write_all(&binaries, &folder)?;
        let chart = Chart::of_repository(toolbox.program("helm"));
        Ok(Self {
            toolbox,
            harness,
            image_template: template,
            images,
            simulated_driver: simulator(&binaries)?,
            chart,
        })
    }
}

fn simulator(binaries: &Binaries) -> Result<sim::SimulatedDriver, ArtifactsError> {
    let [command, cuda, nvml] = SIMULATED_DRIVER_FILES;
    Ok(sim::SimulatedDriver {
        command: file(binaries, command)?,
        libraries: vec![file(binaries, cuda)?, file(binaries, nvml)?],
    })
}

fn file(binaries: &Binaries, name: &'static str) -> Result<PathBuf, ArtifactsError> {
    let built = binaries.get(name).map(PathBuf::from);
    built.ok_or(ArtifactsError::NotBuilt(name))
}
