//! Builds version 0.1.0 of this repository, to run it beside today's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::artifacts::Artifacts;
use crate::cache::{self, CacheError};
use crate::images::{self, ImageError};
use crate::paths;
use crate::progress::Progress;
use crate::workspace::{self, Binaries, WorkspaceError};

/// The commit that is version 0.1.0 until its release. `e2e/compat/0.1.0` has what it writes.
const FIRST: &str = "c13a61b52d00b3f6b4822df9fd976616495279fd";

/// The error of a build of another version.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// The cache or the version cannot be made.
    #[error(transparent)]
    Cache(#[from] CacheError<BuildError>),
    /// An image of the version cannot be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The built programs cannot be read.
    #[error("failed to read the programs of 0.1.0: {0}")]
    Read(#[from] io::Error),
}

/// Why the version's sources or programs cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A program could not be started, or a file not be written.
    #[error("failed to build 0.1.0: {0}")]
    Io(#[from] io::Error),
    /// The repository has no such commit.
    #[error(
        "failed to unpack commit {FIRST}: {0}; a shallow clone lacks it: git fetch --unshallow"
    )]
    Unpack(ExitStatus),
    /// The version's programs do not compile.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
}

/// A version's artifacts and its programs.
#[derive(Debug)]
pub struct Version {
    /// Its images and its chart, with today's Kubernetes, harness and simulated driver.
    pub artifacts: Artifacts,
    /// Its `kubectl bursar`.
    pub command: PathBuf,
}

/// Builds version 0.1.0 once into the cache.
///
/// # Errors
/// When this clone lacks the commit, or the version does not compile.
pub fn first(today: &Artifacts, progress: &Progress) -> Result<Version, VersionError> {
    progress.report("building version 0.1.0, which takes minutes the first time");
    let folder = cache::get_or_make(&paths::cache().join("versions"), FIRST, make)?;
    let programs = folder.join("programs");
    let images = folder.join("images");
    let (image_template, images) = images::write_all(&Binaries::in_folder(&programs)?, &images)?;
    let mut artifacts = Artifacts {
        image_template,
        images,
        ..today.clone()
    };
    artifacts
        .chart
        .replace(Some(folder.join("source/charts/bursar")));
    Ok(Version {
        artifacts,
        command: programs.join("kubectl-bursar"),
    })
}

/// Unpacks and compiles the version, and keeps its sources and programs.
fn make(folder: &Path) -> Result<(), BuildError> {
    let (source, target, programs) = (
        folder.join("source"),
        folder.join("target"),
        folder.join("programs"),
    );
    for new in [&source, &programs] {
        fs::create_dir(new)?;
    }
    let archive = folder.join("source.tar");
    let mut pack = Command::new("git");
    pack.args(["archive", "--output"]).arg(&archive).arg(FIRST);
    let mut unpack = Command::new("tar");
    unpack.arg("-xf").arg(&archive).arg("-C").arg(&source);
    for command in [&mut pack, &mut unpack] {
        let status = command.current_dir(paths::repository()).status()?;
        if !status.success() {
            return Err(BuildError::Unpack(status));
        }
    }
    for built in workspace::build_elsewhere(&source, &target)?.paths() {
        fs::copy(built, programs.join(built.file_name().unwrap_or_default()))?;
    }
    fs::remove_file(&archive)?;
    Ok(fs::remove_dir_all(&target)?)
}
