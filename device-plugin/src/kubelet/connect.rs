//! Dials a gRPC server on a Unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};

/// Connects to the socket at `path`; connecting takes at most `limit`.
pub(super) async fn connect(path: &Path, limit: Duration) -> Result<Channel, Error> {
    let path = PathBuf::from(path);
    // gRPC wants an authority; a Unix socket has none, and the kubelet says "localhost" as well.
    Endpoint::from_static("http://localhost")
        .connect_timeout(limit)
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        }))
        .await
}
