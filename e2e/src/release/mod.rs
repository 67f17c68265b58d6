//! Makes a release: images, the chart, bills of materials, archives, checksums and notes.
//!
//! ```text
//! FOLDER/oci/<image>/           an OCI image layout with an index of the image's architectures
//!       /oci/chart/             an OCI image layout of the chart
//!       /bursar-<version>.tgz   the chart
//!       /values-gpu-operator.yaml  values for nodes with NVIDIA's driver container
//!       /values-simulated.yaml  values for clusters without GPUs
//!       /<image>-<version>-<architecture>.cdx.json
//!       /provenance-<version>-<architecture>.json
//!       /kubectl-bursar_<version>_<platform>.tar.gz, with a file .sha256 beside it
//!       /bursar.yaml            krew's manifest of these archives
//!       /images.txt             the reference of each image, with its digest
//!       /notes.md               the entry of the changelog
//!       /SHA256SUMS             the checksums of the files above
//!       /SHA256SUMS.sigstore.json  their signature, if there is a key
//! ```

mod changelog;
mod chart;
mod destination;
mod provenance;
mod registry;
mod sbom;
mod signing;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde_json::Value;

pub use destination::{Destination, Version, VersionError};

use self::chart::ImageReferences;
use self::signing::{Predicate, Signer};
use crate::cache::CacheError;
use crate::cli_archive::{self, CliArchiveError};
use crate::images::{self, ImageError, Layer, RECIPES, Recipe};
use crate::kube::{self, BuildError};
use crate::paths;
use crate::progress::Progress;
use crate::tools::{self, ToolError};
use crate::workspace::{self, Binaries, WorkspaceError};

/// The package and the program of the operator.
const OPERATOR: &str = "bursar-operator";
/// The folder of the layouts. The checksums do not name their files, which have digests as names.
const LAYOUTS: &str = "oci";
/// The file of the checksums.
const CHECKSUMS: &str = "SHA256SUMS";
/// The files of the chart that are published beside it.
const CHART_FILES: &[&str] = &["values-gpu-operator.yaml", "values-simulated.yaml"];

/// The artifacts of a release and their destinations.
#[derive(Debug)]
pub struct ReleaseOptions {
    /// The version.
    pub version: Version,
    /// The places that the release is written to.
    pub destinations: Vec<Destination>,
    /// Folders of releases of single architectures. If there are any, nothing is built.
    pub parts: Vec<PathBuf>,
    /// The key that signs the release: a file, or `env://NAME`.
    pub key: Option<String>,
}

/// A release that was made.
#[derive(Debug)]
pub struct Release {
    /// The folder with all files.
    pub folder: PathBuf,
    /// The reference of each image, with its digest, by the image's name.
    pub images: BTreeMap<&'static str, String>,
    /// The chart's address for helm, if a registry has it.
    pub chart: Option<String>,
}

