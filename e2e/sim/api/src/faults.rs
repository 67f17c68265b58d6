//! Injects faults between a client and the API server, as a layer of the client.
//!
//! ```text
//!   kube's Client --> FaultyService
//!       write: refused | request dropped | response dropped | error after write
//!       watch: delayed | lagging | duplicated | replayed | disconnected | expired | stalled
//! ```
//!
//! The layer can also restrict a client to one case's objects, so that many operators share one API
//! server.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{pending, ready};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{self, Bytes, HttpBody};
use futures::future::BoxFuture;
use futures::{FutureExt as _, TryStreamExt as _};
use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::StreamReader;
use tower::{BoxError, Layer, Service};

/// How a write fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// The API server refuses the write with this code and stores nothing.
    Refused(StatusCode),
    /// The request is lost: nothing is stored and no response arrives.
    RequestDropped,
    /// The API server stores the object, and the response is lost.
    ResponseDropped,
    /// The API server stores the object, and the client gets an error.
    ErrorAfterWrite,
}

/// Selects the writes that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultyWrites {
    /// No write fails.
    NoWrite,
    /// The write with this number fails, counted from 1.
    Nth(usize),
    /// Every write fails at its first attempt.
    FirstAttempts,
}

/// How a watch delivers events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchFault {
    /// Events arrive unchanged.
    NoFault,
    /// Each event arrives late; the delay depends on the kind.
    Delayed,
    /// Watches of pods and of GPU nodes lag in turn, by more than the operator's own timers.
    Lagging,
    /// Each event arrives twice.
    Duplicated,
    /// After each event the last few arrive again, as in a watch resumed from an old version.
    Replayed,
    /// The watch ends instead of delivering an event; the next watch delivers that event.
    Disconnected,
    /// The watch ends with an "expired" error instead of an event, so that the client has to list
    /// again.
    Expired,
    /// At an event the connection stalls without an end. The next watch delivers the event.
    Stalled,
}

/// Expiries per kind are limited, because kube's client doubles its back-off each time, up to 30 s.
const MAX_EXPIRIES: usize = 3;
/// With lagging watches, how long pods lag before GPU nodes do.
const LAG_PERIOD: Duration = Duration::from_secs(15);
/// The kinds whose watches lag.
pub const LAGGING_KINDS: [&str; 2] = ["pods", "gpunodes"];
/// Lag of the watches, in turn.
const LAG_SECONDS: [u64; 3] = [6, 9, 12];

/// The faults of one operator. Clones share their state.
#[derive(Clone)]
pub struct Faults(Arc<Shared>);

struct Shared {
    /// The case, which names its namespace and its node. `None` shows all objects.
    case: Option<String>,
    write_fault: WriteFault,
    watch_fault: WatchFault,
    /// The timeout of watches, where it differs from what the operator requests.
    watch_seconds: Option<u32>,
    started: Instant,
    state: Mutex<FaultState>,
}

struct FaultState {
    faulty_writes: FaultyWrites,
    /// The writes since the faults were last set, as `METHOD path`, without Events.
    writes: Vec<String>,
    /// The last write and its time; includes Events.
    last_write: (Instant, String),
    attempted: BTreeSet<String>,
    /// Number of writes that failed.
    fault_count: usize,
    /// The resource versions that watches have received.
    delivered_versions: BTreeSet<String>,
    event_counts: BTreeMap<String, usize>,
    /// Number of delayed or altered events, by type and kind.
    faulted_events: BTreeMap<String, usize>,
    /// Number of open watches by kind.
    open_watches: BTreeMap<String, usize>,
}

impl Faults {
    /// Shows one case's objects. [`Self::set_faulty_writes`] selects the writes that fail.
    pub fn new(case: &str, write_fault: WriteFault, watch_fault: WatchFault) -> Self {
        Self::build(Some(case), write_fault, watch_fault, None)
    }

    /// Shows all objects. [`Self::set_faulty_writes`] selects the writes that fail.
    pub fn for_all_objects(write_fault: WriteFault, watch_fault: WatchFault) -> Self {
        Self::build(None, write_fault, watch_fault, None)
    }

    /// Injects no faults, but the API server ends watches after so many seconds.
    pub fn with_watch_timeout(case: &str, seconds: u32) -> Self {
        Self::build(
            Some(case),
            WriteFault::RequestDropped,
            WatchFault::NoFault,
            Some(seconds),
        )
    }

