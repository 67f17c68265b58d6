//! An API server in memory, of the kinds that the operator knows: lists, watches from a version on, applies,
//! merges and evictions; a controller manager that takes quotas up; and every way in which a write can fail.

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
    /// Kinds whose watches are told nothing, of those that came this way.
    mute: Arc<Mutex<Vec<String>>>,
    client: Client,
}

/// What becomes of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is refused with this code, and nothing is written.
    Refused(StatusCode),
    /// It is never answered, and nothing is written.
    Lost,
    /// It is written and never answered.
    Unanswered,
    /// It is written, and answered with an error.
    Garbled,
}

#[derive(Default)]
struct Data {
    version: u64,
    /// By kind (its plural) and `namespace/name`.
    objects: BTreeMap<(String, String), Value>,
    /// What the operator applied last, of quotas.
    applied: BTreeMap<String, Value>,
    /// Version, kind and event.
    events: Vec<(u64, String, Value)>,
    /// What is answered instead, how often, to requests whose path ends so.
    refusals: Vec<(String, StatusCode, usize)>,
    /// The fate of the write of this number.
    fate: Option<(usize, Fate)>,
    /// The writes so far, as `METHOD path`; Events are none.
    writes: Vec<String>,
    /// Reasons of the Events that were sent.
    told: Vec<String>,
    /// Quotas are not taken up.
    no_controller_manager: bool,
    /// Pods that a disruption budget keeps.
    protected: Vec<String>,
}

impl Api {
    /// Serves until the test ends.
    pub(crate) async fn start() -> Self {
        Self::over(Arc::default(), Arc::new(watch::Sender::new(0))).await
    }

    /// Another way to the same one.
    pub(crate) async fn another_way(&self) -> Self {
        Self::over(self.state.clone(), self.told.clone()).await
    }

