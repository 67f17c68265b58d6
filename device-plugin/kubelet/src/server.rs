//! Serves a plugin on its own socket.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bursar_ledger::units::Resource;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use super::api::deviceplugin::device_plugin_server::DevicePluginServer;
use super::devices::Devices;
use super::in_flight::{InFlight, InFlightCount};
use super::plugin::{Allocator, Plugin};

/// The time that a stopping server gives to Allocate calls in flight.
const ALLOCATE_GRACE: Duration = Duration::from_secs(2);
/// The time after that for connections to close.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

/// The reason why a plugin is not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// The socket could not be created.
    #[error("failed to listen on {path}")]
    Listen {
        /// The socket's path.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: io::Error,
    },
}

/// The parts that all servers of a resource share.
#[derive(Debug)]
pub struct PluginService<A> {
    /// The resource.
    pub resource: Resource,
    /// The allocator that answers the kubelet's calls.
    pub allocator: Arc<A>,
    /// The devices that ListAndWatch sends.
    pub devices: watch::Receiver<Devices>,
}

/// One server. Dropping it ends the streams, answers calls in flight and leaves the socket file,
/// which the next agent removes.
#[derive(Debug)]
pub(super) struct Server {
    /// The number of the server in this process.
    number: u32,
    /// The socket's path.
    path: PathBuf,
    /// The device and inode of the socket file, to recognize a replaced file.
    socket_id: (u64, u64),
    streams: InFlight,
    allocate_calls: InFlight,
    end_streams: CancellationToken,
    close: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Binds a socket in `dir` and serves at once.
    pub(super) fn start<A: Allocator>(
        dir: &Path,
        number: u32,
        service: &PluginService<A>,
    ) -> Result<Self, ServeError> {
        let path = dir.join(socket_name(service.resource, std::process::id(), number));
        let error = |source| ServeError::Listen {
            path: path.clone(),
            source,
        };
        let listener = UnixListener::bind(&path).map_err(error)?;
        let file = socket_identity(&path).map_err(error)?;
        let (streams, allocate_calls) = (InFlight::default(), InFlight::default());
        let (end_streams, close) = (CancellationToken::new(), CancellationToken::new());
        let plugin = Plugin::new(
            service.resource,
            Arc::clone(&service.allocator),
            service.devices.clone(),
            streams.clone(),
            allocate_calls.clone(),
            end_streams.clone(),
        );
        let task = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(DevicePluginServer::new(plugin))
                .serve_with_incoming_shutdown(
                    UnixListenerStream::new(listener),
                    close.clone().cancelled_owned(),
                ),
        );
        Ok(Self {
            number,
            path,
            socket_id: file,
            streams,
            allocate_calls,
            end_streams,
            close,
            task,
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The socket's file name, which the kubelet calls the endpoint.
    pub(super) fn endpoint(&self) -> String {
        self.path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// Whether the server runs and its own socket file exists.
    pub(super) fn is_reachable(&self) -> bool {
        !self.task.is_finished()
            && socket_identity(&self.path).is_ok_and(|file| file == self.socket_id)
    }

    /// The count of ListAndWatch streams.
    pub(super) fn streams(&self) -> InFlightCount {
        self.streams.get()
    }

    /// Waits until a stream opens or ends.
    pub(super) async fn streams_changed(&self, since: InFlightCount) {
        self.streams.wait_until(|count| *count != since).await;
    }

    /// Whether the kubelet has left the server. A newly registered server is not idle.
    pub(super) fn is_idle(&self) -> bool {
        let streams = self.streams.get();
        streams.total > 0 && streams.now == 0 && self.allocate_calls.get().now == 0
    }

    /// Stops the server: Allocate calls in flight end first.
    ///
    /// The kubelet drops its connection when the stream ends, and a pod whose Allocate fails has
    /// failed for ever.
    pub(super) async fn stop(mut self) {
        let answered = self.allocate_calls.wait_until(|count| count.now == 0);
        let _too_late = tokio::time::timeout(ALLOCATE_GRACE, answered).await;
        self.end_streams.cancel();
        self.close.cancel();
        if tokio::time::timeout(CLOSE_GRACE, &mut self.task)
            .await
            .is_err()
        {
            self.task.abort();
        }
        self.remove_socket();
    }

    /// Removes the server's own socket file. Connections stay open.
    pub(super) fn remove_socket(&self) {
        if socket_identity(&self.path).is_ok_and(|file| file == self.socket_id) {
            let _swept_by_the_next = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_streams.cancel();
        self.close.cancel();
    }
}

/// The socket's name, unique per process and server, so that no client reaches the wrong server.
fn socket_name(resource: Resource, pid: u32, number: u32) -> String {
    format!("{}{pid}-{number}.sock", socket_prefix(resource))
}

fn socket_prefix(resource: Resource) -> &'static str {
    match resource {
        Resource::DeviceMemory => "bursar-gpu-memory-",
        Resource::ManagedMemory => "bursar-managed-memory-",
        Resource::Compute => "bursar-gpu-compute-",
    }
}

/// Whether a file name in the plugin directory is that of an agent's socket, present or stale.
pub(super) fn is_agent_socket(name: &[u8]) -> bool {
    name.starts_with(b"bursar-")
}

/// The pid in the name of a socket of `resource`.
fn socket_pid(resource: Resource, name: &str) -> Option<u32> {
    let rest = name
        .strip_prefix(socket_prefix(resource))?
        .strip_suffix(".sock")?;
    let (pid, number) = rest.split_once('-')?;
    number.parse::<u32>().ok()?;
    pid.parse().ok()
}

/// Removes the sockets of dead agents and returns their number.
///
/// A socket stays if a server answers or if its process is alive.
pub(super) fn remove_stale_sockets(
    dir: &Path,
    resource: Resource,
    alive: impl Fn(u32) -> bool,
) -> usize {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    let stale = entries.flatten().filter(|entry| {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| socket_pid(resource, name));
        pid.is_some_and(|pid| !alive(pid))
            && entry.file_type().is_ok_and(|kind| kind.is_socket())
            && refuses_connections(&entry.path())
    });
    stale
        .filter(|entry| std::fs::remove_file(entry.path()).is_ok())
        .count()
}

fn refuses_connections(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket)
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Whether a process with this pid exists in the agent's pid namespace.
pub(super) fn is_process_alive(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

fn socket_identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_name_contains_the_pid() {
        let name = socket_name(Resource::DeviceMemory, 4711, 3);
        assert_eq!(name, "bursar-gpu-memory-4711-3.sock");
        assert_eq!(socket_pid(Resource::DeviceMemory, &name), Some(4711));
        assert_eq!(socket_pid(Resource::ManagedMemory, &name), None);
        assert_eq!(
            socket_pid(Resource::DeviceMemory, "bursar-gpu-memory-x-3.sock"),
            None
        );
    }

    #[test]
    fn socket_path_fits_into_sockaddr_un() {
        let dir = Path::new("/var/lib/kubelet/device-plugins");
        let longest = dir.join(socket_name(Resource::ManagedMemory, u32::MAX, u32::MAX));
        assert!(longest.as_os_str().len() < 108);
    }

    #[test]
    fn only_sockets_of_dead_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let path = dir.path().join(name);
            (std::os::unix::net::UnixListener::bind(&path).unwrap(), path)
        };
        let (listener, dead) = make("bursar-gpu-memory-1-0.sock");
        drop(listener);
        let (listener, of_a_live_process) = make("bursar-gpu-memory-2-0.sock");
        drop(listener);
        let (_served, answering) = make("bursar-gpu-memory-3-0.sock");
        let (listener, foreign) = make("nvidia-gpu.sock");
        drop(listener);
        let no_socket = dir.path().join("bursar-gpu-memory-4-0.sock");
        std::fs::write(&no_socket, "").unwrap();

        assert_eq!(
            remove_stale_sockets(dir.path(), Resource::DeviceMemory, |pid| pid == 2),
            1
        );

        assert!(!dead.exists());
        for kept in [of_a_live_process, answering, foreign, no_socket] {
            assert!(kept.exists(), "{}", kept.display());
        }
    }
}
