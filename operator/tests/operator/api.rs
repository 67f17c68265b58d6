//! An API server of four kinds, in memory: lists, watches from a version on, and applied statuses.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// One fake API server. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Api {
    state: Arc<Mutex<Data>>,
    /// The version of the newest event that watches may see.
    told: Arc<watch::Sender<u64>>,
}

#[derive(Default)]
struct Data {
    version: u64,
    /// By kind (its plural) and `namespace/name`.
    objects: BTreeMap<(String, String), Value>,
    /// Version, kind and event.
    events: Vec<(u64, String, Value)>,
    /// Kinds whose watches are told nothing.
    mute: Vec<String>,
    /// What is answered instead, how often, to requests whose path ends so.
    refusals: Vec<(String, StatusCode, usize)>,
    statuses_written: usize,
}

impl Api {
    /// Serves until the test ends.
    pub(crate) async fn start() -> (Self, Client) {
        let api = Self {
            state: Arc::default(),
            told: Arc::new(watch::Sender::new(0)),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address: SocketAddr = listener.local_addr().expect("an address");
        let routes = Router::new().fallback(answer).with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let uri = format!("http://{address}")
            .parse()
            .expect("an address is a URI");
        let client = Client::try_from(Config::new(uri)).expect("a plain client");
        (api, client)
    }

    fn data(&self) -> MutexGuard<'_, Data> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    /// Makes or replaces an object.
    pub(crate) fn put(&self, kind: &str, object: Value) {
        self.change(kind, object, None);
    }

    pub(crate) fn delete(&self, kind: &str, namespace: &str, name: &str) {
        let object = self
            .data()
            .objects
            .remove(&(kind.to_owned(), format!("{namespace}/{name}")));
        if let Some(object) = object {
            self.change(kind, object, Some("DELETED"));
        }
    }

    fn change(&self, kind: &str, mut object: Value, deleted: Option<&str>) {
        let mut data = self.data();
        data.version += 1;
        let version = data.version;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let at = (kind.to_owned(), path(&object));
        if deleted.is_none() {
            data.objects.insert(at, object.clone());
        }
        let event = json!({ "type": deleted.unwrap_or("MODIFIED"), "object": object });
        data.events.push((version, kind.to_owned(), event));
        drop(data);
        self.told.send_replace(version);
    }

    /// Keeps events of `kind` from its watches, or tells what was kept.
    pub(crate) fn mute(&self, kind: &str, mute: bool) {
        let mut data = self.data();
        data.mute.retain(|muted| muted != kind);
        if mute {
            data.mute.push(kind.to_owned());
        }
        drop(data);
        self.told.send_modify(|_| {});
    }

    /// Answers the next `times` requests whose path ends in `path` with `code`.
    pub(crate) fn refuse(&self, path: &str, code: StatusCode, times: usize) {
        self.data().refusals.push((path.to_owned(), code, times));
    }

    pub(crate) fn statuses_written(&self) -> usize {
        self.data().statuses_written
    }

    /// An object's status; null while it has none.
    pub(crate) fn status(&self, kind: &str, namespace: &str, name: &str) -> Value {
        let at = (kind.to_owned(), format!("{namespace}/{name}"));
        self.data()
            .objects
            .get(&at)
            .map_or(Value::Null, |object| object["status"].clone())
    }

    fn refusal(&self, path: &str) -> Option<Response> {
        let mut data = self.data();
        let (_, code, times) = data
            .refusals
            .iter_mut()
            .find(|(end, _, times)| path.ends_with(end.as_str()) && *times > 0)?;
        *times -= 1;
        let code = *code;
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "refused by the test", "reason": "Test", "code": code.as_u16(),
        });
        Some((code, status.to_string()).into_response())
    }

    fn list(&self, kind: &str) -> Response {
        let data = self.data();
        let of_kind = data.objects.iter().filter(|((of, _), _)| of == kind);
        let items: Vec<_> = of_kind.map(|(_, object)| object).collect();
        let version = data.version.to_string();
        json_body(
            &json!({ "kind": "List", "metadata": { "resourceVersion": version }, "items": items }),
        )
    }

    fn watch(&self, kind: String, from: u64) -> Response {
        let api = self.clone();
        let news = self.told.subscribe();
        let lines = stream::unfold((from, news), move |(seen, mut news)| {
            let (api, kind) = (api.clone(), kind.clone());
            async move {
                loop {
                    let next = api.next_event(&kind, seen);
                    if let Some((version, event)) = next {
                        let line = Bytes::from(format!("{event}\n"));
                        return Some((Ok::<_, Infallible>(line), (version, news)));
                    }
                    news.changed().await.ok()?;
                }
            }
        });
        Body::from_stream(lines).into_response()
    }

    fn next_event(&self, kind: &str, seen: u64) -> Option<(u64, Value)> {
        let data = self.data();
        if data.mute.iter().any(|muted| muted == kind) {
            return None;
        }
        let mut news = data
            .events
            .iter()
            .filter(|(version, of, _)| of == kind && *version > seen);
        news.next()
            .map(|(version, _, event)| (*version, event.clone()))
    }

    /// A server-side apply of a status, as the operator has to make it.
    fn apply_status(&self, kind: &str, at: &str, query: &str, patch: &Value) -> Response {
        assert!(query.contains("fieldManager=bursar-operator"), "{query}");
        assert!(query.contains("force=true"), "{query}");
        let found = self
            .data()
            .objects
            .get(&(kind.to_owned(), at.to_owned()))
            .cloned();
        let Some(mut object) = found else {
            let gone = json!({ "kind": "Status", "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404 });
            return (StatusCode::NOT_FOUND, gone.to_string()).into_response();
        };
        assert_eq!(object["metadata"]["uid"], patch["metadata"]["uid"]);
        object["status"] = patch["status"].clone();
        self.data().statuses_written += 1;
        self.change(kind, object.clone(), None);
        json_body(&object)
    }
}

fn path(object: &Value) -> String {
    let text = |field: &str| {
        object["metadata"][field]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    format!("{}/{}", text("namespace"), text("name"))
}

fn json_body(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}

async fn answer(State(api): State<Api>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
    if let Some(refusal) = api.refusal(path) {
        return refusal;
    }
    let segments: Vec<&str> = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .collect();
    match (&parts.method, segments.as_slice()) {
        (&Method::PATCH, [.., "namespaces", namespace, kind, name, "status"]) => {
            let body = axum::body::to_bytes(body, 1 << 20)
                .await
                .expect("a whole body");
            let patch: Value = serde_json::from_slice(&body).expect("JSON");
            api.apply_status(kind, &format!("{namespace}/{name}"), query, &patch)
        }
        (&Method::GET, [.., kind]) if query.contains("watch=true") => {
            let from = query
                .split('&')
                .find_map(|pair| pair.strip_prefix("resourceVersion="));
            api.watch(
                (*kind).to_owned(),
                from.and_then(|text| text.parse().ok()).unwrap_or(0),
            )
        }
        (&Method::GET, [.., kind]) => api.list(kind),
        (method, _) => panic!("the operator has no business with {method} {path}"),
    }
}
