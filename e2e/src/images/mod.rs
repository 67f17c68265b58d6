//! Builds the images of our programs. The `Dockerfile` builds the same layouts for users.

mod closure;
mod oci;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

pub use closure::ClosureError;
pub(crate) use closure::libraries;
pub use oci::{Entry, Image};

use crate::workspace::Binaries;

/// The reference of the pause image, whose container holds a pod's namespaces.
pub const PAUSE: &str = "localhost/bursar-e2e-pause:1";

/// Why an image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A program's libraries could not be found.
    #[error(transparent)]
    Closure(#[from] ClosureError),
    /// The workspace did not build a file that the image needs.
    #[error("image {image} needs {file}, which the workspace does not build")]
    NotBuilt {
        /// The image.
        image: &'static str,
        /// The program or library.
        file: String,
    },
    /// The pause program does not compile.
    #[error("compile {source_file}: {said}")]
    Pause {
        /// Its source.
        source_file: PathBuf,
        /// The compiler's output.
        said: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The archive of one image.
#[derive(Debug, Clone)]
pub struct Archive {
    /// The image's full reference.
    pub reference: String,
    /// The archive's file.
    pub path: PathBuf,
}

/// The content of one image, beside the libraries that its programs need.
struct Recipe {
    name: &'static str,
    /// Programs of the workspace; the first is the entry point.
    programs: &'static [&'static str],
    /// Libraries of the workspace with their paths in the image.
    libraries: &'static [(&'static str, &'static str)],
}

/// Libraries of glibc that the agent and pods need by name: the NVIDIA driver's libraries, which
/// are opened at run time, link to them.
const GLIBC: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
];

const RECIPES: &[Recipe] = &[
    Recipe {
        name: "agent",
        programs: &["bursar-agent", "bursar-fdstore", "bursar-provisioner"],
        libraries: &[
            ("libbursar_shim.so", "opt/bursar/shim/libcuda.so.1"),
            (
                "libbursar_nvml_shim.so",
                "opt/bursar/shim/libnvidia-ml.so.1",
            ),
        ],
    },
    Recipe {
        name: "operator",
        programs: &["bursar-operator"],
        libraries: &[],
    },
    Recipe {
        name: "probe",
        programs: &["bursar-probe"],
        libraries: &[],
    },
];

/// The placeholder of an image's name in a template.
const NAME: &str = "{name}";

/// A template of our images' references, such as `localhost/bursar-{name}:1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(String);

/// The template has no placeholder, so that all images would have one reference.
#[derive(Debug, thiserror::Error)]
#[error("{0}: has no {NAME} in it, which stands for agent, operator and probe")]
pub struct TemplateError(String);

impl std::str::FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, TemplateError> {
        if text.contains(NAME) {
            Ok(Self(text.to_owned()))
        } else {
            Err(TemplateError(text.to_owned()))
        }
    }
}

impl std::fmt::Display for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Template {
    /// The reference of the image `name`.
    pub fn reference(&self, name: &str) -> String {
        self.0.replace(NAME, name)
    }

    /// Makes the template for images with this content.
    fn of(content: Sha256) -> Self {
        let digest = content.finalize();
        let tag: String = digest
            .iter()
            .take(6)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Self(format!("localhost/bursar-{NAME}:{tag}"))
    }
}

/// Writes the archive of every image into `folder`, and returns the template of their references.
/// The tag is a hash of the content, so that another build gets other references.
///
/// # Errors
/// When a part of an image is missing, or a file cannot be written.
pub fn write_all(
    binaries: &Binaries,
    folder: &Path,
) -> Result<(Template, BTreeMap<&'static str, Archive>), ImageError> {
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ImageError::File { path, source }
    };
    fs::create_dir_all(folder).map_err(file(folder))?;
    let mut content = Sha256::new();
    let mut files = Vec::new();
    for recipe in RECIPES {
        files.push((recipe, recipe.files(binaries, &mut content)?));
    }
    let template = Template::of(content);
    let mut archives = BTreeMap::new();
    for (recipe, files) in files {
        let image = Image {
            reference: template.reference(recipe.name),
            entrypoint: vec![format!("/usr/local/bin/{}", recipe.programs[0])],
            files,
        };
        let path = folder.join(format!("{}.tar", recipe.name));
        image.write(&path).map_err(file(&path))?;
        archives.insert(
            recipe.name,
            Archive {
                reference: image.reference,
                path,
            },
        );
    }
    archives.insert("pause", write_pause(folder)?);
    Ok((template, archives))
}