    fn build(
        case: Option<&str>,
        write_fault: WriteFault,
        watch_fault: WatchFault,
        watch_seconds: Option<u32>,
    ) -> Self {
        Self(Arc::new(Shared {
            case: case.map(str::to_owned),
            write_fault,
            watch_fault,
            watch_seconds,
            started: Instant::now(),
            state: Mutex::new(FaultState {
                faulty_writes: FaultyWrites::NoWrite,
                writes: Vec::new(),
                last_write: (Instant::now(), String::new()),
                attempted: BTreeSet::new(),
                fault_count: 0,
                delivered_versions: BTreeSet::new(),
                event_counts: BTreeMap::new(),
                faulted_events: BTreeMap::new(),
                open_watches: BTreeMap::new(),
            }),
        }))
    }

    fn state(&self) -> MutexGuard<'_, FaultState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Selects the writes that fail from now on, and resets the counters.
    pub fn set_faulty_writes(&self, faulty_writes: FaultyWrites) {
        let mut state = self.state();
        state.faulty_writes = faulty_writes;
        state.writes.clear();
        state.attempted.clear();
        state.fault_count = 0;
    }

    /// Number of writes that failed since [`Self::set_faulty_writes`].
    pub fn fault_count(&self) -> usize {
        self.state().fault_count
    }

    /// The writes since [`Self::set_faulty_writes`].
    pub fn writes(&self) -> Vec<String> {
        self.state().writes.clone()
    }

    /// Time since the last write, Events included.
    pub fn idle_time(&self) -> Duration {
        self.state().last_write.0.elapsed()
    }

    /// The last write, as `METHOD path`.
    pub fn last_write(&self) -> String {
        self.state().last_write.1.clone()
    }

    /// Number of delayed or altered events, by type and kind.
    pub fn faulted_events(&self) -> BTreeMap<String, usize> {
        self.state().faulted_events.clone()
    }

    /// Whether the client watches every one of these kinds. Between two watches it lists, and a
    /// list is not disturbed.
    pub fn watches_all(&self, kinds: &[&str]) -> bool {
        let state = self.state();
        let is_open = |kind: &&str| state.open_watches.get(*kind).is_some_and(|open| *open > 0);
        kinds.iter().all(is_open)
    }

    /// Whether disturbed watches make the client list again.
    pub fn causes_lists(&self) -> bool {
        matches!(
            self.0.watch_fault,
            WatchFault::Replayed | WatchFault::Expired
        )
    }

    /// The longest delay of a change that depends on a pod and on a GPU node.
    pub fn max_watch_delay(&self) -> Duration {
        let lags = self.0.watch_fault == WatchFault::Lagging;
        Duration::from_secs(if lags { 2 * LAG_SECONDS[2] } else { 0 })
    }

    /// Records a write and decides whether it fails.
    fn record_write(&self, method: &Method, path: &str) -> Option<WriteFault> {
        let write = format!("{method} {path}");
        let mut state = self.state();
        state.last_write = (Instant::now(), write.clone());
        if path.starts_with("/apis/events.k8s.io/") {
            return None;
        }
        state.writes.push(write.clone());
        let fails = match state.faulty_writes {
            FaultyWrites::NoWrite => false,
            FaultyWrites::Nth(number) => number == state.writes.len(),
            FaultyWrites::FirstAttempts => state.attempted.insert(write),
        };
        fails.then_some(self.0.write_fault)
    }

    fn count_fault(&self) {
        self.state().fault_count += 1;
    }

    /// Adds a selector for the case's objects to a list or watch.
    fn restrict_to_case(&self, request: &mut Request<Body>) -> Result<(), http::Error> {
        let Some(case) = &self.0.case else {
            return Ok(());
        };
        let path = request.uri().path();
        let query = request.uri().query().unwrap_or_default();
        let kind = path.rsplit('/').next().unwrap_or_default();
        let selector = match kind {
            "nodes" | "gpunodes" => "labelSelector=bursar.dev%2Fcohort",
            "namespaces" | "gpunamespaces" => "fieldSelector=metadata.name",
            _ => "fieldSelector=metadata.namespace",
        };
        let mut query = format!("{query}&{selector}%3D{case}");
        if let Some(seconds) = self.0.watch_seconds {
            let asked = query
                .split('&')
                .find(|pair| pair.starts_with("timeoutSeconds="));
            if let Some(asked) = asked.map(str::to_owned) {
                query = query.replace(&asked, &format!("timeoutSeconds={seconds}"));
            }
        }
        *request.uri_mut() = format!("{path}?{query}").parse()?;
        Ok(())
    }

