//! Watches the kubelet's plugin directory for sockets.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::api::deviceplugin::KUBELET_SOCKET;
use super::registration::SocketId;
use super::server::is_agent_socket;

/// The reason why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    /// The directory is missing or unreadable.
    #[error("failed to watch the plugin directory {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: io::Error,
    },
    /// The inotify instances or watches are used up (`fs.inotify.max_user_instances` and
    /// `max_user_watches`): the directory may be readable.
    #[error(
        "failed to create an inotify instance or watch: {0}; \
         raise fs.inotify.max_user_instances or max_user_watches"
    )]
    Inotify(#[source] io::Error),
    /// The watched directory was removed, moved or unmounted.
    #[error("failed to watch the plugin directory {path}: it was removed or moved")]
    Gone {
        /// The directory.
        path: PathBuf,
    },
}

impl WatchError {
    /// A bounded name for conditions, events and metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Directory { .. } => "PluginDirectoryUnreadable",
            Self::Inotify(_) => "NoInotify",
            Self::Gone { .. } => "PluginDirectoryGone",
        }
    }
}

/// A watch of the plugin directory for `kubelet.sock` and for the agent's sockets.
///
/// The watch ignores the kubelet's checkpoint, which the kubelet replaces in this directory at each
/// Allocate.
#[derive(Debug)]
pub(crate) struct PluginDirWatch {
    fd: AsyncFd<OwnedFd>,
    path: PathBuf,
}

impl PluginDirWatch {
    /// Watches `path`: later changes wake [`PluginDirWatch::changed`].
    ///
    /// # Errors
    /// [`WatchError::Directory`] or [`WatchError::Inotify`].
    pub(crate) fn new(path: &Path) -> Result<Self, WatchError> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(|error| WatchError::Inotify(error.into()))?;
        let wanted = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, path, wanted).map_err(|error| match error {
            Errno::NOSPC | Errno::NOMEM => WatchError::Inotify(error.into()),
            _ => WatchError::Directory {
                path: path.to_owned(),
                source: error.into(),
            },
        })?;
        #[expect(
            deprecated,
            reason = "its successor is `unsafe`, for types whose fd may change: an OwnedFd's never does"
        )]
        let fd = AsyncFd::new(fd).map_err(WatchError::Inotify)?;
        Ok(Self {
            fd,
            path: path.to_owned(),
        })
    }

    /// Returns after a relevant change. Dropping the future loses no change.
    ///
    /// # Errors
    /// [`WatchError::Gone`]: this watch reports no more changes.
    pub(crate) async fn changed(&mut self) -> Result<(), WatchError> {
        loop {
            let mut ready = self.fd.readable().await.map_err(WatchError::Inotify)?;
            match drain_events(self.fd.get_ref()) {
                DrainResult::Irrelevant => ready.clear_ready(),
                DrainResult::Relevant => return Ok(()),
                DrainResult::Gone => {
                    return Err(WatchError::Gone {
                        path: self.path.clone(),
                    });
                }
            }
        }
    }
}

enum DrainResult {
    Irrelevant,
    Relevant,
    Gone,
}

/// Reads all queued events.
fn drain_events(fd: &OwnedFd) -> DrainResult {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(fd, &mut buffer);
    let mut drained = DrainResult::Irrelevant;
    loop {
        let event = match events.next() {
            Ok(event) => event,
            Err(Errno::INTR) => continue,
            Err(_) => return drained,
        };
        let gone =
            ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
        if event.events().intersects(gone) {
            return DrainResult::Gone;
        }
        let overflow = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
        let name = event.file_name().map_or(&b""[..], |name| name.to_bytes());
        if overflow || name == KUBELET_SOCKET.as_bytes() || is_agent_socket(name) {
            drained = DrainResult::Relevant;
        }
    }
}

/// The identity of the `kubelet.sock` in `dir`, if any.
pub(crate) fn kubelet_socket(dir: &Path) -> Option<SocketId> {
    let meta = std::fs::symlink_metadata(dir.join(KUBELET_SOCKET)).ok()?;
    let ctime_ns = i128::from(meta.ctime()) * 1_000_000_000 + i128::from(meta.ctime_nsec());
    Some(SocketId {
        dev: meta.dev(),
        ino: meta.ino(),
        ctime_ns,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn wakes(watch: &mut PluginDirWatch) -> bool {
        tokio::time::timeout(Duration::from_millis(300), watch.changed())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn watch_wakes_when_kubelet_socket_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = PluginDirWatch::new(dir.path()).unwrap();
        std::fs::write(dir.path().join("kubelet.sock"), "").unwrap();
        assert!(wakes(&mut watch).await);
    }

    #[tokio::test]
    async fn watch_wakes_when_an_agent_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own_socket = dir.path().join("bursar-gpu-memory-1-0.sock");
        std::fs::write(&own_socket, "").unwrap();
        let mut watch = PluginDirWatch::new(dir.path()).unwrap();
        std::fs::remove_file(own_socket).unwrap();
        assert!(wakes(&mut watch).await);
    }

    #[tokio::test]
    async fn watch_ignores_the_kubelet_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = PluginDirWatch::new(dir.path()).unwrap();
        std::fs::write(dir.path().join(".1234"), "").unwrap();
        std::fs::rename(
            dir.path().join(".1234"),
            dir.path().join("kubelet_internal_checkpoint"),
        )
        .unwrap();
        assert!(!wakes(&mut watch).await);
        std::fs::write(dir.path().join("kubelet.sock"), "").unwrap();
        assert!(wakes(&mut watch).await, "and a later change still does");
    }

    #[tokio::test]
    async fn watch_ends_when_the_directory_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device-plugins");
        std::fs::create_dir(&path).unwrap();
        let mut watch = PluginDirWatch::new(&path).unwrap();
        std::fs::remove_dir(&path).unwrap();
        let error = watch.changed().await.unwrap_err();
        assert_eq!(error.reason(), "PluginDirectoryGone");
    }

    #[tokio::test]
    async fn watch_fails_when_the_directory_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let error = PluginDirWatch::new(&dir.path().join("no")).unwrap_err();
        assert_eq!(error.reason(), "PluginDirectoryUnreadable");
    }

    #[test]
    fn recreated_kubelet_socket_has_another_id() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(kubelet_socket(dir.path()), None);
        let path = dir.path().join("kubelet.sock");
        std::fs::write(&path, "").unwrap();
        let first = kubelet_socket(dir.path()).unwrap();
        assert_eq!(kubelet_socket(dir.path()), Some(first));
        std::fs::remove_file(&path).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&path, "").unwrap();
        assert_ne!(kubelet_socket(dir.path()), Some(first));
    }
}
