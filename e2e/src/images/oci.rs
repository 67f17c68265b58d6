//! Makes a reproducible OCI image of one layer, and writes the image's archive.
//!
//! The archive follows the OCI image layout and image specification 1.1, for `ctr images import`
//! and `skopeo`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use tar::{Builder, EntryType, Header};

use super::artifact::{Artifact, Blob, LAYOUT, digest};

/// The content of an image.
#[derive(Debug, Clone)]
pub struct Image {
    /// The command line of the entry point.
    pub entrypoint: Vec<String>,
    /// The user and group of the entry point; root if empty.
    pub user: &'static str,
    /// The labels of the image's configuration.
    pub labels: BTreeMap<&'static str, String>,
    /// The entries of the layer, in any order. The layer is sorted by the kind of the entry and
    /// then by its path, so that equal images have equal digests.
    pub files: Vec<Entry>,
}

/// One entry of an image's layer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entry {
    /// A folder. The layer gets the parents of other entries without being told, with the
    /// permissions 0755.
    Folder {
        /// Its path in the image.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file of the host. The layer keeps its permissions, except that only the owner may write.
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

/// How the layer of an image is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// As a tar archive, which is imported fastest.
    Plain,
    /// Compressed, for a registry.
    Gzip,
}

/// Returns this machine's architecture in Go's spelling, which registries use.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

impl Image {
    /// Returns the image's manifest and blobs.
    ///
    /// # Errors
    /// When a file of the image cannot be read.
    pub fn artifact(&self, layer: Layer) -> io::Result<Artifact> {
        let tar = self.layer()?;
        let diff_id = digest(&tar);
        let layer = match layer {
            Layer::Plain => Blob::new("application/vnd.oci.image.layer.v1.tar", tar),
            Layer::Gzip => {
                let mut packed = GzEncoder::new(Vec::new(), Compression::default());
                packed.write_all(&tar)?;
                let packed = packed.finish()?;
                Blob::new("application/vnd.oci.image.layer.v1.tar+gzip", packed)
            }
        };
        let config = serde_json::to_vec(&json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint, "Env": ["PATH=/usr/local/bin:/usr/bin"],
                "WorkingDir": "/", "User": self.user, "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        }))?;
        let config = Blob::new("application/vnd.oci.image.config.v1+json", config);
        let layers = vec![layer];
        Ok(Artifact::new(
            config,
            layers,
            &json!({}),
            Some(architecture()),
        ))
    }

    /// Writes the archive of the image with this reference to `out`. An archive that is half
    /// written has another name, so that `out` is complete whenever it exists.
    ///
    /// # Errors
    /// When a file cannot be read or the archive cannot be written.
    pub fn write(&self, reference: &str, out: &Path) -> io::Result<()> {
        let image = self.artifact(Layer::Plain)?;
        let mut entry = image.manifest.descriptor();
        entry["annotations"] = json!({
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference,
        });
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?;

        let half = out.with_extension("half");
        let mut archive = Builder::new(io::BufWriter::new(File::create(&half)?));
        add(&mut archive, "oci-layout", LAYOUT)?;
        add(&mut archive, "index.json", &index)?;
        for blob in image.blobs.iter().chain([&image.manifest]) {
            let path = format!("blobs/{}", blob.digest.replace(':', "/"));
            add(&mut archive, &path, &blob.data)?;
        }
        archive.into_inner()?.flush()?;
        fs::rename(half, out)
    }

    /// Makes the tar archive of the layer in memory.
    fn layer(&self) -> io::Result<Vec<u8>> {
        let mut files = self.files.clone();
        files.sort();
        let mut layer = Builder::new(Vec::new());
        let mut written: Vec<PathBuf> = Vec::new();
        for entry in &files {
            let parents = entry
                .path()
                .ancestors()
                .skip(1)
                .filter(|path| !path.as_os_str().is_empty());
            let mut parents: Vec<&Path> = parents.collect();
            parents.reverse();
            for parent in parents {
                if !written.iter().any(|path| path == parent) {
                    append(&mut layer, parent, EntryType::Directory, 0o755, &[])?;
                    written.push(parent.to_path_buf());
                }
            }
            match entry {
                Entry::Folder { path, mode } => {
                    append(&mut layer, path, EntryType::Directory, *mode, &[])?;
                    written.push(path.clone());
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
    use serde_json::Value;
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
            entrypoint: vec!["/usr/bin/program".to_owned()],
            user: "65532:65532",
            labels: BTreeMap::new(),
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
        image(folder.path()).write("localhost/x:1", &out).unwrap();
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
    fn compressed_image_has_the_same_content_and_user() {
        let folder = tempfile::tempdir().unwrap();
        let image = image(folder.path());
        let config = |layer| -> Value {
            let image = image.artifact(layer).unwrap();
            serde_json::from_slice(&image.blobs[0].data).unwrap()
        };
        let (plain, packed) = (config(Layer::Plain), config(Layer::Gzip));
        assert_eq!(plain, packed);
        assert_eq!(packed["config"]["User"], "65532:65532");
        let layer = &image.artifact(Layer::Gzip).unwrap().blobs[1];
        let mut tar = Vec::new();
        flate2::read::GzDecoder::new(layer.data.as_slice())
            .read_to_end(&mut tar)
            .unwrap();
        assert_eq!(packed["rootfs"]["diff_ids"][0], digest(&tar));
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
