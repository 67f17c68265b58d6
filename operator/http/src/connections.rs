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

/// How many connections are served at a time. The next one ends the oldest: who holds seats must
/// not keep probes out.
const SEATS: usize = 32;
/// How long a client may take for the headers of a request, and be idle between two.
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
/// The longest headers, and what is read at a time.
const BUFFER: usize = 16 << 10;
/// How many headers a request may have.
const HEADERS: usize = 32;
/// How long a connection lasts, whatever is asked on it.
const LIFETIME: Duration = Duration::from_secs(30);
/// How long an answer that has begun may take after that, and after the server was told to stop.
const GRACE: Duration = Duration::from_secs(2);
/// The pause after a connection that could not be accepted: descriptors come back as others close.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `routes` until `shutdown`.
pub(crate) async fn serve(listener: TcpListener, routes: Router, shutdown: &CancellationToken) {
    let mut seats: VecDeque<AbortOnDropHandle<()>> = VecDeque::with_capacity(SEATS);
    let mut accepts = true;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if accepts {
                    warn!(%error, "accept");
                }
                accepts = false;
                sleep(PAUSE).await;
                continue;
            }
        };
        accepts = true;
        seats.retain(|seat| !seat.is_finished());
        if seats.len() >= SEATS
            && let Some(oldest) = seats.pop_front()
        {
            oldest.abort();
            // Its descriptor is closed before the next one is used.
            let _ = oldest.await;
        }
        let conversation = converse(stream, routes.clone(), shutdown.clone());
        seats.push_back(AbortOnDropHandle::new(tokio::spawn(conversation)));
    }
    drop(listener);
    for seat in seats {
        let _ = seat.await;
    }
}

/// Answers one client. A failure is the client's own: it hung up, was too slow or sent no HTTP.
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
