//! Tests hostile clients: unfinished connections, endless headers, requests without a pause.

#![expect(
    clippy::unwrap_used,
    reason = "a failed `unwrap` in a helper is a failed test, with its place"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bursar_http::{Listeners, Sources, Verdict, serve};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

const MIB: u64 = 1 << 20;
/// How many probes make one round.
const ROUND: usize = 200;

/// Counts how often metrics are encoded, which takes a while.
#[derive(Clone, Default)]
struct Fixture {
    encoded: Arc<AtomicUsize>,
    encoding: Duration,
}

impl Sources for Fixture {
    fn metrics(&self) -> String {
        std::thread::sleep(self.encoding);
        let encoded = self.encoded.fetch_add(1, Ordering::SeqCst) + 1;
        format!("encoded {encoded}\n# EOF\n")
    }

    fn health(&self) -> Verdict {
        Verdict::Well
    }

    fn readiness(&self) -> Verdict {
        Verdict::Unwell("not registered".to_owned())
    }
}

/// A server with two threads of its own.
struct Server {
    metrics: SocketAddr,
    probes: SocketAddr,
    shutdown: CancellationToken,
    runtime: Option<Runtime>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(sources: Fixture) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        let bound = runtime.spawn(Listeners::bind(any, any)).await.unwrap();
        let listeners = bound.unwrap();
        let shutdown = CancellationToken::new();
        Self {
            metrics: listeners.metrics.local_addr().unwrap(),
            probes: listeners.probes.local_addr().unwrap(),
            task: runtime.spawn(serve(listeners, sources, shutdown.clone())),
            shutdown,
            runtime: Some(runtime),
        }
    }

    /// Stops the server. Fails when that takes long.
    async fn stop(mut self) {
        self.shutdown.cancel();
        let ended = timeout(Duration::from_secs(10), &mut self.task).await;
        ended.expect("it ends soon").unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Asks as Prometheus does, which accepts OpenMetrics.
async fn ask(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    ask_with(address, path, accept).await
}

async fn ask_with(address: SocketAddr, path: &str, headers: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The resident memory of this process: server and clients.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().split(' ').next().unwrap();
    kib.parse::<u64>().unwrap() * 1024
}

/// The descriptor limit of this process, less a reserve.
fn descriptors() -> usize {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    usize::try_from(maximum.unwrap_or(u64::MAX)).unwrap() - 256
}

/// Whether the server has closed the connection.
async fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    timeout(Duration::from_millis(1), read).await.is_ok()
}

/// Sends probes one after another until `end`, each on a new connection. Returns their durations.
async fn probes(address: SocketAddr, end: CancellationToken) -> Vec<Duration> {
    let mut took = Vec::new();
    while took.len() < ROUND || !end.is_cancelled() {
        let started = Instant::now();
        let answer = ask(address, "/healthz").await.unwrap();
        took.push(started.elapsed());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    took
}

/// The 99th percentile of the best round, because other programs of the machine slow some rounds.
fn p99(probes: &[Duration]) -> Duration {
    let rounds = probes.chunks_exact(ROUND).map(|round| {
        let mut round = round.to_vec();
        round.sort();
        round[ROUND * 99 / 100]
    });
    rounds.min().expect("a round")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_headers_hold_little_and_are_closed() {
    let count = 10_000.min(descriptors());
    let server = Server::start(Fixture::default()).await;
    assert!(ask(server.metrics, "/metrics").await.is_ok());
    let (before, end) = (resident(), CancellationToken::new());
    let measured = tokio::spawn(probes(server.probes, end.clone()));
    // Below the header limit, so that only the timeout ends the request.
    let unfinished = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(12 << 10));
    let mut streams = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(server.metrics).await.unwrap();
        // The server may have closed the connection already.
        let _ = stream.write_all(unfinished.as_bytes()).await;
        streams.push(stream);
    }
    let all_there = Instant::now();
    let grown = resident().saturating_sub(before);
    let mut open = streams;
    while !open.is_empty() && all_there.elapsed() < Duration::from_secs(15) {
        let mut still = Vec::new();
        for mut stream in open {
            if !is_closed(&mut stream).await {
                still.push(stream);
            }
        }
        open = still;
    }
    end.cancel();
    let probes = measured.await.unwrap();
    let p99 = p99(&probes);
    println!(
        "{count} connections: {} MiB more, {} open after {:?}, {} probes, {p99:?} at p99",
        grown / MIB,
        open.len(),
        all_there.elapsed(),
        probes.len(),
    );
    assert!(grown < 64 * MIB, "{} MiB", grown / MIB);
    assert_eq!(open.len(), 0, "connections that are still open");
    assert!(p99 < Duration::from_millis(100), "{p99:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_leave_room_for_probes() {
    let server = Server::start(Fixture::default()).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(server.probes).await.unwrap());
    }
    let open = async |idle: &mut Vec<TcpStream>| {
        let mut open = 0;
        for stream in idle {
            open += usize::from(!is_closed(stream).await);
        }
        open
    };
    let answer = ask(server.probes, "/healthz").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let open = open(&mut idle).await;
    assert!(open <= 32, "{open} connections are served at a time");
    server.stop().await;
}

