//! Owns the fd store's socket. A node has one.
//!
//! A second fd store that replaced the socket would leave the memory of the first out of reach. A
//! lock beside the socket prevents this; the kernel releases it when the process exits.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use bursar_protocol::fdstore::SOCKET_NAME;
use rustix::fs::{FlockOperation, flock};

/// The listening socket and its lock.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    _lock: File,
}

/// Why the socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenerError {
    #[error("failed to create {0}: {1}")]
    CreateDir(PathBuf, #[source] io::Error),
    #[error(
        "failed to lock {0}: another fd store holds it; delete its pod, \
         which loses the memory that it retains"
    )]
    InUse(PathBuf),
    #[error("failed to lock {0}: {1}")]
    Lock(PathBuf, #[source] io::Error),
    #[error("failed to listen on {0}: {1}")]
    Listen(PathBuf, #[source] io::Error),
}

impl Listener {
    /// Listens in a folder that only this user may enter.
    pub(crate) fn bind(folder: &Path) -> Result<Listener, ListenerError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        created
            .and_then(|()| std::fs::set_permissions(folder, Permissions::from_mode(0o700)))
            .map_err(|error| ListenerError::CreateDir(folder.to_owned(), error))?;
        let lock = lock(&folder.join("fdstore.lock"))?;
        let path = folder.join(SOCKET_NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ListenerError::Listen(path, error));
            }
            _ => {}
        }
        let socket =
            UnixListener::bind(&path).map_err(|error| ListenerError::Listen(path, error))?;
        Ok(Listener {
            socket,
            _lock: lock,
        })
    }
}

fn lock(path: &Path) -> Result<File, ListenerError> {
    let mut options = OpenOptions::new();
    let opened = options.write(true).create(true).mode(0o600).open(path);
    let file = opened.map_err(|error| ListenerError::Lock(path.to_owned(), error))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ListenerError::InUse(path.to_owned())),
        Err(error) => Err(ListenerError::Lock(path.to_owned(), error.into())),
    }
}
