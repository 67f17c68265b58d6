//! Connects to a gRPC server on a Unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};

/// Connects to the socket at `path` within `limit`.
pub async fn connect(path: &Path, limit: Duration) -> Result<Channel, Error> {
    endpoint(limit)
        .connect_with_connector(tower::service_fn(dial(path)))
        .await
}

/// Connects to the socket at `path` within `limit`. The connection ends when its peer answers no
/// ping for `silence`, even if the peer keeps its socket open.
pub async fn connect_watched(
    path: &Path,
    limit: Duration,
    silence: Duration,
) -> Result<Channel, Error> {
    endpoint(limit)
        .http2_keep_alive_interval(silence / 2)
        .keep_alive_timeout(silence / 2)
        .keep_alive_while_idle(true)
        .connect_with_connector(tower::service_fn(dial(path)))
        .await
}

/// Connects with the first call, and reconnects with the first call after a lost connection.
///
/// The caller has to be inside a runtime.
pub(super) fn connect_when_called(path: &Path, limit: Duration) -> Channel {
    endpoint(limit).connect_with_connector_lazy(tower::service_fn(dial(path)))
}

/// gRPC requires an authority, and a Unix socket has none: the kubelet sends "localhost" too.
fn endpoint(limit: Duration) -> Endpoint {
    Endpoint::from_static("http://localhost").connect_timeout(limit)
}

type Dialled = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

fn dial(path: &Path) -> impl Fn(Uri) -> Dialled + Send + use<> {
    let path = PathBuf::from(path);
    move |_| {
        let path = path.clone();
        Box::pin(async move { Ok(TokioIo::new(UnixStream::connect(path).await?)) })
    }
}
