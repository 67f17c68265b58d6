//! Holds a manifest with its blobs, as a registry stores them.
//!
//! Formats: OCI image specification 1.1, "Image Manifest Specification" and "Image Layout".

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The media type of a manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of an index.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The content of the file `oci-layout`.
pub(super) const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Content addressed by its digest.
#[derive(Debug, Clone)]
pub struct Blob {
    pub(super) media_type: String,
    pub(super) data: Vec<u8>,
    pub(super) digest: String,
}

impl Blob {
    /// Makes a blob of this media type.
    pub fn new(media_type: &str, data: Vec<u8>) -> Self {
        let digest = digest(&data);
        Self {
            media_type: media_type.to_owned(),
            data,
            digest,
        }
    }

    /// Makes a blob of a JSON value.
    fn of_json(media_type: &str, value: &Value) -> Self {
        Self::new(media_type, value.to_string().into_bytes())
    }

    /// Returns the descriptor of the blob.
    pub(super) fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest, "size": self.data.len()})
    }
}

/// Returns the digest of a blob, as media types write it.
pub fn digest(blob: &[u8]) -> String {
    let digest: String = Sha256::digest(blob)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{digest}")
}

/// A manifest, its configuration and its layers.
#[derive(Debug, Clone)]
pub struct Artifact {
    pub(super) manifest: Blob,
    pub(super) blobs: Vec<Blob>,
    /// The architecture of an image, in Go's spelling; none for other artifacts.
    architecture: Option<String>,
}

impl Artifact {
    /// Makes the manifest over a configuration and layers.
    pub fn new(
        config: Blob,
        layers: Vec<Blob>,
        annotations: &Value,
        architecture: Option<&str>,
    ) -> Self {
        let descriptors: Vec<Value> = layers.iter().map(Blob::descriptor).collect();
        let mut manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": config.descriptor(), "layers": descriptors,
        });
        if annotations.as_object().is_some_and(|map| !map.is_empty()) {
            manifest["annotations"] = annotations.clone();
        }
        let blobs = [config].into_iter().chain(layers).collect();
        Self {
            manifest: Blob::of_json(MANIFEST, &manifest),
            blobs,
            architecture: architecture.map(str::to_owned),
        }
    }

    /// Returns the digest of the manifest.
    pub fn digest(&self) -> &str {
        &self.manifest.digest
    }

    /// Returns the descriptor of the manifest, with the platform of an image.
    fn descriptor(&self) -> Value {
        let mut descriptor = self.manifest.descriptor();
        if let Some(architecture) = &self.architecture {
            descriptor["platform"] = json!({"architecture": architecture, "os": "linux"});
        }
        descriptor
    }

    /// Writes the manifest and its blobs to the layout in `folder`, and returns the manifest's
    /// descriptor.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_blobs(&self, folder: &Path) -> io::Result<Value> {
        for blob in self.blobs.iter().chain([&self.manifest]) {
            write_blob(folder, &blob.digest, &blob.data)?;
        }
        Ok(self.descriptor())
    }
}

/// Writes a layout of one entry that is an index of these manifests, and returns the index's
/// digest. Their blobs are in the layout already.
///
/// # Errors
/// When a file cannot be written.
pub fn write_index(folder: &Path, manifests: &[Value]) -> io::Result<String> {
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    let index = Blob::of_json(INDEX, &index);
    write_blob(folder, &index.digest, &index.data)?;
    write_layout(folder, &index.descriptor())?;
    Ok(index.digest)
}

/// Writes the files of a layout of one entry, whose blobs are in the layout already.
///
/// # Errors
/// When a file cannot be written.
pub fn write_layout(folder: &Path, entry: &Value) -> io::Result<()> {
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::create_dir_all(folder)?;
    fs::write(folder.join("oci-layout"), LAYOUT)?;
    fs::write(folder.join("index.json"), index.to_string())
}

fn write_blob(folder: &Path, digest: &str, data: &[u8]) -> io::Result<()> {
    let path = folder.join("blobs").join(digest.replace(':', "/"));
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, data)
}

/// Returns the digest of the index in a layout, and the descriptors of its manifests.
///
/// # Errors
/// When a file cannot be read, or the layout has no index.
pub fn read_index(layout: &Path) -> io::Result<(String, Vec<Value>)> {
    let read = |path: &Path| -> io::Result<Value> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
    let no_index = || io::Error::other(format!("{} has no index of images", layout.display()));
    let entry = read(&layout.join("index.json"))?["manifests"][0]["digest"].clone();
    let entry = entry.as_str().ok_or_else(no_index)?;
    let index = read(&layout.join("blobs").join(entry.replace(':', "/")))?;
    let manifests = index["manifests"].as_array().ok_or_else(no_index)?;
    Ok((entry.to_owned(), manifests.clone()))
}

/// Copies the blobs of another layout into `folder`, and returns the descriptors of the manifests
/// in its index.
///
/// # Errors
/// When a file cannot be read or written, when the layout has no index, or when a blob has another
/// digest than its name.
pub fn take_over(layout: &Path, folder: &Path) -> io::Result<Vec<Value>> {
    let (entry, manifests) = read_index(layout)?;
    for file in fs::read_dir(layout.join("blobs/sha256"))? {
        let (path, name) = {
            let file = file?;
            (file.path(), file.file_name())
        };
        let name = format!("sha256:{}", name.to_string_lossy());
        if name == entry {
            continue;
        }
        let data = fs::read(&path)?;
        if digest(&data) != name {
            let text = format!("{} has another digest than its name", path.display());
            return Err(io::Error::other(text));
        }
        write_blob(folder, &name, &data)?;
    }
    Ok(manifests)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(architecture: &str) -> Artifact {
        let config = Blob::new("config", architecture.as_bytes().to_vec());
        let layer = Blob::new("layer", b"layer".to_vec());
        Artifact::new(config, vec![layer], &json!({}), Some(architecture))
    }

    fn layout(folder: &Path, architecture: &str) {
        let entry = artifact(architecture).write_blobs(folder).unwrap();
        write_index(folder, &[entry]).unwrap();
    }

    #[test]
    fn joined_layout_has_the_images_of_both_architectures() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        layout(&at("a"), "amd64");
        layout(&at("b"), "arm64");
        let manifests: Vec<Value> = ["a", "b"]
            .into_iter()
            .flat_map(|name| take_over(&at(name), &at("both")).unwrap())
            .collect();
        let platforms: Vec<_> = manifests
            .iter()
            .map(|entry| entry["platform"]["architecture"].as_str().unwrap())
            .collect();
        assert_eq!(platforms, ["amd64", "arm64"]);
        let index = write_index(&at("both"), &manifests).unwrap();
        // Two configurations, one shared layer, two manifests and the index.
        let blobs = fs::read_dir(at("both").join("blobs/sha256")).unwrap();
        assert_eq!(blobs.count(), 6);
        let entry: Value =
            serde_json::from_slice(&fs::read(at("both").join("index.json")).unwrap()).unwrap();
        assert_eq!(entry["manifests"][0]["digest"], index);
    }

    #[test]
    fn take_over_refuses_a_blob_with_another_digest() {
        let folder = tempfile::tempdir().unwrap();
        layout(folder.path(), "amd64");
        let blobs = folder.path().join("blobs/sha256");
        let layer = digest(b"layer").replace("sha256:", "");
        fs::write(blobs.join(layer), "other").unwrap();
        let error = take_over(folder.path(), &folder.path().join("to")).unwrap_err();
        assert!(error.to_string().contains("another digest"), "{error}");
    }
}
