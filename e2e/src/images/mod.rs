//! The images of our programs: what is in each. The `Dockerfile` builds the same layouts for users.

mod closure;
mod oci;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

pub use closure::ClosureError;
pub use oci::{Entry, Image};

use crate::workspace::Binaries;

/// The reference of the image that holds pods' namespaces.
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
        /// What the compiler said.
        said: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// An image in an archive.
#[derive(Debug, Clone)]
pub struct Archive {
    /// Its full reference.
    pub reference: String,
    /// The archive's file.
    pub path: PathBuf,
}

/// What an image of ours has beside the libraries that its programs need.
struct Recipe {
    name: &'static str,
    /// Programs of the workspace, the first is the entry point.
    programs: &'static [&'static str],
    /// Libraries of the workspace, and where they go.
    libraries: &'static [(&'static str, &'static str)],
}

/// glibc's own libraries that a library loaded at run time may need: the NVIDIA driver's are opened
/// by the agent and by pods, and need them by name.
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
        programs: &["bursar-agent"],
        libraries: &[("libbursar_shim.so", "opt/bursar/shim/libcuda.so.1")],
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

/// The reference of our image `name` as the harness makes it.
pub fn reference(name: &str, tag: &str) -> String {
    format!("localhost/bursar-{name}:{tag}")
}

/// Writes the archive of every image into `folder`, from what the workspace built. The tag of each
/// is made of its programs, so that another build is another image.
///
/// # Errors
/// When something that an image needs is missing, or a file cannot be written.
pub fn write_all(
    binaries: &Binaries,
    folder: &Path,
) -> Result<BTreeMap<&'static str, Archive>, ImageError> {
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ImageError::File { path, source }
    };
    fs::create_dir_all(folder).map_err(file(folder))?;
    let mut archives = BTreeMap::new();
    for recipe in RECIPES {
        let image = recipe.image(binaries)?;
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
    Ok(archives)
}

/// Writes the archive of the image that holds pods' namespaces into `folder`.
///
/// # Errors
/// When its program does not compile, or the archive cannot be written.
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
    fn image(&self, binaries: &Binaries) -> Result<Image, ImageError> {
        let built = |file: &str| {
            binaries.get(file).ok_or_else(|| ImageError::NotBuilt {
                image: self.name,
                file: file.to_owned(),
            })
        };
        let mut files = skeleton();
        let mut libraries = BTreeMap::new();
        let mut hash = Sha256::new();
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
            let content = fs::read(source).map_err(|error| ImageError::File {
                path: source.to_path_buf(),
                source: error,
            })?;
            hash.update(Sha256::digest(&content));
            files.push(Entry::File {
                path: path.into(),
                source: source.to_path_buf(),
            });
        }
        let system = libraries
            .values()
            .next()
            .and_then(|path| path.parent())
            .map(Path::to_path_buf)
            .unwrap_or_default();
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
        let tag: String = hash
            .finalize()
            .iter()
            .take(6)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(Image {
            reference: reference(self.name, &tag),
            entrypoint: vec![format!("/usr/local/bin/{}", self.programs[0])],
            files,
        })
    }
}

/// Folders and links that programs and the container runtime expect; merged `/usr`, as Debian's.
fn skeleton() -> Vec<Entry> {
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

/// Where a library of this name is looked for by default; the loader has its place by the ABI.
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

/// A program that sleeps for ever, linked statically: the image has nothing else.
fn pause(folder: &Path) -> Result<Image, ImageError> {
    let source_file = crate::folders::repository().join("e2e/images/pause.rs");
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
