//! Packages the chart with the references of a release's images.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::images::{Artifact, Blob};
use crate::paths;

/// The values with an image, each with the image's name.
const IMAGES: &[(&str, &str)] = &[
    ("agent", "agent"),
    ("operator", "operator"),
    ("simulatedDriver", "simulated-driver"),
];

/// The error of packaging the chart.
#[derive(Debug, thiserror::Error)]
pub enum ChartPackageError {
    /// A file cannot be read or written.
    #[error("failed to package the chart: {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The chart is not laid out as expected.
    #[error("failed to write the images into the chart: {0}")]
    Layout(String),
    /// Helm refused the chart.
    #[error("failed to package the chart: helm package ({status}): {stderr}")]
    Helm {
        /// Its exit status.
        status: String,
        /// Its standard error.
        stderr: String,
    },
}

/// The place of a release's images: a registry, and the digest of each image.
#[derive(Debug)]
pub(super) struct ImageReferences<'a> {
    /// The registry, with the path of the repositories below it. A release into a folder has none.
    pub(super) registry: Option<&'a str>,
    /// The tag of each image.
    pub(super) version: &'a str,
    /// The digest of each image by its name.
    pub(super) digests: &'a BTreeMap<&'static str, String>,
}

impl ImageReferences<'_> {
    /// Returns the host of the registry, and the image's repository on it.
    fn repository(&self, image: &str) -> (&str, String) {
        match self
            .registry
            .map(|registry| (registry, registry.split_once('/')))
        {
            Some((_, Some((host, path)))) => (host, format!("{path}/{image}")),
            Some((host, None)) => (host, image.to_owned()),
            None => ("", format!("bursar/{image}")),
        }
    }

    /// Returns the reference of an image, with tag and digest.
    pub(super) fn reference(&self, image: &str) -> Option<String> {
        let digest = self.digests.get(image)?;
        let (host, repository) = self.repository(image);
        let separator = if host.is_empty() { "" } else { "/" };
        let version = self.version;
        Some(format!("{host}{separator}{repository}:{version}@{digest}"))
    }
}

