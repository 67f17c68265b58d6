//! Saves one value in a file that a crash at any byte leaves either old or new, never wrong.
//!
//! ```text
//!   {"version":1,"sha256":"<64 hex digits>","data":<the value as JSON>}\n
//! ```
//!
//! A later version may add fields that an earlier one ignores, and then writes the file without
//! them. What an earlier version must not ignore raises the number.
//!
//! The agent writes a temporary file and renames it. On a tmpfs the agent syncs nothing, for the
//! file dies with the boot. A file that outlives boots is saved durably.
//!
//! A file that differs from the written one is [`LoadError::Malformed`]: truncated, altered or
//! longer. [`Checkpoint::load_or_set_aside`] then renames the file to `<name>.unread`, because the
//! owner rebuilds the value and writes it. A process counts these files.

pub mod version;
pub mod write_behind;

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tracing::warn;

use version::Version;

const HEAD: &str = "{\"version\":";
const DIGEST: &str = ",\"sha256\":\"";
const MIDDLE: &str = "\",\"data\":";
const TAIL: &str = "}\n";
const DIGEST_LENGTH: usize = 64;

/// The most unread files that an owner keeps of one record.
const MAX_UNREAD: usize = 3;

/// The records that this process could not parse.
static UNREAD_RECORDS: AtomicU64 = AtomicU64::new(0);

/// The reason why the agent cannot write the file.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The value has no JSON form.
    #[error("failed to encode checkpoint {path}: {source}", path = path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// The serialization error.
        source: serde_json::Error,
    },
    /// The file system refused a step.
    #[error("failed to {step} checkpoint {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `write`, `sync` or `rename`.
        step: &'static str,
        /// The I/O error.
        source: io::Error,
    },
}

/// The reason why the file has no usable value.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file system refused to read the file.
    #[error("failed to read checkpoint {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file is damaged, or is of a version that this agent cannot read.
    #[error("failed to decode checkpoint {path}: {problem}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// A description of the damage.
        problem: String,
    },
}

/// A checkpoint file.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
}

impl Checkpoint {
    /// The checkpoint at `path`, whose directory exists.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the value. After an error the file has its old content.
    pub fn save<T: Serialize>(&self, value: &T) -> Result<(), SaveError> {
        self.replace(value, |_| Ok(()))
    }

    /// Saves to a disk: after a loss of power the file has the old value or the new one.
    pub fn save_durably<T: Serialize>(&self, value: &T) -> Result<(), SaveError> {
        self.replace(value, |path| fs::File::open(path)?.sync_all())?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|source| self.failed("sync", source))
    }

    fn replace<T: Serialize>(
        &self,
        value: &T,
        sync: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), SaveError> {
        let data = serde_json::to_string(value).map_err(|source| SaveError::Encode {
            path: self.path.clone(),
            source,
        })?;
        let text = format!(
            "{HEAD}{}{DIGEST}{}{MIDDLE}{data}{TAIL}",
            Version::NUMBER,
            digest(&data)
        );
        let temporary = self.path.with_extension("new");
        fs::write(&temporary, text)
            .map_err(|source| self.failed("write", source))
            .and_then(|()| sync(&temporary).map_err(|source| self.failed("sync", source)))
            .and_then(|()| {
                fs::rename(&temporary, &self.path).map_err(|source| self.failed("rename", source))
            })
            .inspect_err(|_| {
                // On a full disk the partial file would take the space that the next attempt needs.
                let _ = fs::remove_file(&temporary);
            })
    }

    fn failed(&self, step: &'static str, source: io::Error) -> SaveError {
        SaveError::Io {
            path: self.path.clone(),
            step,
            source,
        }
    }

    /// Reads the value; `None` where there is no file.
    pub fn load<T: DeserializeOwned>(&self) -> Result<Option<T>, LoadError> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(LoadError::Read {
                    path: self.path.clone(),
                    source,
                });
            }
        };
        decode(&text)
            .map(Some)
            .map_err(|problem| LoadError::Malformed {
                path: self.path.clone(),
                problem,
            })
    }

    /// Reads the value for the file's owner, which will replace a file that cannot be parsed: keeps
    /// such a file under another name.
    pub fn load_or_set_aside<T: DeserializeOwned>(&self) -> Result<Option<T>, LoadError> {
        self.load().inspect_err(|error| {
            if let LoadError::Malformed { .. } = error {
                set_aside(&self.path, error);
            }
        })
    }
}

/// The paths to which [`set_aside`] renames files: `<name>.unread`, `<name>.unread-2` and so on.
pub fn aside_paths(path: &Path) -> impl Iterator<Item = PathBuf> {
    let extensions = (1..=MAX_UNREAD).map(|number| match number {
        1 => "unread".to_owned(),
        number => format!("unread-{number}"),
    });
    extensions.map(|extension| path.with_extension(extension))
}

/// How many records this process could not parse.
pub fn unread_records() -> u64 {
    UNREAD_RECORDS.load(Ordering::Relaxed)
}

/// Keeps a file that this agent cannot parse: another version may read it, and its owner is about
/// to replace it. The first ones stay, and the newest one takes the last place.
pub fn set_aside(path: &Path, cause: &impl Display) {
    UNREAD_RECORDS.fetch_add(1, Ordering::Relaxed);
    let mut places = aside_paths(path);
    let aside = places.find(|place| !place.exists());
    let aside = aside.or_else(|| aside_paths(path).last());
    let aside = aside.unwrap_or_else(|| path.to_owned());
    match fs::rename(path, &aside) {
        Ok(()) => {
            warn!(path = %path.display(), kept = %aside.display(), %cause, "failed to parse a record; it is kept under another name")
        }
        Err(error) => {
            warn!(path = %path.display(), %error, %cause, "failed to keep a record that cannot be parsed under another name; the next write replaces it");
        }
    }
}

