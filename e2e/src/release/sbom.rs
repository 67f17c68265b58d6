//! Makes a CycloneDX 1.5 bill of materials for each image.
//!
//! `cargo-cyclonedx` describes each package of the workspace. A bill of an image joins those of its
//! packages and adds the libraries that the image has from the machine of the build.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::cargo;
use crate::images::{Recipe, digest};
use crate::paths;

/// The file of a package's bill in the package's folder.
const SUFFIX: &str = ".cdx.json";

/// The error of a bill of materials.
#[derive(Debug, thiserror::Error)]
pub enum SbomError {
    /// A program could not be started.
    #[error("failed to describe the packages: {program}: {source}")]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A program failed.
    #[error("failed to describe the packages: {program} ({status}): {stderr}")]
    Failed {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: String,
        /// Its standard error.
        stderr: String,
    },
    /// A file cannot be read or written.
    #[error("failed to describe the packages: {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// `cargo-cyclonedx` described no such package.
    #[error("failed to describe the image: no bill of materials for the package {0}")]
    NoPackage(&'static str),
}

/// The bills of all packages of the workspace, by name.
#[derive(Debug)]
pub(super) struct PackageBills(BTreeMap<String, Value>);

impl PackageBills {
    /// Describes the packages of this repository with `cargo-cyclonedx`, in a copy, because the
    /// tool writes its files beside the manifests.
    ///
    /// # Errors
    /// When git or the tool fails, or a file cannot be read.
    pub(super) fn make(tool: &Path) -> Result<Self, SbomError> {
        let file = |path: &Path| {
            let path = path.to_path_buf();
            move |source| SbomError::File { path, source }
        };
        let copy = tempfile::tempdir().map_err(file(Path::new("temporary folder")))?;
        let root = copy.path().join("bursar");
        let mut git = Command::new("git");
        git.args(["checkout-index", "--all", "--prefix"])
            .arg(format!("{}/", root.display()))
            .current_dir(paths::repository());
        run(&mut git)?;
        // With this variable the bills have the time of the commit, and no random number.
        let mut time = Command::new("git");
        time.args(["log", "-1", "--format=%ct"])
            .current_dir(paths::repository());
        let time = run(&mut time)?;
        let mut tool = cargo::subcommand(tool, "cyclonedx");
        tool.args(["--format=json", "--spec-version=1.5", "--all", "--quiet"])
            .args(["--no-build-deps", "--manifest-path"])
            .arg(root.join("Cargo.toml"))
            .env("SOURCE_DATE_EPOCH", time.trim());
        run(&mut tool)?;
        let mut bills = BTreeMap::new();
        read_bills(&root, &root, &mut bills).map_err(file(&root))?;
        Ok(Self(bills))
    }