/// The error of a release.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// No destination was given.
    #[error(
        "failed to release: there is no --to; name a registry, such as host/bursar, or a folder"
    )]
    NoDestination,
    /// A program could not be built.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// A Go program could not be built.
    #[error(transparent)]
    Go(#[from] CacheError<BuildError>),
    /// A tool could not be installed.
    #[error(transparent)]
    Tool(#[from] CacheError<ToolError>),
    /// An image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The chart could not be packaged.
    #[error(transparent)]
    Chart(#[from] chart::ChartPackageError),
    /// A bill of materials could not be made.
    #[error(transparent)]
    Sbom(#[from] sbom::SbomError),
    /// The changelog has no entry.
    #[error(transparent)]
    Changelog(#[from] changelog::NoEntry),
    /// The archive of the command-line program could not be made.
    #[error(transparent)]
    CliArchive(#[from] CliArchiveError),
    /// A registry refused.
    #[error(transparent)]
    Push(#[from] registry::PushError),
    /// A signature could not be made.
    #[error(transparent)]
    Signing(#[from] signing::SigningError),
    /// A file cannot be read or written.
    #[error("failed to write the release: {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> ReleaseError {
    let path = path.to_path_buf();
    move |source| ReleaseError::File { path, source }
}

/// Builds the programs of all images and the command-line program in the release profile. The
/// latter and the operator are linked statically.
///
/// # Errors
/// When a program does not compile.
pub fn build_programs(progress: &Progress) -> Result<Binaries, ReleaseError> {
    progress.report("building Bursar in the release profile");
    let packages = RECIPES.iter().flat_map(Recipe::packages);
    let packages: Vec<_> = packages.filter(|package| *package != OPERATOR).collect();
    let binaries = workspace::build_packages(workspace::Profile::Release, &packages)?;
    let target = cli_archive::default_target();
    let plugin = cli_archive::build(&target)?;
    let operator = cli_archive::static_program(OPERATOR, OPERATOR, &target)?;
    Ok(binaries
        .with(cli_archive::PROGRAM, plugin)
        .with(OPERATOR, operator))
}

/// The entry of a version in the changelog.
///
/// # Errors
/// When the changelog has none, or cannot be read.
pub fn changelog_entry(version: &str) -> Result<String, ReleaseError> {
    let changelog = paths::repository().join("CHANGELOG.md");
    let text = fs::read_to_string(&changelog).map_err(file_error(&changelog))?;
    Ok(changelog::entry(&text, version)?)
}

/// Makes a release of these programs, or of the parts that other machines have built.
///
/// # Errors
/// When a step fails. A registry may have some of the images then, and none names them.
pub fn make(
    options: &ReleaseOptions,
    programs: Option<&Binaries>,
    progress: &Progress,
) -> Result<Release, ReleaseError> {
    let ReleaseOptions {
        version,
        destinations,
        parts,
        key,
    } = options;
    let version = version.as_str();
    let started_on = Timestamp::now();
    let (mut folder, mut registries) = (None, Vec::new());
    for destination in destinations {
        match destination {
            Destination::Folder(path) => folder = folder.or_else(|| Some(path.clone())),
            Destination::Registry(registry) => registries.push(registry.as_str()),
        }
    }
    if destinations.is_empty() {
        return Err(ReleaseError::NoDestination);
    }
    let notes = changelog_entry(version)?;
    let toolbox = kube::build(progress)?;
    let signer = key.as_deref().map(|key| Signer::new(key, progress));
    let signer = signer.transpose()?;

    let folder = folder.unwrap_or_else(|| default_folder(version));
    match fs::remove_dir_all(folder.join(LAYOUTS)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(file_error(&folder)(error));
        }
        _ => fs::create_dir_all(&folder).map_err(file_error(&folder))?,
    }
    let digests = match programs {
        Some(programs) => write_programs(programs, version, &folder, started_on, progress)?,
        None => join_images(parts, &folder)?,
    };
    let references = ImageReferences {
        registry: registries.first().copied(),
        version,
        digests: &digests,
    };
    progress.report("packaging the chart");
    let package = chart::package(&toolbox.program("helm"), &references, &folder)?;
    let layout = folder.join(LAYOUTS).join("chart");
    let artifact = chart::artifact(&package, version)?;
    let entry = artifact.write_blobs(&layout).map_err(file_error(&layout))?;
    images::write_layout(&layout, &entry).map_err(file_error(&layout))?;

    let names = digests.keys().copied();
    let images: BTreeMap<_, _> = names
        .filter_map(|name| Some((name, references.reference(name)?)))
        .collect();
    write_files(&folder, &notes, &images)?;
    match programs.and_then(|programs| programs.get(cli_archive::PROGRAM)) {
        Some(program) => {
            progress.report("packing kubectl-bursar");
            cli_archive::write(program, &cli_archive::default_target(), version, &folder)?;
        }
        // The archives come with the parts.
        None => cli_archive::write_manifest(version, &folder)?,
    }
    let checksums = write_checksums(&folder)?;
    if let Some(signer) = &signer {
        signer.sign_file(&checksums)?;
    }

    let content = Content {
        version,
        folder: &folder,
        images: &digests,
        chart: artifact.digest(),
    };
    for registry in &registries {
        content.push(registry, progress)?;
        if let Some(signer) = &signer {
            content.sign(signer, registry, progress)?;
        }
    }
    let chart = registries.first();
    Ok(Release {
        folder,
        images,
        chart: chart.map(|registry| format!("oci://{registry}/charts/bursar")),
    })
}

/// Writes the images of these programs, their bills of materials and their provenance. Returns the
/// images' digests.
fn write_programs(
    programs: &Binaries,
    version: &str,
    folder: &Path,
    started_on: Timestamp,
    progress: &Progress,
) -> Result<BTreeMap<&'static str, String>, ReleaseError> {
    write_bills(programs, version, folder, progress)?;
    let digests = write_images(programs, version, folder, progress)?;
    let path = folder.join(file_of_provenance(version, images::architecture()));
    let provenance = provenance::predicate(version, started_on).map_err(file_error(&path))?;
    write_json(&path, &provenance)?;
    Ok(digests)
}

/// Returns the folder of a release that goes to registries only.
fn default_folder(version: &str) -> PathBuf {
    paths::repository()
        .join("target")
        .join(format!("release-{version}"))
}

/// Writes the bill of materials of each image.
fn write_bills(
    programs: &Binaries,
    version: &str,
    folder: &Path,
    progress: &Progress,
) -> Result<(), ReleaseError> {
    progress.report("describing what is in the images");
    let bills = sbom::PackageBills::make(&tools::cargo_cyclonedx()?)?;
    for recipe in RECIPES {
        let libraries = recipe.system_libraries(programs)?;
        let bill = bills.of_image(recipe, version, &libraries)?;
        let name = file_of_bill(recipe.name, version, images::architecture());
        write_json(&folder.join(name), &bill)?;
    }
    Ok(())
}

fn file_of_bill(image: &str, version: &str, architecture: &str) -> String {
    format!("{image}-{version}-{architecture}.cdx.json")
}

fn file_of_provenance(version: &str, architecture: &str) -> String {
    format!("provenance-{version}-{architecture}.json")
}

fn write_json(path: &Path, value: &Value) -> Result<(), ReleaseError> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from);
    let written = text.and_then(|text| fs::write(path, format!("{text}\n")));
    written.map_err(file_error(path))
}

/// Writes the layout of each image, and returns the digests of their indexes.
fn write_images(
    programs: &Binaries,
    version: &str,
    folder: &Path,
    progress: &Progress,
) -> Result<BTreeMap<&'static str, String>, ReleaseError> {
    let mut digests = BTreeMap::new();
    for recipe in RECIPES {
        progress.report(format_args!("writing the image {}", recipe.name));
        let layout = folder.join(LAYOUTS).join(recipe.name);
        let image = recipe.image(programs, labels(recipe, version))?;
        let written = image
            .artifact(Layer::Gzip)
            .and_then(|image| image.write_blobs(&layout))
            .and_then(|entry| images::write_index(&layout, &[entry]));
        digests.insert(recipe.name, written.map_err(file_error(&layout))?);
    }
    Ok(digests)
}

/// Returns the labels of an image (OCI image specification, "Pre-Defined Annotation Keys").
fn labels(recipe: &Recipe, version: &str) -> BTreeMap<&'static str, String> {
    let mut labels = BTreeMap::from([
        (
            "org.opencontainers.image.title",
            format!("bursar-{}", recipe.name),
        ),
        (
            "org.opencontainers.image.description",
            recipe.description.to_owned(),
        ),
        ("org.opencontainers.image.version", version.to_owned()),
        ("org.opencontainers.image.licenses", "Apache-2.0".to_owned()),
        ("org.opencontainers.image.vendor", "Bursar".to_owned()),
    ]);
    if let Some(revision) = provenance::revision() {
        labels.insert("org.opencontainers.image.revision", revision);
    }
    labels
}

/// Joins the images, bills and archives of releases of single architectures, and returns the
/// digests of the joined indexes.
fn join_images(
    parts: &[PathBuf],
    folder: &Path,
) -> Result<BTreeMap<&'static str, String>, ReleaseError> {
    let mut digests = BTreeMap::new();
    for recipe in RECIPES {
        let layout = folder.join(LAYOUTS).join(recipe.name);
        let mut manifests = Vec::new();
        for part in parts {
            let from = part.join(LAYOUTS).join(recipe.name);
            manifests.extend(images::take_over(&from, &layout).map_err(file_error(&from))?);
        }
        let index = images::write_index(&layout, &manifests);
        digests.insert(recipe.name, index.map_err(file_error(&layout))?);
    }
    for part in parts {
        for path in files(part)? {
            if let Some(name) = path.file_name()
                && is_of_one_architecture(&name.to_string_lossy())
            {
                fs::copy(&path, folder.join(name)).map_err(file_error(&path))?;
            }
        }
    }
    Ok(digests)
}

