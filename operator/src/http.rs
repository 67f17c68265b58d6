//! Serves `/metrics`, `/healthz` and `/readyz`.

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

/// Serves until `shutdown`. Fails only if the listener does.
pub async fn serve(
    listener: TcpListener,
    sources: Sources,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(sources);
    axum::serve(listener, routes)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
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
