//! Serves `/metrics`, `/healthz` and `/readyz` over HTTP/1.1, whatever clients send.
//!
//! Metrics and probes have a listener each, so that no flood of one makes the other fail.

mod connections;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// The age limit of served metrics.
const OLDEST: Duration = Duration::from_secs(1);
/// Encoded metrics are served for so many times their encoding time, so that a flood costs 5 % of a
/// core.
const SHARE: u32 = 20;

/// The answer to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Status 200.
    Well,
    /// Status 503, with the reason.
    Unwell(String),
}

/// The state behind the answers.
pub trait Sources: Send + Sync + 'static {
    /// The metrics, in the text format of OpenMetrics 1.0.
    fn metrics(&self) -> String;
    /// `/healthz`: whether the process works. The kubelet restarts the container otherwise.
    fn health(&self) -> Verdict;
    /// `/readyz`: whether the process can do its work now.
    fn readiness(&self) -> Verdict;
}

/// A failure to listen on an address.
#[derive(Debug, thiserror::Error)]
#[error("failed to listen on {address}: {source}; choose another address")]
pub struct ListenError {
    /// The address.
    pub address: SocketAddr,
    /// The cause.
    pub source: std::io::Error,
}

/// The listeners of one process.
#[derive(Debug)]
pub struct Listeners {
    /// The listener of `/metrics`.
    pub metrics: TcpListener,
    /// The listener of `/healthz` and `/readyz`.
    pub probes: TcpListener,
}

impl Listeners {
    /// Listens on both addresses. `[::]` includes IPv4, and means IPv4 alone when the kernel has no
    /// IPv6.
    pub async fn bind(metrics: SocketAddr, probes: SocketAddr) -> Result<Self, ListenError> {
        Ok(Self {
            metrics: listen(metrics).await?,
            probes: listen(probes).await?,
        })
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
    let listener = match address.ip() {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => TcpListener::bind(&[address, ipv4][..]).await,
        _ => TcpListener::bind(address).await,
    };
    listener.map_err(|source| ListenError { address, source })
}

/// Serves until `shutdown`.
pub async fn serve(listeners: Listeners, sources: impl Sources, shutdown: CancellationToken) {
    let sources = Arc::new(sources);
    let page = Page {
        sources: sources.clone(),
        last: Mutex::new(None),
    };
    let metrics = Router::new()
        .route("/metrics", get(metrics))
        .with_state(Arc::new(page));
    let probes = Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(readiness))
        .with_state(sources);
    tokio::join!(
        connections::serve(listeners.metrics, metrics, &shutdown),
        connections::serve(listeners.probes, probes, &shutdown),
    );
}

/// The last encoded metrics.
struct Page<S> {
    sources: Arc<S>,
    last: Mutex<Option<Encoded>>,
}

/// Encoded metrics.
struct Encoded {
    text: Bytes,
    /// When the metrics become too old.
    until: Instant,
}

impl<S: Sources> Page<S> {
    /// One request encodes. Concurrent requests wait and get the same text.
    async fn text(&self) -> Bytes {
        let mut last = self.last.lock().await;
        let begun = Instant::now();
        if let Some(encoded) = last.as_ref().filter(|encoded| begun < encoded.until) {
            return encoded.text.clone();
        }
        let text = Bytes::from(self.sources.metrics());
        let age = OLDEST.min(begun.elapsed() * SHARE);
        let until = begun + age;
        last.insert(Encoded { text, until }).text.clone()
    }
}

async fn metrics<S: Sources>(State(page): State<Arc<Page<S>>>) -> impl IntoResponse {
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], page.text().await)
}

async fn health<S: Sources>(State(sources): State<Arc<S>>) -> (StatusCode, String) {
    answer(sources.health())
}

async fn readiness<S: Sources>(State(sources): State<Arc<S>>) -> (StatusCode, String) {
    answer(sources.readiness())
}

fn answer(verdict: Verdict) -> (StatusCode, String) {
    match verdict {
        Verdict::Well => (StatusCode::OK, "ok\n".to_owned()),
        Verdict::Unwell(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}
