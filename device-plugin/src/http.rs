//! Serves `/metrics`, `/healthz` and `/readyz`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

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

/// The longest time between two beats of a node's task that works.
const STANDSTILL: Duration = Duration::from_secs(30);

/// The moment of the node task's last turn.
#[derive(Clone, Debug)]
pub struct Pulse(pub watch::Receiver<Instant>);

impl Pulse {
    /// Whether the task works at `now`.
    fn verdict(&self, now: Instant) -> Verdict {
        if self.0.has_changed().is_err() {
            return Verdict::Unwell("the node's task has ended".to_owned());
        }
        let still = now.saturating_duration_since(*self.0.borrow());
        if still > STANDSTILL {
            return Verdict::Unwell(format!("the node's task stands still for {still:?}"));
        }
        Verdict::Well
    }
}

/// Where the answers come from. One watch per fact; whoever owns the fact writes it.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/metrics`.
    pub metrics: Metrics,
    /// `/healthz`: the process works; where it does not, the kubelet restarts it.
    pub health: Pulse,
    /// `/readyz`: pods can be given GPU memory now.
    pub readiness: watch::Receiver<Verdict>,
}

/// Listens at the address; at `[::]` for IPv4 too, and for IPv4 alone where the kernel has nothing else.
pub(crate) async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
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

async fn healthz(State(sources): State<Sources>) -> (StatusCode, String) {
    answer(&sources.health.verdict(Instant::now()))
}

async fn readyz(State(sources): State<Sources>) -> (StatusCode, String) {
    answer(&sources.readiness.borrow())
}

fn answer(verdict: &Verdict) -> (StatusCode, String) {
    match verdict {
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
        let (alive, health) = watch::channel(Instant::now());
        let (ready, readiness) = watch::channel(Verdict::Unwell("not registered".into()));
        let sources = Sources {
            metrics: Metrics::new(),
            health: Pulse(health),
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
        drop(alive);
        assert!(ask(address, "/healthz").await.starts_with("HTTP/1.1 503"));

        shutdown.cancel();
        server.await.unwrap().unwrap();
    }

    #[test]
    fn a_task_that_stands_still_for_half_a_minute_is_unwell() {
        let beat = Instant::now();
        let (_alive, pulse) = watch::channel(beat);
        let after = |seconds| Pulse(pulse.clone()).verdict(beat + Duration::from_secs(seconds));
        assert_eq!(after(30), Verdict::Well);
        assert!(matches!(after(31), Verdict::Unwell(why) if why.contains("stands still")));
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