    /// Disturbs the events in a watch's response.
    fn disturb_watch(&self, kind: String, answer: Response<body::Body>) -> Response<body::Body> {
        let (parts, events) = answer.into_parts();
        if self.0.watch_fault == WatchFault::NoFault || !parts.status.is_success() {
            return Response::from_parts(parts, events);
        }
        let (sender, receiver) = mpsc::channel(16);
        let faults = self.clone();
        let open = OpenWatch::new(self, &kind);
        // Each event has its own due time, independent of the event before it.
        let (queue, mut queued) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let _open = open;
            let events = events.into_data_stream();
            let mut lines = StreamReader::new(events.map_err(io::Error::other)).lines();
            let mut past = VecDeque::new();
            loop {
                let line = tokio::select! {
                    line = lines.next_line() => line,
                    () = queue.closed() => return,
                };
                let Ok(Some(line)) = line else { return };
                let disturbed = faults.disturb_event(&kind, line, &mut past);
                if disturbed.stalls_watch {
                    return queue.closed().await;
                }
                let ends = disturbed.ends_watch;
                if queue
                    .send((Instant::now() + disturbed.delay, disturbed))
                    .is_err()
                    || ends
                {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            loop {
                let next = tokio::select! {
                    next = queued.recv() => next,
                    () = sender.closed() => return,
                };
                let Some((due, disturbed)) = next else { return };
                sleep_until(due).await;
                for line in disturbed.lines {
                    let sent = sender.send(Ok::<_, BoxError>(Bytes::from(line + "\n")));
                    if sent.await.is_err() {
                        return;
                    }
                }
            }
        });
        let events = body::Body::from_stream(ReceiverStream::new(receiver));
        Response::from_parts(parts, events)
    }

    fn disturb_event(
        &self,
        kind: &str,
        line: String,
        past: &mut VecDeque<String>,
    ) -> DisturbedEvent {
        let event: Value = serde_json::from_str(&line).unwrap_or_default();
        let plain = DisturbedEvent {
            delay: Duration::ZERO,
            lines: vec![line.clone()],
            ends_watch: false,
            stalls_watch: false,
        };
        if event["type"] == "BOOKMARK" || event["type"] == "ERROR" {
            return plain;
        }
        let version = &event["object"]["metadata"]["resourceVersion"];
        let version = format!("{kind} {version}");
        let is_new = || self.state().delivered_versions.insert(version.clone());
        let disturbed = match self.0.watch_fault {
            WatchFault::Delayed => DisturbedEvent {
                // Different delays let one kind's events overtake another's.
                delay: Duration::from_millis(100 * (kind.len() as u64 % 8) + 100),
                ..plain
            },
            WatchFault::Lagging if let Some(after) = self.current_lag(kind) => DisturbedEvent {
                delay: after,
                ..plain
            },
            WatchFault::Duplicated => DisturbedEvent {
                lines: vec![line.clone(), line],
                ..plain
            },
            WatchFault::Replayed => {
                past.push_back(line);
                let lines = plain.lines.into_iter().chain(past.iter().cloned());
                let lines = lines.collect();
                while past.len() > 4 {
                    past.pop_front();
                }
                DisturbedEvent { lines, ..plain }
            }
            WatchFault::Disconnected if is_new() => DisturbedEvent {
                lines: Vec::new(),
                ends_watch: true,
                ..plain
            },
            WatchFault::Expired if self.counts_to_expiry(kind, &event) => DisturbedEvent {
                lines: vec![expired_event().to_string()],
                ends_watch: true,
                ..plain
            },
            WatchFault::Stalled if is_new() => DisturbedEvent {
                stalls_watch: true,
                ..plain
            },
            WatchFault::NoFault
            | WatchFault::Lagging
            | WatchFault::Disconnected
            | WatchFault::Expired
            | WatchFault::Stalled => return plain,
        };
        let event = format!("{} {kind}", event["type"].as_str().unwrap_or_default());
        *self.state().faulted_events.entry(event).or_default() += 1;
        disturbed
    }