/// Packages the chart, and returns the package's file in `folder`.
///
/// # Errors
/// When a file of the chart is missing or has another layout, or helm fails.
pub(super) fn package(
    helm: &Path,
    images: &ImageReferences<'_>,
    folder: &Path,
) -> Result<PathBuf, ChartPackageError> {
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ChartPackageError::File { path, source }
    };
    let source = paths::repository().join("charts/bursar");
    let copy = tempfile::tempdir().map_err(file(Path::new("temporary folder")))?;
    let chart = copy.path().join("bursar");
    copy_folder(&source, &chart).map_err(file(&source))?;
    type Change<'a> = fn(&str, &ImageReferences<'a>) -> Result<String, ChartPackageError>;
    let changes: [(&str, Change<'_>); 2] =
        [("values.yaml", with_images), ("Chart.yaml", annotated)];
    for (name, change) in changes {
        let path = chart.join(name);
        let text = fs::read_to_string(&path).map_err(file(&path))?;
        fs::write(&path, change(&text, images)?).map_err(file(&path))?;
    }
    let output = Command::new(helm)
        .arg("package")
        .arg(&chart)
        .args(["--version", images.version, "--app-version", images.version])
        .arg("--destination")
        .arg(folder)
        .output()
        .map_err(file(helm))?;
    if !output.status.success() {
        return Err(ChartPackageError::Helm {
            status: output.status.to_string(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    Ok(folder.join(format!("bursar-{}.tgz", images.version)))
}

/// Returns the packaged chart as Helm stores it in a registry (helm.sh, "Use OCI-based
/// registries").
///
/// # Errors
/// When the package or the chart's metadata cannot be read.
pub(super) fn artifact(package: &Path, version: &str) -> Result<Artifact, ChartPackageError> {
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ChartPackageError::File { path, source }
    };
    let path = paths::repository().join("charts/bursar/Chart.yaml");
    let text = fs::read_to_string(&path).map_err(file(&path))?;
    let mut about: Value = serde_yaml_ng::from_str(&text)
        .map_err(|error| ChartPackageError::Layout(format!("Chart.yaml: {error}")))?;
    about["version"] = json!(version);
    about["appVersion"] = json!(version);
    let config = Blob::new(
        "application/vnd.cncf.helm.config.v1+json",
        about.to_string().into_bytes(),
    );
    let content = fs::read(package).map_err(file(package))?;
    let layer = Blob::new(
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        content,
    );
    let annotations = json!({
        "org.opencontainers.image.title": "bursar",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.description": about["description"],
    });
    Ok(Artifact::new(config, vec![layer], &annotations, None))
}

/// Writes registry, repository and digest of each image into the text of `values.yaml`, whose
/// comments stay.
fn with_images(values: &str, images: &ImageReferences<'_>) -> Result<String, ChartPackageError> {
    let (mut text, mut written) = (String::with_capacity(values.len()), 0);
    let (mut part, mut in_image) = ("", false);
    for line in values.lines() {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        let key = words.split(':').next().unwrap_or_default();
        if indent == 0 && !words.is_empty() && !words.starts_with('#') {
            part = key;
        }
        if indent <= 2 && !words.is_empty() && !words.starts_with('#') {
            in_image = indent == 2 && key == "image";
        }
        let image = IMAGES.iter().find(|(value, _)| *value == part);
        let value = match image.filter(|_| in_image && indent == 4) {
            Some((_, image)) => {
                let (host, repository) = images.repository(image);
                match key {
                    "registry" => Some(host.to_owned()),
                    "repository" => Some(repository),
                    "digest" => images.digests.get(image).cloned(),
                    _ => None,
                }
            }
            None => None,
        };
        match value {
            Some(value) => {
                written += 1;
                text.push_str(&format!("    {key}: \"{value}\"\n"));
            }
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    let expected = 3 * IMAGES.len();
    if written != expected {
        let text = format!("values.yaml has {written} fields of images, and not {expected}");
        return Err(ChartPackageError::Layout(text));
    }
    Ok(text)
}

/// Writes the references of the images into the annotation of `Chart.yaml` that Artifact Hub reads.
fn annotated(about: &str, images: &ImageReferences<'_>) -> Result<String, ChartPackageError> {
    let (mut text, mut written) = (String::with_capacity(about.len()), 0);
    for line in about.lines() {
        let image = line.trim_start().strip_prefix("image: ");
        let name = image.and_then(|image| image.rsplit_once('/')?.1.split(':').next());
        match name.and_then(|name| images.reference(name)) {
            Some(reference) => {
                written += 1;
                text.push_str(&format!("      image: {reference}\n"));
            }
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    if written == 0 {
        let text = "Chart.yaml has no annotation with images".to_owned();
        return Err(ChartPackageError::Layout(text));
    }
    Ok(text)
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digests() -> BTreeMap<&'static str, String> {
        let images = IMAGES.iter();
        images
            .map(|(_, image)| (*image, format!("sha256:{image}")))
            .collect()
    }

    fn chart_file(name: &str) -> String {
        let folder = paths::repository().join("charts/bursar");
        fs::read_to_string(folder.join(name)).unwrap()
    }

    #[test]
    fn values_name_the_released_images_and_nothing_else_changes() {
        let digests = digests();
        let images = ImageReferences {
            registry: Some("host:5000/a/b"),
            version: "1.2.3",
            digests: &digests,
        };
        let before = chart_file("values.yaml");
        let after = with_images(&before, &images).unwrap();
        let changed: Vec<_> = before
            .lines()
            .zip(after.lines())
            .filter(|(old, new)| old != new)
            .collect();
        assert_eq!(changed.len(), 3 * IMAGES.len(), "{changed:?}");
        let values: Value = serde_yaml_ng::from_str(&after).unwrap();
        for (value, image) in IMAGES {
            let written = &values[value]["image"];
            assert_eq!(written["registry"], "host:5000");
            assert_eq!(written["repository"], format!("a/b/{image}"));
            assert_eq!(written["digest"], format!("sha256:{image}"));
        }
    }

    #[test]
    fn values_without_an_image_are_refused() {
        let digests = digests();
        let images = ImageReferences {
            registry: Some("host"),
            version: "1.2.3",
            digests: &digests,
        };
        let without = chart_file("values.yaml").replace("    digest:", "    hash:");
        assert!(with_images(&without, &images).is_err());
        assert!(annotated("name: bursar\n", &images).is_err());
    }

    #[test]
    fn annotation_names_the_released_images() {
        let digests = digests();
        let images = ImageReferences {
            registry: Some("host:5000/a"),
            version: "1.2.3",
            digests: &digests,
        };
        let after = annotated(&chart_file("Chart.yaml"), &images).unwrap();
        let about: Value = serde_yaml_ng::from_str(&after).unwrap();
        let list = about["annotations"]["artifacthub.io/images"].as_str();
        let list: Value = serde_yaml_ng::from_str(list.unwrap()).unwrap();
        assert_eq!(list[0]["image"], "host:5000/a/agent:1.2.3@sha256:agent");
    }

    #[test]
    fn release_into_a_folder_names_no_registry() {
        let digests = digests();
        let images = ImageReferences {
            registry: None,
            version: "1.2.3",
            digests: &digests,
        };
        let agent = images.reference("agent").unwrap();
        assert_eq!(agent, "bursar/agent:1.2.3@sha256:agent");
        let before = chart_file("values.yaml");
        let after = with_images(&before, &images).unwrap();
        let values: Value = serde_yaml_ng::from_str(&after).unwrap();
        for (value, image) in IMAGES {
            let written = &values[value]["image"];
            assert_eq!(written["registry"], "");
            assert_eq!(written["repository"], format!("bursar/{image}"));
        }
    }
}