/// Writes the archive of the pause image into `folder`.
///
/// # Errors
/// When the pause program does not compile, or the archive cannot be written.
pub fn write_pause(folder: &Path) -> Result<Archive, ImageError> {
    let path = folder.join("pause.tar");
    let written = pause(folder)?.write(&path);
    written.map_err(|source| ImageError::File {
        path: path.clone(),
        source,
    })?;
    Ok(Archive {
        reference: PAUSE.to_owned(),
        path,
    })
}

impl Recipe {
    /// Lists the image's entries, and adds to `content` the bytes that identify the image.
    fn files(&self, binaries: &Binaries, content: &mut Sha256) -> Result<Vec<Entry>, ImageError> {
        let built = |file: &str| {
            binaries.get(file).ok_or_else(|| ImageError::NotBuilt {
                image: self.name,
                file: file.to_owned(),
            })
        };
        let mut files = base_entries();
        let mut libraries = BTreeMap::new();
        let programs = self
            .programs
            .iter()
            .map(|program| (*program, format!("usr/local/bin/{program}")));
        let shared = self
            .libraries
            .iter()
            .map(|(name, path)| (*name, (*path).to_owned()));
        for (name, path) in programs.chain(shared) {
            let source = built(name)?;
            libraries.append(&mut closure::libraries(source)?);
            let bytes = fs::read(source).map_err(|error| ImageError::File {
                path: source.to_path_buf(),
                source: error,
            })?;
            content.update(Sha256::digest(&bytes));
            files.push(Entry::File {
                path: path.into(),
                source: source.to_path_buf(),
            });
        }
        // libc's folder differs from the loader's, which the ABI fixes.
        let libc = libraries.get(GLIBC[0]);
        let system = libc.and_then(|path| path.parent()).map(Path::to_path_buf);
        let system = system.unwrap_or_default();
        for name in GLIBC {
            let path = system.join(name);
            if path.exists() {
                libraries.entry((*name).to_owned()).or_insert(path);
            }
        }
        files.extend(libraries.into_iter().map(|(name, source)| Entry::File {
            path: library_path(&name),
            source,
        }));
        Ok(files)
    }
}

/// Returns the folders and links that programs and the container runtime expect, with a merged
/// `/usr` as in Debian.
fn base_entries() -> Vec<Entry> {
    let link = |path: &str, target: &str| Entry::Link {
        path: path.into(),
        target: target.into(),
    };
    let folder = |path: &str, mode| Entry::Folder {
        path: path.into(),
        mode,
    };
    vec![
        link("lib", "usr/lib"),
        link("lib64", "usr/lib64"),
        link("bin", "usr/bin"),
        folder("etc", 0o755),
        folder("usr/lib", 0o755),
        folder("usr/lib64", 0o755),
        folder("usr/bin", 0o755),
        folder("tmp", 0o1777),
    ]
}

/// Returns the default search path of a library; the ABI fixes that of the loader.
fn library_path(name: &str) -> PathBuf {
    if name.starts_with("ld-linux") {
        let folder = if cfg!(target_arch = "x86_64") {
            "usr/lib64"
        } else {
            "usr/lib"
        };
        return Path::new(folder).join(name);
    }
    Path::new("usr/lib")
        .join(format!("{}-linux-gnu", std::env::consts::ARCH))
        .join(name)
}

/// Builds an image of one statically linked program that sleeps forever.
fn pause(folder: &Path) -> Result<Image, ImageError> {
    let source_file = crate::paths::repository().join("e2e/images/pause.rs");
    let program = folder.join("pause");
    let output = Command::new("rustc")
        .args([
            "--edition=2024",
            "-O",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "strip=symbols",
            "-o",
        ])
        .arg(&program)
        .arg(&source_file)
        .output()
        .map_err(|source| ImageError::File {
            path: PathBuf::from("rustc"),
            source,
        })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(ImageError::Pause { source_file, said });
    }
    Ok(Image {
        reference: PAUSE.to_owned(),
        entrypoint: vec!["/pause".to_owned()],
        files: vec![Entry::File {
            path: "pause".into(),
            source: program,
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_gives_each_image_a_reference() {
        let template: Template = "host:5000/bursar-{name}:1".parse().unwrap();
        assert_eq!(template.reference("probe"), "host:5000/bursar-probe:1");
        assert!("host/bursar:1".parse::<Template>().is_err());
    }
}
