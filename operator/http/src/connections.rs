//! Serves the connections of one listener: few at a time, each for a bounded time.

use std::collections::VecDeque;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

/// The number of concurrent connections. A further one closes the oldest, so that idle clients
/// cannot lock probes out.
const MAX_CONNECTIONS: usize = 32;
/// How long a client may take for a request's headers, and be idle between two requests.
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
/// The bound on headers, and the size of one read.
const BUFFER: usize = 16 << 10;
/// The maximum number of headers in a request.
const HEADERS: usize = 32;
/// The lifetime of a connection.
const LIFETIME: Duration = Duration::from_secs(30);
/// How long a response in progress may take beyond the lifetime or the shutdown.
const GRACE: Duration = Duration::from_secs(2);
/// The pause after a failed accept. Descriptors become free as connections close.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `routes` until `shutdown`.
pub(crate) async fn serve(listener: TcpListener, routes: Router, shutdown: &CancellationToken) {
    let mut connections: VecDeque<AbortOnDropHandle<()>> = VecDeque::with_capacity(MAX_CONNECTIONS);
    let mut accepts = true;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if accepts {
                    warn!(%error, "failed to accept a connection");
                }
                accepts = false;
                sleep(PAUSE).await;
                continue;
            }
        };
        accepts = true;
        connections.retain(|connection| !connection.is_finished());
        if connections.len() >= MAX_CONNECTIONS
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
            // Its descriptor is closed before the next connection is accepted.
            let _ = oldest.await;
        }
        let conversation = converse(stream, routes.clone(), shutdown.clone());
        connections.push_back(AbortOnDropHandle::new(tokio::spawn(conversation)));
    }
    drop(listener);
    for connection in connections {
        let _ = connection.await;
    }
}

/// Serves one client. A failure is the client's: it hung up, was too slow or sent no HTTP.
async fn converse(stream: TcpStream, routes: Router, shutdown: CancellationToken) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(BUFFER)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = pin!(connection);
    let over = async {
        let _ = timeout(LIFETIME, shutdown.cancelled()).await;
    };
    tokio::select! {
        _ = &mut connection => return,
        () = over => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(GRACE, connection).await;
}