/// Whether a part's file goes into the joined release as it is: a bill of materials, a provenance,
/// or an archive of the command-line program.
fn is_of_one_architecture(name: &str) -> bool {
    let is_archive = name.starts_with(cli_archive::PROGRAM) && name.ends_with(".tar.gz");
    is_archive || name.ends_with(".cdx.json") || name.starts_with("provenance-")
}

/// Writes the notes, the list of images and the files of the chart.
fn write_files(
    folder: &Path,
    notes: &str,
    images: &BTreeMap<&'static str, String>,
) -> Result<(), ReleaseError> {
    let list: String = images.values().map(|image| format!("{image}\n")).collect();
    for (name, text) in [("images.txt", list), ("notes.md", format!("{notes}\n"))] {
        let path = folder.join(name);
        fs::write(&path, text).map_err(file_error(&path))?;
    }
    for name in CHART_FILES {
        let path = paths::repository().join("charts/bursar").join(name);
        fs::copy(&path, folder.join(name)).map_err(file_error(&path))?;
    }
    Ok(())
}

/// Returns the files of a folder, in the order of their names.
fn files(folder: &Path) -> Result<Vec<PathBuf>, ReleaseError> {
    let entries = fs::read_dir(folder).map_err(file_error(folder))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut files: Vec<_> = paths.filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

/// Writes the checksums of all files in the format of `sha256sum`, and returns their file.
fn write_checksums(folder: &Path) -> Result<PathBuf, ReleaseError> {
    let mut text = String::new();
    for path in files(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(CHECKSUMS) {
            let bytes = fs::read(&path).map_err(file_error(&path))?;
            let digest = images::digest(&bytes).replace("sha256:", "");
            text.push_str(&format!("{digest}  {name}\n"));
        }
    }
    let path = folder.join(CHECKSUMS);
    fs::write(&path, text).map_err(file_error(&path))?;
    Ok(path)
}

/// The images and the chart of a release's layouts.
struct Content<'a> {
    version: &'a str,
    /// The release's folder.
    folder: &'a Path,
    /// The digest of each image's index, by the image's name.
    images: &'a BTreeMap<&'static str, String>,
    /// The digest of the chart's manifest.
    chart: &'a str,
}