    /// Joins the bills of the image's packages.
    ///
    /// # Errors
    /// When a package has no bill, or a library cannot be read.
    pub(super) fn of_image(
        &self,
        recipe: &Recipe,
        version: &str,
        libraries: &BTreeMap<String, PathBuf>,
    ) -> Result<Value, SbomError> {
        let mut bills = Vec::new();
        for package in recipe.packages() {
            let bill = self.0.get(package);
            bills.push(bill.ok_or(SbomError::NoPackage(package))?);
        }
        let mut system = Vec::new();
        for (name, path) in libraries {
            system.push(library(name, path)?);
        }
        Ok(join(recipe.name, version, &bills, system))
    }
}

/// Runs a command, and returns its standard output.
fn run(command: &mut Command) -> Result<String, SbomError> {
    let program = PathBuf::from(command.get_program());
    let output = command.output().map_err(|source| SbomError::Start {
        program: program.clone(),
        source,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(SbomError::Failed {
        program,
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Reads the bills below `folder`, without the path of the copy in them.
fn read_bills(folder: &Path, root: &Path, found: &mut BTreeMap<String, Value>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            read_bills(&path, root, found)?;
            continue;
        }
        let name = entry.file_name();
        if let Some(package) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) {
            let text = fs::read_to_string(&path)?;
            let text = text.replace(&format!("path+file://{}", root.display()), "path+file://");
            found.insert(package.to_owned(), serde_json::from_str(&text)?);
        }
    }
    Ok(())
}

/// Describes a library of this machine, with its Debian package where there is one.
fn library(name: &str, path: &Path) -> Result<Value, SbomError> {
    let bytes = fs::read(path).map_err(|source| SbomError::File {
        path: path.to_path_buf(),
        source,
    })?;
    let hash = digest(&bytes).replace("sha256:", "");
    let package = debian_package(path);
    let version = package.as_ref().map_or("", |(_, version)| version);
    let mut library = json!({
        "type": "library", "bom-ref": format!("file:{name}@{hash}"), "name": name, "version": version,
        "hashes": [{"alg": "SHA-256", "content": hash}],
    });
    if let Some((package, version)) = &package {
        library["purl"] = json!(format!("pkg:deb/debian/{package}@{version}"));
    }
    Ok(library)
}

/// Returns the Debian package of a file with the package's version.
fn debian_package(path: &Path) -> Option<(String, String)> {
    let real = path.canonicalize().ok()?;
    let query = |arguments: &[&str]| {
        let output = Command::new("dpkg-query").args(arguments).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    };
    // Packages of before the merge of /lib into /usr/lib list the path without /usr.
    let real = real.to_str()?;
    let owner = query(&["--search", real])
        .or_else(|| query(&["--search", real.strip_prefix("/usr").unwrap_or(real)]))?;
    let package = owner.split(':').next()?.trim().to_owned();
    let version = query(&["--show", "--showformat=${Version}\n", &package])?;
    let version = version.lines().next()?.to_owned();
    Some((package, version))
}

/// Joins the bills of packages to that of an image. A package that several bills have is listed
/// once.
fn join(image: &str, version: &str, bills: &[&Value], system: Vec<Value>) -> Value {
    let reference = format!("pkg:oci/{image}@{version}");
    let (mut components, mut edges) = (BTreeMap::new(), BTreeMap::new());
    let mut direct = BTreeSet::new();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for bill in bills {
        let package = &bill["metadata"]["component"];
        direct.insert(text(&package["bom-ref"]));
        let listed = bill["components"].as_array().into_iter().flatten();
        for component in listed.chain([package]) {
            components.insert(text(&component["bom-ref"]), component.clone());
        }
        for edge in bill["dependencies"].as_array().into_iter().flatten() {
            let to = edge["dependsOn"].as_array().into_iter().flatten();
            let known: &mut BTreeSet<String> = edges.entry(text(&edge["ref"])).or_default();
            known.extend(to.map(text));
        }
    }
    for library in system {
        let name = text(&library["bom-ref"]);
        direct.insert(name.clone());
        edges.entry(name.clone()).or_default();
        components.insert(name, library);
    }
    edges.insert(reference.clone(), direct);
    let mut metadata = json!({"component": {
        "type": "container", "bom-ref": reference, "name": format!("bursar-{image}"),
        "version": version, "purl": reference,
    }});
    for field in ["timestamp", "tools"] {
        if let Some(value) = bills.first().and_then(|bill| bill["metadata"].get(field)) {
            metadata[field] = value.clone();
        }
    }
    let edges = edges.into_iter();
    let edges: Vec<Value> = edges
        .map(|(from, to)| json!({"ref": from, "dependsOn": to}))
        .collect();
    json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": metadata,
        "components": components.into_values().collect::<Vec<_>>(), "dependencies": edges,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bill(package: &str, uses: &[&str]) -> Value {
        let component = |name: &str| json!({"bom-ref": name, "name": name, "version": "1"});
        json!({
            "metadata": {"timestamp": "t", "component": component(package)},
            "components": uses.iter().map(|name| component(name)).collect::<Vec<_>>(),
            "dependencies": [{"ref": package, "dependsOn": uses}],
        })
    }

    #[test]
    fn joined_bill_lists_each_package_once() {
        let (agent, shim) = (bill("agent", &["serde", "tokio"]), bill("shim", &["serde"]));
        let library = json!({"bom-ref": "file:libc", "name": "libc.so.6"});
        let joined = join("agent", "1.2.3", &[&agent, &shim], vec![library]);
        let of = |list: &Value, field: &str| -> Vec<String> {
            let list = list.as_array().unwrap().iter();
            list.map(|entry| entry[field].as_str().unwrap().to_owned())
                .collect()
        };
        let components = of(&joined["components"], "bom-ref");
        assert_eq!(components, ["agent", "file:libc", "serde", "shim", "tokio"]);
        let image = joined["dependencies"].as_array().unwrap().iter();
        let image = image
            .clone()
            .find(|edge| edge["ref"] == "pkg:oci/agent@1.2.3")
            .unwrap();
        assert_eq!(image["dependsOn"], json!(["agent", "file:libc", "shim"]));
        assert_eq!(joined["metadata"]["timestamp"], "t");
    }

    #[test]
    fn library_has_the_hash_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        fs::write(&path, "x").unwrap();
        let library = library("libx.so", &path).unwrap();
        let hash = digest(b"x").replace("sha256:", "");
        assert_eq!(library["hashes"][0]["content"], hash);
        assert!(library.get("purl").is_none());
    }
}
