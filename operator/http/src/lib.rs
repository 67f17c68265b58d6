//! Serves `/metrics`, `/healthz` and `/readyz` over HTTP/1.1, whatever clients send.
//!
//! Metrics and probes have a listener each, so that no flood of one makes the other fail.

mod connections;
mod process;
mod text;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

pub use text::prometheus_text;

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
        start: SystemTime::now(),
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
    /// When the process began to serve, at its start.
    start: SystemTime,
    last: Mutex<Option<Encoded>>,
}

/// Encoded metrics.
struct Encoded {
    open_metrics: Bytes,
    /// The Prometheus text format, once a client has asked for it.
    prometheus: Option<Bytes>,
    /// When the metrics become too old, by the time that their encoding took.
    until: Instant,
    /// When the metrics become too old at the latest.
    oldest: Instant,
}

impl<S: Sources> Page<S> {
    /// One request encodes. Concurrent requests wait and get the same text.
    async fn text(&self, is_open_metrics: bool) -> Bytes {
        let mut last = self.last.lock().await;
        let started = Instant::now();
        let fresh = last.take().filter(|encoded| started < encoded.until);
        let mut encoded = fresh.unwrap_or_else(|| {
            let mut page = self.sources.metrics();
            process::add_to(&mut page, self.start);
            Encoded {
                open_metrics: Bytes::from(page),
                prometheus: None,
                until: started + OLDEST.min(started.elapsed() * SHARE),
                oldest: started + OLDEST,
            }
        });
        if !is_open_metrics && encoded.prometheus.is_none() {
            let started = Instant::now();
            let open_metrics = String::from_utf8_lossy(&encoded.open_metrics);
            encoded.prometheus = Some(Bytes::from(prometheus_text(&open_metrics)));
            let until = encoded.until + started.elapsed() * SHARE;
            encoded.until = until.min(encoded.oldest);
        }
        let encoded = last.insert(encoded);
        match &encoded.prometheus {
            Some(text) if !is_open_metrics => text.clone(),
            _ => encoded.open_metrics.clone(),
        }
    }
}

async fn metrics<S: Sources>(
    State(page): State<Arc<Page<S>>>,
    headers: HeaderMap,
) -> impl IntoResponse {
    let mut accepted = headers.get_all(header::ACCEPT).iter();
    let is_open_metrics = accepted.any(|accepted| {
        let accepted = accepted.to_str().unwrap_or_default();
        accepted.contains("application/openmetrics-text")
    });
    let format = match is_open_metrics {
        true => text::OPEN_METRICS,
        false => text::PROMETHEUS,
    };
    (
        [(header::CONTENT_TYPE, format)],
        page.text(is_open_metrics).await,
    )
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
