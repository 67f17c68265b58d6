//! Serves `/metrics`, `/healthz` and `/readyz`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::pulse::Pulse;
use crate::world::World;

/// Where the answers come from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/metrics`.
    pub metrics: Metrics,
    /// `/healthz`: every watch goes on.
    pub pulse: Pulse,
    /// `/readyz`: everything has been listed once, so what is published is the truth.
    pub world: watch::Receiver<World>,
}

/// Listens at the address; at `[::]` for IPv4 too, and for IPv4 alone where the kernel has nothing else.
pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
    match address.ip() {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => TcpListener::bind(&[address, ipv4][..]).await,
        _ => TcpListener::bind(address).await,
    }
}

/// Serves until `shutdown`. Fails only if the listener does.
pub async fn serve(
    listener: TcpListener,
    sources: Sources,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    axum::serve(listener, routes(sources))
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
}

fn routes(sources: Sources) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(sources)
}

async fn metrics(State(sources): State<Sources>) -> impl IntoResponse {
    // The content type of OpenMetrics 1.0, which is what the encoder writes.
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], sources.metrics.encode())
}

/// A task that ends ends the process; one that hangs shows here.
async fn healthz(State(sources): State<Sources>) -> (StatusCode, String) {
    let hanging = sources.pulse.hanging();
    if hanging.is_empty() {
        return (StatusCode::OK, "ok\n".to_owned());
    }
    let kinds = hanging.join(", ");
    (
        StatusCode::SERVICE_UNAVAILABLE,
        format!("no progress of the watch of {kinds}\n"),
    )
}

async fn readyz(State(sources): State<Sources>) -> (StatusCode, String) {
    let missing = sources.world.borrow().missing();
    if missing.is_empty() {
        return (StatusCode::OK, "ok\n".to_owned());
    }
    let kinds = missing.join(", ");
    (
        StatusCode::SERVICE_UNAVAILABLE,
        format!("not listed yet: {kinds}\n"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::{Body, to_bytes};
    use bursar_crds::Quantum;
    use kube::runtime::reflector;
    use tokio::time::Instant;
    use tower::ServiceExt as _;

    use super::*;
    use crate::pulse::HANGS;
    use crate::world::kinds;
    use tokio::net::TcpStream;

    async fn get(sources: &Sources, path: &str) -> (StatusCode, String) {
        let request = http::Request::get(path).body(Body::empty());
        let request = request.expect("a request");
        let answer = routes(sources.clone()).oneshot(request).await;
        let (head, body) = answer.expect("it answers").into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("it is whole");
        let body = String::from_utf8(body.into()).expect("it is text");
        (head.status, body)
    }

    #[tokio::test]
    async fn a_watch_that_hangs_is_named_and_ends_liveness_until_it_goes_on() {
        let (_sender, world) = watch::channel(World::new(Quantum::Gib1));
        let (budgets, _writer) = reflector::store();
        let pulse = Pulse::default();
        let sources = Sources {
            metrics: Metrics::new(budgets, world.clone(), pulse.clone()),
            world,
            pulse: pulse.clone(),
        };
        let alive = (StatusCode::OK, "ok\n".to_owned());
        assert_eq!(get(&sources, "/healthz").await, alive);

        let long_ago = Instant::now().checked_sub(HANGS + Duration::from_secs(1));
        let long_ago = long_ago.expect("the clock goes as far back");
        pulse.beat_at(kinds::PODS, long_ago);
        let said = "no progress of the watch of Pods\n".to_owned();
        let hangs = (StatusCode::SERVICE_UNAVAILABLE, said);
        assert_eq!(get(&sources, "/healthz").await, hangs);

        pulse.beat(kinds::PODS);
        assert_eq!(get(&sources, "/healthz").await, alive);
        // Alive and not yet ready are two things.
        let (ready, said) = get(&sources, "/readyz").await;
        assert_eq!(ready, StatusCode::SERVICE_UNAVAILABLE, "{said}");
        assert!(said.starts_with("not listed yet: "), "{said}");
    }

    #[tokio::test]
    async fn every_address_is_that_of_ipv4_too() {
        let every = listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)));
        let every = every.await.expect("a free port");
        let port = every.local_addr().expect("an address").port();
        for address in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            let address: IpAddr = address;
            // Unless the machine has no such address.
            if TcpListener::bind((address, 0)).await.is_ok() {
                let connected = TcpStream::connect((address, port)).await;
                connected.expect("it listens there");
            }
        }
    }
}