    async fn over(state: Arc<Mutex<Data>>, told: Arc<watch::Sender<u64>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address: SocketAddr = listener.local_addr().expect("an address");
        let uri = format!("http://{address}")
            .parse()
            .expect("an address is a URI");
        let api = Self {
            state,
            told,
            mute: Arc::default(),
            client: Client::try_from(Config::new(uri)).expect("a plain client"),
        };
        let routes = Router::new().fallback(answer).with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        api
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    fn data(&self) -> MutexGuard<'_, Data> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    fn muted(&self) -> MutexGuard<'_, Vec<String>> {
        self.mute
            .lock()
            .expect("no test panics while it holds this")
    }

    /// Makes or replaces an object.
    pub(crate) fn put(&self, kind: &str, object: Value) {
        drop(self.change(kind, object, None));
    }

    pub(crate) fn delete(&self, kind: &str, namespace: &str, name: &str) {
        let object = self
            .data()
            .objects
            .remove(&(kind.to_owned(), format!("{namespace}/{name}")));
        if let Some(object) = object {
            self.data().applied.remove(&path(&object));
            drop(self.change(kind, object, Some("DELETED")));
        }
    }

    /// The object as it is then.
    fn change(&self, kind: &str, mut object: Value, deleted: Option<&str>) -> Value {
        let mut data = self.data();
        let at = (kind.to_owned(), path(&object));
        let same = data.objects.get(&at).filter(|before| {
            let version = &before["metadata"]["resourceVersion"];
            object["metadata"]["resourceVersion"] = version.clone();
            **before == object
        });
        if let Some(same) = same.filter(|_| deleted.is_none()) {
            return same.clone();
        }
        data.version += 1;
        let version = data.version;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        if deleted.is_none() {
            data.objects.insert(at, object.clone());
        }
        let event = json!({ "type": deleted.unwrap_or("MODIFIED"), "object": object });
        data.events.push((version, kind.to_owned(), event));
        drop(data);
        self.told.send_replace(version);
        object
    }

    /// Keeps events of `kind` from its watches, or tells what was kept.
    pub(crate) fn mute(&self, kind: &str, mute: bool) {
        let mut muted = self.muted();
        muted.retain(|muted| muted != kind);
        if mute {
            muted.push(kind.to_owned());
        }
        drop(muted);
        self.told.send_modify(|_| {});
    }

    /// Answers the next `times` requests whose path ends in `path` with `code`.
    pub(crate) fn refuse(&self, path: &str, code: StatusCode, times: usize) {
        self.data().refusals.push((path.to_owned(), code, times));
    }

    /// The write of this number, counted from now on, ends so.
    pub(crate) fn doom(&self, number: usize, fate: Fate) {
        let mut data = self.data();
        data.fate = Some((data.writes.len() + number, fate));
    }

    /// Whether the doomed write has come.
    pub(crate) fn has_doomed(&self) -> bool {
        self.data().fate.is_none()
    }

    /// Stops or starts the controller manager.
    pub(crate) fn controller_manager(&self, runs: bool) {
        self.data().no_controller_manager = !runs;
        if runs {
            self.take_up_quotas();
        }
    }

    /// A disruption budget keeps this pod.
    pub(crate) fn protect(&self, pod: &str) {
        self.data().protected.push(pod.to_owned());
    }

    fn take_up_quotas(&self) {
        let quotas: Vec<Value> = {
            let data = self.data();
            let kinds = data.objects.iter();
            kinds
                .filter(|((kind, _), _)| kind == "resourcequotas")
                .map(|(_, object)| object.clone())
                .collect()
        };
        for mut quota in quotas {
            quota["status"] = json!({ "hard": quota["spec"]["hard"], "used": {} });
            drop(self.change("resourcequotas", quota, None));
        }
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.data().writes.clone()
    }

    pub(crate) fn statuses_written(&self) -> usize {
        let writes = self.writes();
        let statuses = writes.iter().filter(|write| write.ends_with("/status"));
        statuses.count()
    }

    /// The reasons of all Events so far.
    pub(crate) fn events(&self) -> Vec<String> {
        self.data().told.clone()
    }

    /// An object; null while there is none.
    pub(crate) fn get(&self, kind: &str, namespace: &str, name: &str) -> Value {
        let at = (kind.to_owned(), format!("{namespace}/{name}"));
        self.data().objects.get(&at).cloned().unwrap_or_default()
    }

    /// An object's status; null while it has none.
    pub(crate) fn status(&self, kind: &str, namespace: &str, name: &str) -> Value {
        self.get(kind, namespace, name)["status"].clone()
    }

    fn refusal(&self, path: &str) -> Option<Response> {
        let mut data = self.data();
        let (_, code, times) = data
            .refusals
            .iter_mut()
            .find(|(end, _, times)| path.ends_with(end.as_str()) && *times > 0)?;
        *times -= 1;
        Some(failure(*code))
    }

    /// Counts a write and tells its fate.
    fn fate(&self, write: String) -> Option<Fate> {
        let mut data = self.data();
        data.writes.push(write);
        let (number, fate) = data.fate?;
        (number == data.writes.len()).then(|| {
            data.fate = None;
            fate
        })
    }

    fn list(&self, kind: &str, namespace: &str, label: Option<&str>) -> Response {
        let data = self.data();
        let of_kind = data.objects.iter().filter(|((of, at), _)| {
            of == kind && (namespace.is_empty() || at.starts_with(&format!("{namespace}/")))
        });
        let items: Vec<_> = of_kind
            .map(|(_, object)| object)
            .filter(|object| has_label(object, label))
            .collect();
        let version = data.version.to_string();
        json_body(
            &json!({ "kind": "List", "metadata": { "resourceVersion": version }, "items": items }),
        )
    }

    fn watch(&self, kind: String, label: Option<String>, from: u64) -> Response {
        let api = self.clone();
        let news = self.told.subscribe();
        let lines = stream::unfold((from, news), move |(seen, mut news)| {
            let (api, kind, label) = (api.clone(), kind.clone(), label.clone());
            async move {
                loop {
                    let next = api.next_event(&kind, label.as_deref(), seen);
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

    /// Of an object that loses the label, a watch by label is told the end.
    fn next_event(&self, kind: &str, label: Option<&str>, seen: u64) -> Option<(u64, Value)> {
        if self.muted().iter().any(|muted| muted == kind) {
            return None;
        }
        let data = self.data();
        let mut news = data
            .events
            .iter()
            .filter(|(version, of, _)| of == kind && *version > seen);
        news.next().map(|(version, _, event)| {
            let mut event = event.clone();
            if !has_label(&event["object"], label) {
                event["type"] = json!("DELETED");
            }
            (*version, event)
        })
    }

    fn stored(&self, kind: &str, at: &str) -> Option<Value> {
        let at = (kind.to_owned(), at.to_owned());
        self.data().objects.get(&at).cloned()
    }

    /// A server-side apply of a status, as the operator has to make it.
    fn apply_status(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return failure(StatusCode::NOT_FOUND);
        };
        if object["metadata"]["uid"] != patch["metadata"]["uid"] {
            return failure(StatusCode::CONFLICT);
        }
        object["status"] = patch["status"].clone();
        json_body(&self.change(kind, object, None))
    }

    /// A server-side apply of a quota: it takes off what was applied before, and nothing that others put there.
    fn apply(&self, at: &str, patch: Value) -> Response {
        let new = format!("{at} of {}", self.data().version);
        let stored = self.stored("resourcequotas", at);
        let mut object = stored.unwrap_or_else(|| json!({ "metadata": { "uid": new } }));
        merge(&mut object, &patch);
        let before = self.data().applied.insert(at.to_owned(), patch.clone());
        take_off(&mut object, &before.unwrap_or_default(), &patch);
        self.written("resourcequotas", object)
    }

    fn written(&self, kind: &str, object: Value) -> Response {
        let written = self.change(kind, object, None);
        if kind == "resourcequotas" && !self.data().no_controller_manager {
            self.take_up_quotas();
        }
        json_body(&written)
    }

    /// A server-side apply of a list of the spec, by somebody who writes all of it.
    fn apply_part(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return failure(StatusCode::CONFLICT);
        };
        let same = |field: &str| object["metadata"][field] == patch["metadata"][field];
        let version = patch["metadata"].get("resourceVersion");
        if !same("uid") || version.is_some() && !same("resourceVersion") {
            return failure(StatusCode::CONFLICT);
        }
        for (list, value) in patch["spec"].as_object().into_iter().flatten() {
            object["spec"][list] = value.clone();
        }
        json_body(&self.change(kind, object, None))
    }

    fn merge(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return failure(StatusCode::NOT_FOUND);
        };
        let uid = patch["metadata"].get("uid");
        if uid.is_some_and(|uid| *uid != object["metadata"]["uid"]) {
            return failure(StatusCode::CONFLICT);
        }
        merge(&mut object, patch);
        self.written(kind, object)
    }

    fn delete_quota(&self, namespace: &str, name: &str, uid: &Value) -> Response {
        let Some(quota) = self.stored("resourcequotas", &format!("{namespace}/{name}")) else {
            return failure(StatusCode::NOT_FOUND);
        };
        if quota["metadata"]["uid"] != *uid {
            return failure(StatusCode::CONFLICT);
        }
        self.delete("resourcequotas", namespace, name);
        json_body(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
    }

    /// The kubelet is quick: a pod that is to end is gone.
    fn end_pod(&self, namespace: &str, name: &str, uid: &Value, evicted: bool) -> Response {
        let Some(pod) = self.stored("pods", &format!("{namespace}/{name}")) else {
            return failure(StatusCode::NOT_FOUND);
        };
        if pod["metadata"]["uid"] != *uid {
            return failure(StatusCode::CONFLICT);
        }
        if evicted && self.data().protected.iter().any(|pod| pod == name) {
            return kept();
        }
        self.delete("pods", namespace, name);
        json_body(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
    }

    fn write(&self, method: &Method, path: &[&str], query: &str, body: &Value) -> Response {
        let applies =
            query.contains("fieldManager=bursar-operator") && query.contains("force=true");
        match (method, path) {
            (&Method::PATCH, [.., "namespaces", namespace, kind, name, "status"]) => {
                assert!(applies, "{query}");
                self.apply_status(kind, &format!("{namespace}/{name}"), body)
            }
            (&Method::PATCH, [.., "namespaces", namespace, "resourcequotas", name]) => {
                let at = format!("{namespace}/{name}");
                if applies {
                    self.apply(&at, body.clone())
                } else {
                    self.merge("resourcequotas", &at, body)
                }
            }
            (&Method::DELETE, [.., "namespaces", namespace, "resourcequotas", name]) => {
                self.delete_quota(namespace, name, &body["preconditions"]["uid"])
            }
            (&Method::PATCH, [.., "gpunodes", name]) => {
                assert!(applies, "{query}");
                self.apply_part("gpunodes", &format!("/{name}"), body)
            }
            (&Method::PATCH, [.., "nodes", name]) => self.merge("nodes", &format!("/{name}"), body),
            (&Method::PATCH, [.., "namespaces", namespace]) => {
                self.merge("namespaces", &format!("/{namespace}"), body)
            }
            (&Method::POST, [.., "namespaces", namespace, "pods", name, "eviction"]) => {
                let uid = &body["deleteOptions"]["preconditions"]["uid"];
                self.end_pod(namespace, name, uid, true)
            }
            (&Method::DELETE, [.., "namespaces", namespace, "pods", name]) => {
                let uid = &body["preconditions"]["uid"];
                self.end_pod(namespace, name, uid, false)
            }
            (method, path) => panic!("the operator has no business with {method} {path:?}"),
        }
    }
}

/// A JSON merge patch (RFC 7396).
fn merge(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (field, value) in fields {
        merge(&mut object[field], value);
    }
    let object = object.as_object_mut().expect("made above");
    object.retain(|_, value| !value.is_null());
}

/// Takes off what was applied `before` and is not `now`.
fn take_off(object: &mut Value, before: &Value, now: &Value) {
    for (field, value) in before.as_object().into_iter().flatten() {
        match (now.get(field), object.as_object_mut()) {
            (None, Some(object)) => drop(object.remove(field)),
            (Some(now), Some(_)) => take_off(&mut object[field], value, now),
            (_, None) => {}
        }
    }
}

fn failure(code: StatusCode) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "refused by the test", "reason": "Test", "code": code.as_u16(),
    });
    (code, status.to_string()).into_response()
}

/// As the eviction API says that a disruption budget keeps a pod.
fn kept() -> Response {
    let code = StatusCode::TOO_MANY_REQUESTS;
    let causes =
        json!([{ "reason": "DisruptionBudget", "message": "needs 1 healthy pods and has 1" }]);
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "TooManyRequests",
        "code": code.as_u16(), "details": { "causes": causes, "retryAfterSeconds": 10 },
    });
    (code, status.to_string()).into_response()
}

