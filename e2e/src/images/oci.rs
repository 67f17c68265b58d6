//! Writes a reproducible OCI image archive of one layer.
//!
//! The archive follows the OCI image layout and image specification 1.1, for `ctr images import`
//! and `skopeo`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The content of an image.
#[derive(Debug, Clone)]
pub struct Image {
    /// The full reference, with a registry and a tag.
    pub reference: String,
    /// The command line of the entry point.
    pub entrypoint: Vec<String>,
    /// The entries of the layer, by path.
    pub files: Vec<Entry>,
}

/// One entry of an image's layer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entry {
    /// A folder. The parents of other entries are added without being listed.
    Folder {
        /// Its path in the image.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file of the host.
    File {
        /// Its path in the image.
        path: PathBuf,
        /// The file on the host with the content.
        source: PathBuf,
    },
    /// A symbolic link.
    Link {
        /// Its path in the image.
        path: PathBuf,
        /// The target of the link.
        target: PathBuf,
    },
}

impl Entry {
    fn path(&self) -> &Path {
        match self {
            Self::Folder { path, .. } | Self::File { path, .. } | Self::Link { path, .. } => path,
        }
    }
}

impl Image {
    /// Writes the archive to `out`.
    ///
    /// # Errors
    /// When a file cannot be read or the archive cannot be written.
    pub fn write(&self, out: &Path) -> io::Result<()> {
        let layer = Blob::new(self.layer()?);
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = Blob::new(serde_json::to_vec(&json!({
            "architecture": architecture, "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "Env": ["PATH=/usr/local/bin:/usr/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
        }))?);
        let manifest = Blob::new(serde_json::to_vec(&json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config.descriptor("config.v1+json"),
            "layers": [layer.descriptor("layer.v1.tar")],
        }))?);
        let mut entry = manifest.descriptor("manifest.v1+json");
        entry["annotations"] = json!({
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": self.reference,
        });
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?;

        let half = out.with_extension("half");
        let mut archive = Builder::new(io::BufWriter::new(File::create(&half)?));
        add(
            &mut archive,
            "oci-layout",
            br#"{"imageLayoutVersion":"1.0.0"}"#,
        )?;
        add(&mut archive, "index.json", &index)?;
        for blob in [&config, &manifest, &layer] {
            let path = format!("blobs/{}", blob.digest.replace(':', "/"));
            add(&mut archive, &path, &blob.data)?;
        }
        archive.into_inner()?.flush()?;
        fs::rename(half, out)
    }

    fn layer(&self) -> io::Result<Vec<u8>> {
        let mut files = self.files.clone();
        files.sort();
        let mut layer = Builder::new(Vec::new());
        let mut made: Vec<PathBuf> = Vec::new();
        for entry in &files {
            let parents = entry
                .path()
                .ancestors()
                .skip(1)
                .filter(|path| !path.as_os_str().is_empty());
            let mut parents: Vec<&Path> = parents.collect();
            parents.reverse();
            for parent in parents {
                if !made.iter().any(|path| path == parent) {
                    append(&mut layer, parent, EntryType::Directory, 0o755, &[])?;
                    made.push(parent.to_path_buf());
                }
            }
            match entry {
                Entry::Folder { path, mode } => {
                    append(&mut layer, path, EntryType::Directory, *mode, &[])?;
                    made.push(path.clone());
                }
                Entry::File { path, source } => {
                    let mode = fs::metadata(source)?.permissions().mode() & 0o755;
                    append(
                        &mut layer,
                        path,
                        EntryType::Regular,
                        mode,
                        &fs::read(source)?,
                    )?;
                }
                Entry::Link { path, target } => {
                    let mut header = header(EntryType::Symlink, 0o777, 0);
                    layer.append_link(&mut header, path, target)?;
                }
            }
        }
        layer.into_inner()
    }
}

/// Content addressed by its digest.
struct Blob {
    data: Vec<u8>,
    digest: String,
}

impl Blob {
    fn new(data: Vec<u8>) -> Self {
        let digest = digest(&data);
        Self { data, digest }
    }

    fn descriptor(&self, kind: &str) -> Value {
        let media = format!("application/vnd.oci.image.{kind}");
        json!({"mediaType": media, "digest": self.digest, "size": self.data.len()})
    }
}

/// Returns the digest of a blob, as media types write it.
fn digest(blob: &[u8]) -> String {
    let digest: String = Sha256::digest(blob)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{digest}")
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn append(
    layer: &mut Builder<Vec<u8>>,
    path: &Path,
    kind: EntryType,
    mode: u32,
    data: &[u8],
) -> io::Result<()> {
    layer.append_data(&mut header(kind, mode, data.len() as u64), path, data)
}

fn add<W: Write>(archive: &mut Builder<W>, path: &str, data: &[u8]) -> io::Result<()> {
    archive.append_data(
        &mut header(EntryType::Regular, 0o644, data.len() as u64),
        path,
        data,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Read;

    fn blobs(archive: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(File::open(archive).unwrap());
        let read = |entry: io::Result<tar::Entry<'_, File>>| {
            let mut entry = entry.unwrap();
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            (entry.path().unwrap().display().to_string(), data)
        };
        archive.entries().unwrap().map(read).collect()
    }

    fn image(folder: &Path) -> Image {
        let source = folder.join("program");
        fs::write(&source, "#!").unwrap();
        Image {
            reference: "localhost/x:1".to_owned(),
            entrypoint: vec!["/usr/bin/program".to_owned()],
            files: vec![
                Entry::Link {
                    path: "bin".into(),
                    target: "usr/bin".into(),
                },
                Entry::File {
                    path: "usr/bin/program".into(),
                    source,
                },
            ],
        }
    }

    #[test]
    fn archive_names_each_blob_by_its_digest() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("image.tar");
        image(folder.path()).write(&out).unwrap();
        let blobs = blobs(&out);
        let named: Vec<_> = blobs
            .iter()
            .filter(|(path, _)| path.starts_with("blobs/"))
            .collect();
        assert_eq!(named.len(), 3);
        for (path, data) in named {
            assert_eq!(path.replace("blobs/sha256/", "sha256:"), digest(data));
        }
        let index: Value = serde_json::from_slice(&blobs["index.json"]).unwrap();
        assert_eq!(
            index["manifests"][0]["annotations"]["io.containerd.image.name"],
            "localhost/x:1"
        );
    }

    #[test]
    fn layer_has_parent_folders_and_is_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let image = image(folder.path());
        let layer = image.layer().unwrap();
        assert_eq!(layer, image.layer().unwrap());
        let mut archive = tar::Archive::new(layer.as_slice());
        let paths: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(
            paths,
            ["usr/", "usr/bin/", "usr/bin/program", "bin"].map(|path| path.trim_end_matches('/'))
        );
    }
}