impl Content<'_> {
    /// Pushes the images and then the chart, which names them.
    fn push(&self, registry: &str, progress: &Progress) -> Result<(), ReleaseError> {
        let Self { version, chart, .. } = self;
        let crane = kube::build_crane(progress)?.program("crane");
        let layouts = self.folder.join(LAYOUTS);
        for (name, digest) in self.images {
            let reference = format!("{registry}/{name}:{version}");
            progress.report(format_args!("pushing {reference}"));
            registry::push(&crane, &layouts.join(name), &reference, digest)?;
        }
        let reference = format!("{registry}/charts/bursar:{version}");
        progress.report(format_args!("pushing {reference}"));
        registry::push(&crane, &layouts.join("chart"), &reference, chart)?;
        Ok(())
    }

    /// Signs the images and the chart of a registry. Attests the bill of materials and the
    /// provenance of each architecture's image.
    fn sign(
        &self,
        signer: &Signer<'_>,
        registry: &str,
        progress: &Progress,
    ) -> Result<(), ReleaseError> {
        let Self {
            version, folder, ..
        } = self;
        progress.report(format_args!("signing what {registry} has"));
        for (name, digest) in self.images {
            signer.sign(&format!("{registry}/{name}@{digest}"))?;
            let layout = folder.join(LAYOUTS).join(name);
            let (_, manifests) = images::read_index(&layout).map_err(file_error(&layout))?;
            for manifest in &manifests {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let architecture = text(&manifest["platform"]["architecture"]);
                let reference = format!("{registry}/{name}@{}", text(&manifest["digest"]));
                let bill = folder.join(file_of_bill(name, version, &architecture));
                signer.attest(&reference, Predicate::CycloneDx, &bill)?;
                let provenance = folder.join(file_of_provenance(version, &architecture));
                signer.attest(&reference, Predicate::Provenance, &provenance)?;
            }
        }
        signer.sign(&format!("{registry}/charts/bursar@{}", self.chart))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn checksums_name_every_file_but_themselves() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a", CHECKSUMS] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        fs::create_dir(folder.path().join(LAYOUTS)).unwrap();
        write_checksums(folder.path()).unwrap();
        let checked = Command::new("sha256sum")
            .args(["--check", "--strict", CHECKSUMS])
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}");
        let lines = String::from_utf8(checked.stdout).unwrap();
        assert_eq!(lines, "a: OK\nb: OK\n");
    }

    #[test]
    fn release_workflow_names_actions_by_their_commits() {
        let workflow = paths::repository().join(".github/workflows/release.yaml");
        let workflow = fs::read_to_string(workflow).unwrap();
        let uses = workflow
            .lines()
            .filter_map(|line| line.split_once("uses: "));
        let actions: Vec<_> = uses.map(|(_, action)| action).collect();
        assert!(!actions.is_empty());
        for action in actions {
            let commit = action.split_once('@').and_then(|(_, at)| at.get(..40));
            let is_commit = commit.is_some_and(|id| id.chars().all(|c| c.is_ascii_hexdigit()));
            assert!(is_commit, "{action}");
        }
    }

    #[test]
    fn joined_parts_have_every_image_bill_and_archive() {
        let folder = tempfile::tempdir().unwrap();
        let part = folder.path().join("part");
        for recipe in RECIPES {
            let layout = part.join(LAYOUTS).join(recipe.name);
            images::write_index(&layout, &[]).unwrap();
        }
        let of_one_architecture = [
            "agent-1-arm64.cdx.json",
            "kubectl-bursar_1_linux_arm64.tar.gz",
            "provenance-1-arm64.json",
        ];
        for name in of_one_architecture {
            fs::write(part.join(name), "{}").unwrap();
        }
        for of_the_whole in ["notes.md", "bursar.yaml", "bursar-1.tgz"] {
            fs::write(part.join(of_the_whole), "").unwrap();
        }
        let joined = folder.path().join("joined");
        let digests = join_images(&[part], &joined).unwrap();
        assert_eq!(digests.len(), RECIPES.len());
        let copied = files(&joined).unwrap();
        assert_eq!(copied, of_one_architecture.map(|name| joined.join(name)));
    }
}