fn has_label(object: &Value, label: Option<&str>) -> bool {
    label.is_none_or(|label| object["metadata"]["labels"].get(label).is_some())
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

fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(key, _)| *key == name)?;
    Some(value.replace("%2F", "/"))
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
    let label = parameter(query, "labelSelector");
    if parts.method == Method::GET {
        let kind = segments.last().copied().unwrap_or_default();
        if let [.., "namespaces", namespace, "pods", name] = segments.as_slice() {
            let pod = api.stored("pods", &format!("{namespace}/{name}"));
            return pod.map_or_else(|| failure(StatusCode::NOT_FOUND), |pod| json_body(&pod));
        }
        if let [.., "gpunodes", name] = segments.as_slice() {
            let node = api.stored("gpunodes", &format!("/{name}"));
            return node.map_or_else(|| failure(StatusCode::NOT_FOUND), |node| json_body(&node));
        }
        return if query.contains("watch=true") {
            let from = parameter(query, "resourceVersion").and_then(|text| text.parse().ok());
            api.watch(kind.to_owned(), label, from.unwrap_or(0))
        } else {
            let namespace = match segments.as_slice() {
                [.., "namespaces", namespace, _] => namespace,
                _ => "",
            };
            api.list(kind, namespace, label.as_deref())
        };
    }
    let body = axum::body::to_bytes(body, 1 << 20)
        .await
        .expect("a whole body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    if segments.last() == Some(&"events") {
        let reason = body["reason"].as_str().unwrap_or_default().to_owned();
        api.data().told.push(reason);
        return json_body(&body);
    }
    match api.fate(format!("{} {path}", parts.method)) {
        None => api.write(&parts.method, &segments, query, &body),
        Some(Fate::Refused(code)) => failure(code),
        Some(Fate::Lost) => std::future::pending().await,
        Some(Fate::Unanswered) => {
            drop(api.write(&parts.method, &segments, query, &body));
            std::future::pending().await
        }
        Some(Fate::Garbled) => {
            drop(api.write(&parts.method, &segments, query, &body));
            failure(StatusCode::INTERNAL_SERVER_ERROR)
        }
    }
}
