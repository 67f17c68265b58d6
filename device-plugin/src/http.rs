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

/// What a probe is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// 200.
    Well,
    /// 503, with the reason for people.
    Unwell(String),
}

/// Where the answers come from. One watch per fact; whoever owns the fact writes it.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/metrics`.
    pub metrics: Metrics,
    /// `/healthz`: the process works; where it does not, the kubelet restarts it.
    pub health: watch::Receiver<Verdict>,
    /// `/readyz`: pods can be given GPU memory now.
    pub readiness: watch::Receiver<Verdict>,
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

async fn healthz(State(sources): State<Sources>) -> (StatusCode, String) {
    answer(&sources.health)
}

async fn readyz(State(sources): State<Sources>) -> (StatusCode, String) {
    answer(&sources.readiness)
}

fn answer(verdict: &watch::Receiver<Verdict>) -> (StatusCode, String) {
    match &*verdict.borrow() {
        Verdict::Well => (StatusCode::OK, "ok\n".to_owned()),
        Verdict::Unwell(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    async fn ask(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn probes_follow_their_watches_and_metrics_are_served() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_alive, health) = watch::channel(Verdict::Well);
        let (ready, readiness) = watch::channel(Verdict::Unwell("not registered".into()));
        let sources = Sources {
            metrics: Metrics::new(),
            health,
            readiness,
        };
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(serve(listener, sources, shutdown.clone()));

        assert!(ask(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let unready = ask(address, "/readyz").await;
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains("not registered"));
        ready.send_replace(Verdict::Well);
        assert!(ask(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(ask(address, "/metrics").await.contains("# EOF"));

        shutdown.cancel();
        server.await.unwrap().unwrap();
    }
}