    /// The current lag of this kind's watch; `None` while the watch does not lag.
    fn current_lag(&self, kind: &str) -> Option<Duration> {
        let turn = self.0.started.elapsed().as_secs() / LAG_PERIOD.as_secs();
        let behind = LAG_SECONDS[turn as usize / 2 % LAG_SECONDS.len()];
        let lags = LAGGING_KINDS[turn as usize % 2] == kind;
        lags.then(|| Duration::from_secs(behind))
    }

    /// Whether the watch expires: at every other event of a kind, and at the first deletion.
    fn counts_to_expiry(&self, kind: &str, event: &Value) -> bool {
        let deleted = event["type"] == "DELETED";
        let mut state = self.state();
        let key = if deleted {
            format!("{kind} deleted")
        } else {
            kind.to_owned()
        };
        let events = state.event_counts.entry(key).or_default();
        *events += 1;
        let at_most = if deleted { 1 } else { MAX_EXPIRIES };
        *events % 2 == 1 && *events < 2 * at_most
    }
}

/// Counts a watch as open until it is dropped.
struct OpenWatch {
    faults: Faults,
    kind: String,
}

impl OpenWatch {
    fn new(faults: &Faults, kind: &str) -> Self {
        let (faults, kind) = (faults.clone(), kind.to_owned());
        *faults.state().open_watches.entry(kind.clone()).or_default() += 1;
        Self { faults, kind }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        if let Some(open) = self.faults.state().open_watches.get_mut(&self.kind) {
            *open -= 1;
        }
    }
}

/// The replacement of one event.
struct DisturbedEvent {
    delay: Duration,
    lines: Vec<String>,
    /// The watch ends after the lines.
    ends_watch: bool,
    /// The watch stalls: it delivers nothing more and does not end.
    stalls_watch: bool,
}

fn expired_event() -> Value {
    let status = status_object(StatusCode::GONE, "Expired");
    json!({ "type": "ERROR", "object": status })
}

fn status_object(code: StatusCode, reason: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "by the test", "reason": reason, "code": code.as_u16(),
    })
}

fn error_response(code: StatusCode) -> Response<body::Body> {
    let mut answer = Response::new(body::Body::from(status_object(code, "Test").to_string()));
    *answer.status_mut() = code;
    answer
}

impl<S> Layer<S> for Faults {
    type Service = FaultyService<S>;

    fn layer(&self, inner: S) -> FaultyService<S> {
        FaultyService {
            inner,
            faults: self.clone(),
        }
    }
}

/// A connection to the API server that injects faults.
pub struct FaultyService<S> {
    inner: S,
    faults: Faults,
}

impl<S, B> Service<Request<Body>> for FaultyService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<body::Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let faults = self.faults.clone();
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        if method == Method::GET {
            let query = request.uri().query().unwrap_or_default();
            let watches = query.contains("watch=true");
            let lists = watches || query.contains("limit=");
            // Only the events of a watch are disturbed, and not those of a list.
            if faults.0.watch_fault != WatchFault::NoFault && query.contains("sendInitialEvents=") {
                return ready(Ok(error_response(StatusCode::UNPROCESSABLE_ENTITY))).boxed();
            }
            if lists && let Err(error) = faults.restrict_to_case(&mut request) {
                return ready(Err(error.into())).boxed();
            }
            let answer = self.inner.call(request);
            return async move {
                let answer = answer.await?;
                if !watches {
                    return Ok(answer.map(body::Body::new));
                }
                let kind = path.rsplit('/').next().unwrap_or_default();
                Ok(faults.disturb_watch(kind.to_owned(), answer.map(body::Body::new)))
            }
            .boxed();
        }
        match faults.record_write(&method, &path) {
            None => {
                let answer = self.inner.call(request);
                async move { Ok(answer.await?.map(body::Body::new)) }.boxed()
            }
            Some(WriteFault::Refused(code)) => {
                faults.count_fault();
                ready(Ok(error_response(code))).boxed()
            }
            Some(WriteFault::RequestDropped) => {
                faults.count_fault();
                pending().boxed()
            }
            Some(write_fault @ (WriteFault::ResponseDropped | WriteFault::ErrorAfterWrite)) => {
                let answer = self.inner.call(request);
                async move {
                    drop(answer.await);
                    faults.count_fault();
                    if write_fault == WriteFault::ResponseDropped {
                        pending::<()>().await;
                    }
                    Ok(error_response(StatusCode::INTERNAL_SERVER_ERROR))
                }
                .boxed()
            }
        }
    }
}
