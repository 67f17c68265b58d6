//! Builds the images of our programs. The `Dockerfile` builds the same layouts for users.

mod artifact;
mod closure;
mod oci;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

pub use artifact::{Artifact, Blob, digest, read_index, take_over, write_index, write_layout};
pub use closure::ClosureError;
pub(crate) use closure::libraries;
pub use oci::{Entry, Image, Layer, architecture};

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
    #[error("compile {source_file}: {stderr}")]
    Pause {
        /// Its source.
        source_file: PathBuf,
        /// The compiler's output.
        stderr: String,
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
#[derive(Debug)]
pub struct Recipe {
    /// The image's name, as `{name}` of a [`Template`].
    pub name: &'static str,
    /// The image's description, for its labels.
    pub description: &'static str,
    /// Programs of the workspace, with their packages; the first is the entry point.
    pub programs: &'static [(&'static str, &'static str)],
    /// Libraries of the workspace, with their packages and their paths in the image.
    pub libraries: &'static [(&'static str, &'static str, &'static str)],
    /// The user and group of the entry point; root if empty.
    user: &'static str,
    /// Whether programs of the image open the NVIDIA driver's libraries.
    opens_driver: bool,
}

/// Libraries of glibc that the driver's libraries need by name. Programs open those at run time, so
/// `ldd` does not list these.
const GLIBC: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
];

/// The images of a release. Clusters of the harness get the first three.
pub const RECIPES: &[Recipe] = &[
    Recipe {
        name: "agent",
        description: "Binds containers to GPU memory, and holds them to it",
        programs: &[
            ("bursar-agent", "bursar-device-plugin"),
            ("bursar-fdstore", "bursar-fdstore"),
            ("bursar-provisioner", "bursar-provisioner"),
            ("bursar-relay", "bursar-relay"),
        ],
        libraries: &[
            (
                "libbursar_shim.so",
                "bursar-shim",
                "opt/bursar/shim/libcuda.so.1",
            ),
            (
                "libbursar_nvml_shim.so",
                "bursar-nvml-shim",
                "opt/bursar/shim/libnvidia-ml.so.1",
            ),
        ],
        user: "",
        opens_driver: true,
    },
    Recipe {
        name: "operator",
        description: "Keeps budgets of GPU memory in force, and places pods",
        programs: &[("bursar-operator", "bursar-operator")],
        libraries: &[],
        user: "65532:65532",
        opens_driver: false,
    },
    Recipe {
        name: "probe",
        description: "A CUDA program that reports and allocates GPU memory",
        programs: &[("bursar-probe", "bursar-probe")],
        libraries: &[],
        user: "",
        opens_driver: true,
    },
    Recipe {
        name: SIMULATED_DRIVER,
        description: "Simulated GPUs for clusters without GPUs",
        programs: &[("simgpu", "bursar-sim-state")],
        libraries: &[
            (
                "libbursar_sim_cuda.so",
                "bursar-sim-cuda",
                "opt/bursar/simulated-driver/libcuda.so.1",
            ),
            (
                "libbursar_sim_nvml.so",
                "bursar-sim-nvml",
                "opt/bursar/simulated-driver/libnvidia-ml.so.1",
            ),
        ],
        user: "",
        opens_driver: false,
    },
];

/// The image of the simulated driver. The harness lays the driver out on its nodes itself.
pub const SIMULATED_DRIVER: &str = "simulated-driver";

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
    /// Returns the template that the quick start has on the cluster of `cargo demo --keep`.
    pub fn of_quick_start() -> Self {
        let template = concat!("localhost/bursar/{name}:", env!("CARGO_PKG_VERSION"));
        Self(template.to_owned())
    }

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
    let mut images = Vec::new();
    let recipes = RECIPES.iter();
    for recipe in recipes.filter(|recipe| recipe.name != SIMULATED_DRIVER) {
        for source in recipe.sources(binaries)? {
            let bytes = fs::read(source).map_err(file(source))?;
            content.update(Sha256::digest(&bytes));
        }
        images.push((recipe.name, recipe.image(binaries, BTreeMap::new())?));
    }
    let template = Template::of(content);
    let mut archives = BTreeMap::new();
    for (name, image) in images {
        let path = folder.join(format!("{name}.tar"));
        let reference = template.reference(name);
        image.write(&reference, &path).map_err(file(&path))?;
        archives.insert(name, Archive { reference, path });
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
    let written = pause(folder)?.write(PAUSE, &path);
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
    /// Returns the packages of the workspace whose programs and libraries are in the image.
    pub fn packages(&self) -> Vec<&'static str> {
        let programs = self.programs.iter().map(|(_, package)| *package);
        let libraries = self.libraries.iter().map(|(_, package, _)| *package);
        programs.chain(libraries).collect()
    }

    /// Returns the built files of the image.
    fn sources<'a>(&self, binaries: &'a Binaries) -> Result<Vec<&'a Path>, ImageError> {
        let programs = self.programs.iter().map(|(name, _)| *name);
        let libraries = self.libraries.iter().map(|(name, _, _)| *name);
        let built = |file: &str| {
            binaries.get(file).ok_or_else(|| ImageError::NotBuilt {
                image: self.name,
                file: file.to_owned(),
            })
        };
        programs.chain(libraries).map(built).collect()
    }

    /// Returns the libraries of this machine that the image needs, by name.
    ///
    /// # Errors
    /// When a program was not built, or one of its libraries is missing.
    pub fn system_libraries(
        &self,
        binaries: &Binaries,
    ) -> Result<BTreeMap<String, PathBuf>, ImageError> {
        let mut libraries = BTreeMap::new();
        for source in self.sources(binaries)? {
            libraries.append(&mut closure::libraries(source)?);
        }
        if self.opens_driver {
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
        }
        Ok(libraries)
    }

    /// Lays the image out, with these labels.
    ///
    /// # Errors
    /// When a program was not built, or one of its libraries is missing.
    pub fn image(
        &self,
        binaries: &Binaries,
        labels: BTreeMap<&'static str, String>,
    ) -> Result<Image, ImageError> {
        let programs = self.programs.iter();
        let programs = programs.map(|(name, _)| PathBuf::from("usr/local/bin").join(name));
        let shared = self.libraries.iter().map(|(_, _, path)| path.into());
        let ours = programs.chain(shared).zip(self.sources(binaries)?);
        let ours = ours.map(|(path, source)| Entry::File {
            path,
            source: source.to_path_buf(),
        });
        let libraries = self.system_libraries(binaries)?.into_iter();
        let libraries = libraries.map(|(name, source)| Entry::File {
            path: library_path(&name),
            source,
        });
        Ok(Image {
            entrypoint: vec![format!("/usr/local/bin/{}", self.programs[0].0)],
            user: self.user,
            labels,
            files: base_entries()
                .into_iter()
                .chain(ours)
                .chain(libraries)
                .collect(),
        })
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
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(ImageError::Pause {
            source_file,
            stderr,
        });
    }
    Ok(Image {
        entrypoint: vec!["/pause".to_owned()],
        user: "",
        labels: BTreeMap::new(),
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
