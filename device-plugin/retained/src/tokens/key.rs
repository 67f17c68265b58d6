//! Stores the node's token key on tmpfs: a reboot removes the key and so invalidates every token.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use tracing::{info, warn};

/// The bytes of a key.
pub(crate) type Secret = [u8; 32];

/// The name of the file in the agent's run folder.
pub const FILE_NAME: &str = "token.key";

/// Only the agent's user reads and writes the file.
const MODE: u32 = 0o600;

/// Reads the key at `path`; creates a new one if the file is missing, malformed, or readable by
/// others. If the key cannot be written, its tokens end with this agent.
pub fn load_or_create(path: &Path) -> Secret {
    match read_key(path) {
        Ok(Some(secret)) => return secret,
        Ok(None) => info!(path = %path.display(), "created a key for memory tokens"),
        Err(error) => {
            warn!(path = %path.display(), %error, "failed to read the key for memory tokens; created a new one")
        }
    }
    let secret = rand::random();
    if let Err(error) = write_key(path, &secret) {
        warn!(path = %path.display(), %error, "failed to write the key for memory tokens; its tokens end with this agent");
    }
    secret
}

fn read_key(path: &Path) -> io::Result<Option<Secret>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let metadata = file.metadata()?;
    let mut bytes = Vec::new();
    file.take(Secret::default().len() as u64 + 1)
        .read_to_end(&mut bytes)?;
    match bytes.try_into() {
        Ok(secret) if metadata.mode() & 0o777 == MODE => Ok(Some(secret)),
        Ok(_) => Err(io::Error::other("other users may read it")),
        Err(_) => Err(io::Error::other(
            "the file does not have the length of a key",
        )),
    }
}

/// Replaces the file atomically, so that a crash leaves the old key or the new one.
fn write_key(path: &Path, secret: &Secret) -> io::Result<()> {
    let temporary = path.with_extension("new");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(&temporary)?;
    file.write_all(secret)?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn key_is_created_once_with_mode_0600() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run").join(FILE_NAME);
        let secret = load_or_create(&path);
        assert_eq!((load_or_create(&path), mode(&path)), (secret, MODE));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn malformed_or_readable_key_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let secret = load_or_create(&path);
        for garbage in [&b""[..], &[7; 31], &[7; 33], &[7; 1 << 16]] {
            fs::write(&path, garbage).unwrap();
            let replaced = load_or_create(&path);
            assert_ne!(replaced, secret);
            assert_eq!((load_or_create(&path), mode(&path)), (replaced, MODE));
        }
        let before = load_or_create(&path);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_ne!(load_or_create(&path), before);
    }

    #[test]
    fn temporary_file_of_a_crash_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::write(path.with_extension("new"), "half").unwrap();
        assert_eq!(load_or_create(&path), load_or_create(&path));
    }

    #[test]
    fn key_is_made_when_it_cannot_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::create_dir(&path).unwrap();
        assert_ne!(load_or_create(&path), load_or_create(&path));
    }
}