#[tokio::test]
async fn client_without_openmetrics_gets_the_older_format() {
    let server = Server::start(Fixture::default()).await;
    let plain = ask_with(server.metrics, "/metrics", "").await.unwrap();
    assert!(plain.contains("text/plain; version=0.0.4"), "{plain}");
    assert!(!plain.contains("# EOF"), "{plain}");
    let open = ask(server.metrics, "/metrics").await.unwrap();
    assert!(open.contains("application/openmetrics-text"), "{open}");
    assert!(open.contains("# EOF"), "{open}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_encoded_once_for_all_who_ask() {
    let encoding = Duration::from_millis(60);
    let sources = Fixture {
        encoding,
        ..Fixture::default()
    };
    let server = Server::start(sources.clone()).await;
    let (started, address) = (Instant::now(), server.metrics);
    let mut scrapers = JoinSet::new();
    for _ in 0..16 {
        scrapers.spawn(async move {
            for _ in 0..4 {
                let answer = ask(address, "/metrics").await.unwrap();
                assert!(answer.contains("# EOF"), "{answer}");
            }
        });
    }
    scrapers.join_all().await;
    let most = 2 + started.elapsed().as_secs() as usize;
    let encoded = sources.encoded.load(Ordering::SeqCst);
    assert!(encoded <= most, "encoded {encoded} times for 64 requests");
    // Metrics are at most one second old.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let answer = ask(server.metrics, "/metrics").await.unwrap();
    assert!(
        answer.contains(&format!("encoded {}\n", encoded + 1)),
        "{answer}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_headers_are_refused() {
    let server = Server::start(Fixture::default()).await;
    let long = format!("A: {}\r\n", "a".repeat(20 << 10));
    let many = "A: a\r\n".repeat(40);
    for headers in [long, many] {
        let mut stream = TcpStream::connect(server.metrics).await.unwrap();
        let request = format!("GET /metrics HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
        let _ = stream.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_path_is_served_on_its_own_listener() {
    let server = Server::start(Fixture::default()).await;
    let expected = [
        (server.metrics, "/metrics", "200"),
        (server.metrics, "/healthz", "404"),
        (server.probes, "/healthz", "200"),
        (server.probes, "/readyz", "503"),
        (server.probes, "/metrics", "404"),
    ];
    for (address, path, code) in expected {
        let answer = ask(address, path).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {code}")),
            "{path}: {answer}"
        );
    }
    assert!(
        ask(server.probes, "/readyz")
            .await
            .unwrap()
            .contains("not registered")
    );
    server.stop().await;
}
