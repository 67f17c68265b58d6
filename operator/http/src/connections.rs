//! Serves the connections of one listener: few at a time, each for a bounded time.

use std::cmp::Reverse;
use std::net::IpAddr;
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

/// The number of concurrent connections. A further one closes the oldest of the address that has
/// most, so that one client can neither lock probes out nor cut another's scrape.
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
    let mut connections: Vec<(IpAddr, AbortOnDropHandle<()>)> = Vec::with_capacity(MAX_CONNECTIONS);
    let mut accepts = true;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let (stream, address) = match accepted {
            Ok((stream, peer)) => (stream, peer.ip()),
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
        connections.retain(|(_, connection)| !connection.is_finished());
        if connections.len() >= MAX_CONNECTIONS {
            let addresses = connections.iter().map(|(address, _)| *address);
            let (_, superfluous) = connections.remove(choose_superfluous(addresses));
            superfluous.abort();
            // Its descriptor is closed before the next connection is accepted.
            let _ = superfluous.await;
        }
        let conversation = converse(stream, routes.clone(), shutdown.clone());
        let conversation = AbortOnDropHandle::new(tokio::spawn(conversation));
        connections.push((address, conversation));
    }
    drop(listener);
    for (_, connection) in connections {
        let _ = connection.await;
    }
}

/// Returns the index of the connection to close: the oldest of the address that has most. Among
/// addresses with equally many, that of the oldest connection.
fn choose_superfluous(addresses: impl Iterator<Item = IpAddr> + Clone) -> usize {
    let count = |address: IpAddr| addresses.clone().filter(|other| *other == address).count();
    let oldest_first = addresses.clone().enumerate();
    let chosen = oldest_first.max_by_key(|(index, address)| (count(*address), Reverse(*index)));
    chosen.map_or(0, |(index, _)| index)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_connection_of_the_busiest_address_is_superfluous() {
        let addresses = |last: &[u8]| {
            let addresses = last.iter().map(|last| IpAddr::from([10, 0, 0, *last]));
            choose_superfluous(addresses.collect::<Vec<_>>().into_iter())
        };
        assert_eq!(addresses(&[1, 2, 3]), 0);
        assert_eq!(addresses(&[1, 2, 3, 2]), 1);
        assert_eq!(addresses(&[1, 1, 2, 2]), 0);
        assert_eq!(addresses(&[1, 2, 2, 1, 2]), 1);
    }
}