fn digest(data: &str) -> String {
    Sha256::digest(data.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn decode<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
    let body = text.strip_prefix(HEAD).ok_or("it has no version")?;
    let (version, body) = body.split_once(DIGEST).ok_or("it is cut short")?;
    Version::parse(version)?;
    let (written, rest) = body
        .split_at_checked(DIGEST_LENGTH)
        .ok_or("it is cut short")?;
    let data = rest
        .strip_prefix(MIDDLE)
        .and_then(|rest| rest.strip_suffix(TAIL))
        .ok_or("it is cut short")?;
    if digest(data) != written {
        return Err("wrong checksum".to_owned());
    }
    serde_json::from_str(data).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temp_checkpoint() -> (tempfile::TempDir, Checkpoint) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(folder.path().join("checkpoint.json"));
        (folder, checkpoint)
    }

    fn value() -> Vec<(String, u32)> {
        vec![("GPU-a".into(), 12), ("é".into(), 7)]
    }

    #[test]
    fn saved_value_is_loaded_and_is_json() {
        let (_folder, checkpoint) = temp_checkpoint();
        assert!(checkpoint.load::<Vec<(String, u32)>>().unwrap().is_none());
        checkpoint.save(&value()).unwrap();
        assert_eq!(checkpoint.load().unwrap(), Some(value()));
        let text = fs::read_to_string(checkpoint.path()).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap();
    }

    #[test]
    fn durably_saved_value_is_loaded() {
        let (_folder, checkpoint) = temp_checkpoint();
        checkpoint.save_durably(&value()).unwrap();
        assert_eq!(checkpoint.load().unwrap(), Some(value()));
    }

    #[test]
    fn truncated_file_is_malformed() {
        let (_folder, checkpoint) = temp_checkpoint();
        checkpoint.save(&value()).unwrap();
        let whole = fs::read(checkpoint.path()).unwrap();
        for length in 0..whole.len() {
            fs::write(checkpoint.path(), &whole[..length]).unwrap();
            let error = checkpoint.load::<Vec<(String, u32)>>().unwrap_err();
            assert!(
                matches!(error, LoadError::Malformed { .. }),
                "cut at {length}"
            );
        }
    }

    #[test]
    fn altered_or_continued_file_is_malformed() {
        let (_folder, checkpoint) = temp_checkpoint();
        checkpoint.save(&value()).unwrap();
        let whole = fs::read(checkpoint.path()).unwrap();
        for (at, bit) in (0..whole.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut altered = whole.clone();
            altered[at] ^= 1 << bit;
            let error = decode::<Vec<(String, u32)>>(&altered);
            assert!(error.is_err(), "byte {at}, bit {bit}");
        }
        assert!(decode::<Vec<(String, u32)>>(&[whole.as_slice(), b"\n"].concat()).is_err());
    }

    #[test]
    fn crash_before_the_rename_leaves_the_old_value() {
        let (_folder, checkpoint) = temp_checkpoint();
        checkpoint.save(&value()).unwrap();
        fs::write(checkpoint.path().with_extension("new"), "{\"sha256\":\"12").unwrap();
        assert_eq!(checkpoint.load().unwrap(), Some(value()));
        checkpoint.save(&Vec::<(String, u32)>::new()).unwrap();
        assert_eq!(
            checkpoint.load().unwrap(),
            Some(Vec::<(String, u32)>::new())
        );
    }

    #[test]
    fn failed_write_leaves_the_old_value() {
        let (folder, checkpoint) = temp_checkpoint();
        checkpoint.save(&value()).unwrap();
        fs::create_dir(folder.path().join("checkpoint.new")).unwrap();
        assert!(matches!(
            checkpoint.save(&value()),
            Err(SaveError::Io { step: "write", .. })
        ));
        assert_eq!(checkpoint.load().unwrap(), Some(value()));
    }

    #[test]
    fn later_version_is_told_and_its_further_fields_are_ignored() {
        #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
        struct Now {
            a: u32,
        }
        let (_folder, checkpoint) = temp_checkpoint();
        let later = serde_json::json!({ "a": 7, "b": 8 });
        checkpoint.save(&later).unwrap();
        assert_eq!(checkpoint.load().unwrap(), Some(Now { a: 7 }));
        let text = fs::read_to_string(checkpoint.path()).unwrap();
        fs::write(
            checkpoint.path(),
            text.replace("\"version\":1", "\"version\":2"),
        )
        .unwrap();
        let error = checkpoint.load::<Now>().unwrap_err().to_string();
        assert!(
            error.ends_with("it is of version 2, and this agent reads version 1"),
            "{error}"
        );
        fs::write(checkpoint.path(), "{\"sha256\":\"").unwrap();
        let error = checkpoint.load::<Now>().unwrap_err().to_string();
        assert!(error.ends_with("it has no version"), "{error}");
    }

    #[test]
    fn malformed_file_is_set_aside_for_its_owner_alone() {
        let (_folder, checkpoint) = temp_checkpoint();
        let counted = unread_records();
        for garbage in ["1st", "2nd", "3rd", "4th"] {
            fs::write(checkpoint.path(), garbage).unwrap();
            assert!(checkpoint.load::<u32>().is_err());
            assert!(checkpoint.path().exists(), "another program's file");
            assert!(checkpoint.load_or_set_aside::<u32>().is_err());
            assert!(checkpoint.load_or_set_aside::<u32>().unwrap().is_none());
        }
        let kept = aside_paths(checkpoint.path()).map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(kept.collect::<Vec<_>>(), ["1st", "2nd", "4th"]);
        assert!(unread_records() >= counted + 4);
    }
}
