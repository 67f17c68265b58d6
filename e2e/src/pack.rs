//! Packs all artifacts into one archive, for a machine without compilers.
//!
//! ```text
//! bursar-e2e/run                     the harness: `run demo`, `run up`, `run down`
//!            images.txt              the references of our images
//!            programs/               Kubernetes, containerd, runc, CNI
//!            images/                 our images
//!            driver/                 the simulated driver
//!            chart/                  the chart, rendered for simulated and for real GPUs
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::artifacts::{Artifacts, IMAGE_NAMES, SIMULATED_DRIVER_FILES};
use crate::chart::{Chart, ChartError};
use crate::images::{Archive, PAUSE, Template, TemplateError};
use crate::kube::{self, PackageError, Toolbox};
use crate::progress::Progress;
use crate::sim;

/// The maximum size of an archive in bytes, for slow uploads to the other machine.
pub const MOST: u64 = 60 << 20;

/// The folder in the archive.
const FOLDER: &str = "bursar-e2e";
/// The harness's file name in the archive.
const HARNESS_NAME: &str = "run";
/// The file with the template of the images' references.
const IMAGE_TEMPLATE_FILE: &str = "images.txt";

/// The error of packing or opening an archive.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The compressor is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The compressor failed.
    #[error("xz failed ({0})")]
    Compress(std::process::ExitStatus),
    /// The chart cannot be rendered.
    #[error(transparent)]
    Chart(#[from] ChartError),
    /// The archive exceeds its maximum size.
    #[error("the archive has {bytes} bytes; it may have {MOST}")]
    TooBig {
        /// Its size.
        bytes: u64,
    },
    /// The file of references of the unpacked folder is invalid.
    #[error("{path}: {source}")]
    References {
        /// The file.
        path: PathBuf,
        /// The error of its content.
        source: TemplateError,
    },
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> PackError {
    let path = path.to_path_buf();
    move |source| PackError::File { path, source }
}

/// Writes the artifacts, built in the release profile, to the archive `out`, and returns its size.
///
/// # Errors
/// When a file cannot be read or written, or the archive is bigger than [`MOST`].
pub async fn write(
    artifacts: &Artifacts,
    out: &Path,
    progress: &Progress,
) -> Result<u64, PackError> {
    let mut charts = Vec::new();
    for simulated in [true, false] {
        let text = artifacts
            .chart
            .render(&artifacts.image_template, simulated)
            .await?;
        charts.push((Chart::rendered_name(simulated), text));
    }
    kube::require_xz(progress)?;
    progress.report("packing (about 3 minutes)");
    let target = File::create(out).map_err(file_error(out))?;
    let mut xz = spawn_xz(target).map_err(file_error(Path::new("xz")))?;
    let pipe = xz.stdin.take().map_or_else(
        || {
            Err(file_error(Path::new("xz"))(io::Error::other(
                "it has no input",
            )))
        },
        Ok,
    )?;
    let filled = write_entries(pipe, artifacts, &charts);
    let status = xz.wait().map_err(file_error(Path::new("xz")))?;
    filled?;
    if !status.success() {
        return Err(PackError::Compress(status));
    }
    let bytes = fs::metadata(out).map_err(file_error(out))?.len();
    if bytes > MOST {
        return Err(PackError::TooBig { bytes });
    }
    Ok(bytes)
}

/// The images contain the same libraries far apart, hence the large dictionary and the single
/// block.
fn spawn_xz(target: File) -> io::Result<Child> {
    Command::new("xz")
        .args(["--threads=1", "--x86", "--lzma2=preset=6e,dict=128MiB"])
        .stdin(Stdio::piped())
        .stdout(target)
        .spawn()
}

fn write_entries(
    pipe: impl Write,
    artifacts: &Artifacts,
    charts: &[(&str, String)],
) -> Result<(), PackError> {
    let root = Path::new(FOLDER);
    let mut archive = tar::Builder::new(pipe);
    let mut add = |from: &Path, to: PathBuf| {
        archive
            .append_path_with_name(from, root.join(to))
            .map_err(file_error(from))
    };
    add(&artifacts.harness, HARNESS_NAME.into())?;
    for (program, _) in kube::archived_programs() {
        let from = artifacts.toolbox.program(program);
        add(&from, Path::new("programs").join(program))?;
    }
    for (name, image) in &artifacts.images {
        add(&image.path, image_path(name))?;
    }
    let driver = &artifacts.simulated_driver;
    for (from, name) in std::iter::once(&driver.command)
        .chain(&driver.libraries)
        .zip(SIMULATED_DRIVER_FILES)
    {
        add(from, Path::new("driver").join(name))?;
    }
    for (program, names) in kube::archived_programs() {
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            let link = root.join("programs").join(name);
            archive
                .append_link(&mut header, &link, program)
                .map_err(file_error(&link))?;
        }
    }
    let mut write = |path: PathBuf, text: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(text.len() as u64);
        let path = root.join(path);
        archive
            .append_data(&mut header, &path, text.as_bytes())
            .map_err(file_error(&path))
    };
    write(
        IMAGE_TEMPLATE_FILE.into(),
        &artifacts.image_template.to_string(),
    )?;
    for (name, text) in charts {
        write(Path::new("chart").join(name), text)?;
    }
    let finished = archive.into_inner().and_then(|mut pipe| pipe.flush());
    finished.map_err(file_error(root))
}

fn image_path(name: &str) -> PathBuf {
    Path::new("images").join(format!("{name}.tar"))
}

/// Returns the folder of an unpacked archive, if `program` is its harness.
pub fn unpacked_folder(program: &Path) -> Option<PathBuf> {
    let folder = program.parent()?;
    folder
        .join(IMAGE_TEMPLATE_FILE)
        .exists()
        .then(|| folder.to_path_buf())
}

/// Returns the artifacts of an archive unpacked to `folder`.
///
/// # Errors
/// When the file of references cannot be read or parsed.
pub fn open(folder: &Path) -> Result<Artifacts, PackError> {
    let path = folder.join(IMAGE_TEMPLATE_FILE);
    let text = fs::read_to_string(&path).map_err(file_error(&path))?;
    let template: Template = text
        .parse()
        .map_err(|source| PackError::References { path, source })?;
    let archive = |name| {
        let reference = if name == "pause" {
            PAUSE.to_owned()
        } else {
            template.reference(name)
        };
        (
            name,
            Archive {
                reference,
                path: folder.join(image_path(name)),
            },
        )
    };
    let images = IMAGE_NAMES.map(archive).into();
    let toolbox = Toolbox::new(vec![folder.join("programs")]);
    let [command, cuda, nvml] = SIMULATED_DRIVER_FILES.map(|name| folder.join("driver").join(name));
    let chart = Chart::Rendered {
        kubectl: toolbox.program("kubectl"),
        folder: folder.join("chart"),
    };
    Ok(Artifacts {
        toolbox,
        harness: folder.join(HARNESS_NAME),
        image_template: template,
        images,
        simulated_driver: sim::SimulatedDriver {
            command,
            libraries: vec![cuda, nvml],
        },
        chart,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes artifacts of small files in `folder`.
    fn artifacts(folder: &Path) -> Artifacts {
        let make = |name: &str| {
            let path = folder.join(name);
            fs::write(&path, name).unwrap();
            path
        };
        for (program, _) in kube::archived_programs() {
            make(program);
        }
        let images = IMAGE_NAMES.map(|name| {
            let (reference, path) = (name.to_owned(), make(&format!("{name}.tar")));
            (name, Archive { reference, path })
        });
        let [command, cuda, nvml] = SIMULATED_DRIVER_FILES.map(make);
        Artifacts {
            toolbox: Toolbox::new(vec![folder.to_path_buf()]),
            harness: make("harness"),
            image_template: "localhost/bursar-{name}:1".parse().unwrap(),
            images: images.into(),
            simulated_driver: sim::SimulatedDriver {
                command,
                libraries: vec![cuda, nvml],
            },
            chart: Chart::Helm {
                helm: "helm".into(),
                folder: "chart".into(),
            },
        }
    }

    #[test]
    fn unpacked_archive_has_every_packed_artifact() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let packed = artifacts(here.path());
        let mut bytes = Vec::new();
        let charts =
            [true, false].map(|simulated| (Chart::rendered_name(simulated), "text".to_owned()));
        write_entries(&mut bytes, &packed, &charts).unwrap();
        tar::Archive::new(bytes.as_slice())
            .unpack(there.path())
            .unwrap();

        let folder = there.path().join(FOLDER);
        assert_eq!(
            unpacked_folder(&folder.join(HARNESS_NAME)),
            Some(folder.clone())
        );
        assert_eq!(unpacked_folder(here.path()), None);
        let found = open(&folder).unwrap();
        assert_eq!(fs::read_to_string(&found.harness).unwrap(), "harness");
        assert_eq!(
            fs::read_to_string(found.toolbox.program("kubelet")).unwrap(),
            "kubernetes"
        );
        assert_eq!(
            fs::read_to_string(&found.simulated_driver.libraries[1]).unwrap(),
            SIMULATED_DRIVER_FILES[2]
        );
        assert_eq!(found.image_template, packed.image_template);
        for name in IMAGE_NAMES {
            assert_eq!(
                fs::read_to_string(&found.images[name].path).unwrap(),
                format!("{name}.tar")
            );
        }
        assert!(
            folder
                .join("chart")
                .join(Chart::rendered_name(true))
                .exists()
        );
    }
}
