//! Stores the kinds that the operator and the agent use, and serves requests as the API server
//! does.
//!
//! Supported are lists, watches from a version, server-side apply, merge patches and evictions. The
//! server also simulates a controller manager for quotas, outages, and restores of etcd from a
//! backup.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tower::{BoxError, Layer, Service, ServiceExt as _, service_fn};

use crate::faults::{Faults, WriteFault};

/// Interval of bookmarks on an idle watch.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);

/// A simulated API server. Clones share its state.
#[derive(Clone)]
pub struct SimApiServer {
    state: Arc<Mutex<ServerState>>,
    /// The version of the newest event that watches may see.
    latest_version: Arc<watch::Sender<u64>>,
    /// Kinds whose watches are paused, for clients of this connection.
    mute: Arc<Mutex<Vec<String>>>,
}

/// The contents of an etcd backup.
#[derive(Clone, Default)]
pub struct Backup {
    version: u64,
    /// By kind (its plural) and `namespace/name`.
    objects: BTreeMap<(String, String), Value>,
    /// The operator's last server-side apply of each quota.
    applied: BTreeMap<String, Value>,
}

#[derive(Default)]
struct ServerState {
    etcd: Backup,
    /// Number of restores of etcd; a restore ends the watches that began before it.
    restores: usize,
    /// The server answers no request.
    is_unavailable: bool,
    /// The server streams lists (KEP-3157).
    streams_lists: bool,
    /// Each request's time, verb and path.
    requests: Vec<(Instant, String)>,
    /// Version, kind and event.
    events: Vec<(u64, String, Value)>,
    /// Path suffix, response code, and the number of requests still to be refused.
    refusals: Vec<(String, StatusCode, usize)>,
    /// The number of the write that fails, and how it fails.
    pending_fault: Option<(usize, WriteFault)>,
    /// The writes so far, as `METHOD path`, without Events.
    writes: Vec<String>,
    /// Reasons of the Events so far.
    published: Vec<Value>,
    /// The controller manager is stopped, so that no quota gets a status.
    no_controller_manager: bool,
    /// Pods that a disruption budget protects from eviction.
    protected_pods: Vec<String>,
}

impl SimApiServer {
    /// Starts a server that lives as long as the test.
    pub fn start() -> Self {
        Self {
            state: Arc::default(),
            latest_version: Arc::new(watch::Sender::new(0)),
            mute: Arc::default(),
        }
    }

    /// A second connection to the server, whose watches are paused independently.
    pub fn with_separate_watch_pauses(&self) -> Self {
        Self {
            mute: Arc::default(),
            ..self.clone()
        }
    }

    /// A client without faults.
    pub fn client(&self) -> Client {
        Client::new(self.service(), "default")
    }

    /// A client whose connection injects `faults`.
    pub fn client_with_faults(&self, faults: &Faults) -> Client {
        Client::new(faults.layer(self.service().boxed_clone()), "default")
    }

    fn service(
        &self,
    ) -> impl Service<
        http::Request<kube::client::Body>,
        Response = Response,
        Error = BoxError,
        Future: Send,
    > + Clone
    + Send
    + 'static {
        let api = self.clone();
        service_fn(move |request: http::Request<kube::client::Body>| {
            let api = api.clone();
            async move { handle_request(api, request.map(Body::new)).await }
        })
    }

    /// Starts or ends an outage: no request is answered, and no watch ends.
    pub fn set_unavailable(&self, is_away: bool) {
        self.data().is_unavailable = is_away;
    }

    /// Lets the server stream lists, as the API server does from 1.34 on.
    pub fn stream_lists(&self) {
        self.data().streams_lists = true;
    }

    /// Each request so far, with its time, verb and path: `LIST /api/v1/pods`.
    pub fn requests(&self) -> Vec<(Instant, String)> {
        self.data().requests.clone()
    }

    /// Backs up etcd.
    pub fn backup(&self) -> Backup {
        self.data().etcd.clone()
    }

    /// Restores etcd from `backup`, without `--bump-revision`. All watches end.
    pub fn restore(&self, backup: &Backup) {
        let mut data = self.data();
        data.etcd.clone_from(backup);
        data.events
            .retain(|(version, _, _)| *version <= backup.version);
        data.restores += 1;
        drop(data);
        self.latest_version.send_replace(backup.version);
    }

    fn data(&self) -> MutexGuard<'_, ServerState> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    fn paused_kinds(&self) -> MutexGuard<'_, Vec<String>> {
        self.mute
            .lock()
            .expect("no test panics while it holds this")
    }

    /// Creates or replaces an object.
    pub fn put(&self, kind: &str, object: Value) {
        drop(self.store_object(kind, object, None));
    }

    /// Deletes an object if it exists.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) {
        let object = self
            .data()
            .etcd
            .objects
            .remove(&(kind.to_owned(), format!("{namespace}/{name}")));
        if let Some(object) = object {
            self.data().etcd.applied.remove(&object_key(&object));
            drop(self.store_object(kind, object, Some("DELETED")));
        }
    }

    /// Stores an object, appends its event, and returns it with its new version.
    fn store_object(&self, kind: &str, mut object: Value, deleted: Option<&str>) -> Value {
        let mut data = self.data();
        let at = (kind.to_owned(), object_key(&object));
        let same = data.etcd.objects.get(&at).filter(|before| {
            let version = &before["metadata"]["resourceVersion"];
            object["metadata"]["resourceVersion"] = version.clone();
            **before == object
        });
        if let Some(same) = same.filter(|_| deleted.is_none()) {
            return same.clone();
        }
        data.etcd.version += 1;
        let version = data.etcd.version;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        if deleted.is_none() {
            data.etcd.objects.insert(at, object.clone());
        }
        let event = json!({ "type": deleted.unwrap_or("MODIFIED"), "object": object });
        data.events.push((version, kind.to_owned(), event));
        drop(data);
        self.latest_version.send_replace(version);
        object
    }

    /// Pauses or resumes the events of a kind on watches of this connection.
    pub fn set_watch_paused(&self, kind: &str, mute: bool) {
        let mut muted = self.paused_kinds();
        muted.retain(|muted| muted != kind);
        if mute {
            muted.push(kind.to_owned());
        }
        drop(muted);
        self.latest_version.send_modify(|_| {});
    }

    /// Refuses the next `times` requests whose path ends in `path` with `code`.
    pub fn refuse_requests(&self, path: &str, code: StatusCode, times: usize) {
        self.data().refusals.push((path.to_owned(), code, times));
    }

    /// Lets the write of this number fail, counted from now on.
    pub fn fail_write(&self, number: usize, write_fault: WriteFault) {
        let mut data = self.data();
        data.pending_fault = Some((data.writes.len() + number, write_fault));
    }

    /// Whether the write selected by [`Self::fail_write`] has come.
    pub fn has_failed_write(&self) -> bool {
        self.data().pending_fault.is_none()
    }

    /// Stops or starts the controller manager.
    pub fn set_controller_manager_running(&self, runs: bool) {
        self.data().no_controller_manager = !runs;
        if runs {
            self.sync_quota_status();
        }
    }

    /// Lets a disruption budget protect this pod from eviction.
    pub fn protect_pod(&self, pod: &str) {
        self.data().protected_pods.push(pod.to_owned());
    }

    /// Ends [`Self::protect_pod`].
    pub fn unprotect_pod(&self, pod: &str) {
        self.data().protected_pods.retain(|other| other != pod);
    }

    fn sync_quota_status(&self) {
        let quotas: Vec<Value> = {
            let data = self.data();
            let kinds = data.etcd.objects.iter();
            kinds
                .filter(|((kind, _), _)| kind == "resourcequotas")
                .map(|(_, object)| object.clone())
                .collect()
        };
        for mut quota in quotas {
            if quota["status"]["hard"] == quota["spec"]["hard"] {
                continue;
            }
            quota["status"] = json!({ "hard": quota["spec"]["hard"], "used": {} });
            quota["metadata"]["managedFields"] = json!([{
                "manager": "kube-controller-manager", "operation": "Update", "subresource": "status",
                "time": Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string() }]);
            drop(self.store_object("resourcequotas", quota, None));
        }
    }

    /// The writes so far, as `METHOD path`, without Events.
    pub fn writes(&self) -> Vec<String> {
        self.data().writes.clone()
    }

    /// Number of writes of a status so far.
    pub fn status_write_count(&self) -> usize {
        let writes = self.writes();
        let statuses = writes.iter().filter(|write| write.ends_with("/status"));
        statuses.count()
    }

    /// All Events so far, as they were sent.
    pub fn published_events(&self) -> Vec<Value> {
        self.data().published.clone()
    }

    /// The reasons of all Events so far.
    pub fn event_reasons(&self) -> Vec<String> {
        let published = self.published_events().into_iter();
        let reason = |event: Value| event["reason"].as_str().unwrap_or_default().to_owned();
        published.map(reason).collect()
    }

    /// An object; null if it does not exist.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Value {
        let at = (kind.to_owned(), format!("{namespace}/{name}"));
        let data = self.data();
        data.etcd.objects.get(&at).cloned().unwrap_or_default()
    }

    /// An object's status; null if it has none.
    pub fn status(&self, kind: &str, namespace: &str, name: &str) -> Value {
        self.get(kind, namespace, name)["status"].clone()
    }

    fn take_refusal(&self, path: &str) -> Option<Response> {
        let mut data = self.data();
        let (_, code, times) = data
            .refusals
            .iter_mut()
            .find(|(end, _, times)| path.ends_with(end.as_str()) && *times > 0)?;
        *times -= 1;
        Some(error_response(*code))
    }

    /// Records a write and returns its fault if it is the selected one.
    fn record_write(&self, write: String) -> Option<WriteFault> {
        let mut data = self.data();
        data.writes.push(write);
        let (number, write_fault) = data.pending_fault?;
        (number == data.writes.len()).then(|| {
            data.pending_fault = None;
            write_fault
        })
    }

    fn list(&self, kind: &str, namespace: &str, selected: &Selector, query: &str) -> Response {
        let data = self.data();
        let of_kind = data.etcd.objects.iter().filter(|((of, at), _)| {
            of == kind && (namespace.is_empty() || at.starts_with(&format!("{namespace}/")))
        });
        let items: Vec<_> = of_kind
            .map(|(_, object)| object)
            .filter(|object| selected.matches(object))
            .collect();
        let number =
            |name| query_parameter(query, name).and_then(|text| text.parse::<usize>().ok());
        let from = number("continue").unwrap_or(0).min(items.len());
        let until = number("limit").map_or(items.len(), |limit| items.len().min(from + limit));
        let mut metadata = json!({ "resourceVersion": data.etcd.version.to_string() });
        if until < items.len() {
            metadata["continue"] = json!(until.to_string());
        }
        json_body(&json!({ "kind": "List", "metadata": metadata, "items": items[from..until] }))
    }

    fn watch(&self, kind: String, selected: Selector, mut from: u64, query: &str) -> Response {
        let mut initial = VecDeque::new();
        if query.contains("sendInitialEvents=true") {
            let data = self.data();
            if !data.streams_lists {
                return error_response(StatusCode::UNPROCESSABLE_ENTITY);
            }
            from = data.etcd.version;
            let objects = data.etcd.objects.iter();
            let objects =
                objects.filter(|((of, _), object)| *of == kind && selected.matches(object));
            let added = |object| json!({ "type": "ADDED", "object": object });
            initial.extend(objects.map(|(_, object)| added(object)));
            let end = json!({ "k8s.io/initial-events-end": "true" });
            initial.push_back(bookmark_event(from, &end));
        }
        let seconds = query_parameter(query, "timeoutSeconds").and_then(|text| text.parse().ok());
        let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(3600));
        let watched = WatchStream {
            api: self.clone(),
            version_changes: self.latest_version.subscribe(),
            restores: self.data().restores,
            kind,
            selected,
            initial,
            sent_version: from,
            deadline: end,
        };
        let lines = stream::unfold(watched, |mut watched| async move {
            let line = watched.next_event().await?;
            Some((
                Ok::<_, io::Error>(Bytes::from(format!("{line}\n"))),
                watched,
            ))
        });
        Body::from_stream(lines).into_response()
    }

    /// The next event for a watch.
    ///
    /// A watch with a label selector sees an object that loses the label as deleted.
    fn next_event(&self, kind: &str, selected: &Selector, after: u64) -> Option<(u64, Value)> {
        let data = self.data();
        let mut news = data.events.iter().filter(|(version, of, event)| {
            of == kind && *version > after && selected.matches_name(&event["object"])
        });
        news.next().map(|(version, _, event)| {
            let mut event = event.clone();
            if !selected.matches(&event["object"]) {
                event["type"] = json!("DELETED");
            }
            (*version, event)
        })
    }

    fn stored(&self, kind: &str, at: &str) -> Option<Value> {
        let at = (kind.to_owned(), at.to_owned());
        self.data().etcd.objects.get(&at).cloned()
    }

    /// Serves a server-side apply of a status.
    ///
    /// The operator has to send the object's uid.
    fn apply_status(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return error_response(StatusCode::NOT_FOUND);
        };
        let uid = patch["metadata"].get("uid");
        // An agent writes its node's status without a uid.
        let is_any = uid.is_none() && kind == "gpunodes";
        if !is_any && uid != object["metadata"].get("uid") {
            return error_response(StatusCode::CONFLICT);
        }
        object["status"] = patch["status"].clone();
        json_body(&self.store_object(kind, object, None))
    }

    /// Serves a server-side apply: removes fields that the operator no longer applies, and keeps
    /// those of others.
    fn apply_object(&self, kind: &str, at: &str, patch: Value) -> Response {
        let new = format!("{kind} {at} of {}", self.data().etcd.version);
        let stored = self.stored(kind, at);
        let mut object = stored.unwrap_or_else(|| json!({ "metadata": { "uid": new } }));
        merge(&mut object, &patch);
        let mut data = self.data();
        let applied = &mut data.etcd.applied;
        let before = applied.insert(format!("{kind} {at}"), patch.clone());
        drop(data);
        remove_unapplied(&mut object, &before.unwrap_or_default(), &patch);
        self.store_and_respond(kind, object)
    }

    fn store_and_respond(&self, kind: &str, object: Value) -> Response {
        let written = self.store_object(kind, object, None);
        if kind == "resourcequotas" && !self.data().no_controller_manager {
            self.sync_quota_status();
        }
        json_body(&written)
    }

    /// Serves a server-side apply of a list in the spec by its only writer.
    fn apply_spec_list(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return error_response(StatusCode::CONFLICT);
        };
        let same = |field: &str| object["metadata"][field] == patch["metadata"][field];
        let version = patch["metadata"].get("resourceVersion");
        if !same("uid") || version.is_some() && !same("resourceVersion") {
            return error_response(StatusCode::CONFLICT);
        }
        for (list, value) in patch["spec"].as_object().into_iter().flatten() {
            object["spec"][list] = value.clone();
        }
        json_body(&self.store_object(kind, object, None))
    }

    fn merge_patch(&self, kind: &str, at: &str, patch: &Value) -> Response {
        let Some(mut object) = self.stored(kind, at) else {
            return error_response(StatusCode::NOT_FOUND);
        };
        let differs = |field: &str| {
            let wanted = patch["metadata"].get(field);
            wanted.is_some_and(|wanted| *wanted != object["metadata"][field])
        };
        if differs("uid") || differs("resourceVersion") {
            return error_response(StatusCode::CONFLICT);
        }
        merge(&mut object, patch);
        self.store_and_respond(kind, object)
    }

    /// Replaces an object of the version that the client sends.
    fn replace(&self, kind: &str, object: Value) -> Response {
        let Some(before) = self.stored(kind, &object_key(&object)) else {
            return error_response(StatusCode::NOT_FOUND);
        };
        if before["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return error_response(StatusCode::CONFLICT);
        }
        json_body(&self.store_object(kind, object, None))
    }

    /// Creates an object.
    fn create(&self, kind: &str, mut object: Value) -> Response {
        let at = object_key(&object);
        if self.stored(kind, &at).is_some() {
            return error_response(StatusCode::CONFLICT);
        }
        let uid = format!("{at} of {}", self.data().etcd.version);
        object["metadata"]["uid"] = json!(uid);
        object["metadata"]["generation"] = json!(1);
        if let Some(object) = object.as_object_mut() {
            object.remove("status");
        }
        json_body(&self.store_object(kind, object, None))
    }

    fn delete_with_uid(&self, kind: &str, namespace: &str, name: &str, uid: &Value) -> Response {
        let Some(object) = self.stored(kind, &format!("{namespace}/{name}")) else {
            return error_response(StatusCode::NOT_FOUND);
        };
        if object["metadata"]["uid"] != *uid {
            return error_response(StatusCode::CONFLICT);
        }
        self.delete(kind, namespace, name);
        json_body(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
    }

    /// Deletes a pod at once, without the kubelet's grace period.
    fn delete_pod(&self, namespace: &str, name: &str, uid: &Value, evicted: bool) -> Response {
        let Some(pod) = self.stored("pods", &format!("{namespace}/{name}")) else {
            return error_response(StatusCode::NOT_FOUND);
        };
        if pod["metadata"]["uid"] != *uid {
            return error_response(StatusCode::CONFLICT);
        }
        if evicted && self.data().protected_pods.iter().any(|pod| pod == name) {
            return disruption_budget_response();
        }
        self.delete("pods", namespace, name);
        json_body(&json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
    }

    fn handle_write(&self, method: &Method, path: &[&str], query: &str, body: &Value) -> Response {
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
                    self.apply_object("resourcequotas", &at, body.clone())
                } else {
                    self.merge_patch("resourcequotas", &at, body)
                }
            }
            (&Method::DELETE, [.., "namespaces", namespace, "resourcequotas", name]) => {
                let uid = &body["preconditions"]["uid"];
                self.delete_with_uid("resourcequotas", namespace, name, uid)
            }
            (&Method::PATCH, [.., "gpunodes", name]) if applies => {
                self.apply_spec_list("gpunodes", &format!("/{name}"), body)
            }
            (&Method::PATCH, [.., "gpunodes", name]) => {
                assert!(query.contains("fieldManager=bursar-agent"), "{query}");
                self.merge_patch("gpunodes", &format!("/{name}"), body)
            }
            (&Method::PATCH, [.., "gpunodes", name, "status"]) => {
                let agents = query.contains("fieldManager=bursar-agent");
                assert!(agents && query.contains("force=true"), "{query}");
                self.apply_status("gpunodes", &format!("/{name}"), body)
            }
            (&Method::PATCH, [.., "gpunamespaces", name]) => {
                let at = format!("/{name}");
                if applies {
                    self.apply_object("gpunamespaces", &at, body.clone())
                } else {
                    self.merge_patch("gpunamespaces", &at, body)
                }
            }
            (&Method::DELETE, [.., "gpunamespaces", name]) => {
                self.delete_with_uid("gpunamespaces", "", name, &body["preconditions"]["uid"])
            }
            (&Method::POST, [.., "gpunodes"]) => self.create("gpunodes", body.clone()),
            (&Method::POST, [.., "namespaces", namespace, "leases"]) => {
                let mut lease = body.clone();
                lease["metadata"]["namespace"] = json!(namespace);
                self.create("leases", lease)
            }
            (&Method::PUT, [.., "leases", _]) => self.replace("leases", body.clone()),
            (&Method::PATCH, [.., "nodes", name]) => {
                self.merge_patch("nodes", &format!("/{name}"), body)
            }
            (&Method::PATCH, [.., "namespaces", namespace]) => {
                self.merge_patch("namespaces", &format!("/{namespace}"), body)
            }
            (&Method::POST, [.., "namespaces", namespace, "pods", name, "eviction"]) => {
                let uid = &body["deleteOptions"]["preconditions"]["uid"];
                self.delete_pod(namespace, name, uid, true)
            }
            (&Method::DELETE, [.., "namespaces", namespace, "pods", name]) => {
                let uid = &body["preconditions"]["uid"];
                self.delete_pod(namespace, name, uid, false)
            }
            (method, path) => panic!("unsupported request: {method} {path:?}"),
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

/// Removes the fields that were applied `before` and are not applied `now`.
fn remove_unapplied(object: &mut Value, before: &Value, now: &Value) {
    for (field, value) in before.as_object().into_iter().flatten() {
        match (now.get(field), object.as_object_mut()) {
            (None, Some(object)) => drop(object.remove(field)),
            (Some(now), Some(_)) => remove_unapplied(&mut object[field], value, now),
            (_, None) => {}
        }
    }
}

fn error_response(code: StatusCode) -> Response {
    // Clients decide by the reason where Kubernetes defines it.
    let reason = match code {
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::CONFLICT => "Conflict",
        _ => "Test",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "refused by the test", "reason": reason, "code": code.as_u16(),
    });
    (code, status.to_string()).into_response()
}

/// The eviction API's response for a pod that a disruption budget protects.
fn disruption_budget_response() -> Response {
    let code = StatusCode::TOO_MANY_REQUESTS;
    let causes =
        json!([{ "reason": "DisruptionBudget", "message": "needs 1 healthy pods and has 1" }]);
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "TooManyRequests",
        "code": code.as_u16(), "details": { "causes": causes, "retryAfterSeconds": 10 },
    });
    (code, status.to_string()).into_response()
}

/// The objects that a list or watch selects.
#[derive(Clone, Default)]
struct Selector {
    label: Option<String>,
    name: Option<String>,
}

impl Selector {
    fn from_query(query: &str) -> Self {
        let field = query_parameter(query, "fieldSelector");
        let name = field.and_then(|field| Some(field.strip_prefix("metadata.name=")?.to_owned()));
        Self {
            label: query_parameter(query, "labelSelector"),
            name,
        }
    }

    fn matches_name(&self, object: &Value) -> bool {
        let name = self.name.as_deref();
        name.is_none_or(|name| object["metadata"]["name"] == name)
    }

    fn matches(&self, object: &Value) -> bool {
        let label = self.label.as_deref();
        let labels = &object["metadata"]["labels"];
        self.matches_name(object) && label.is_none_or(|label| labels.get(label).is_some())
    }
}

/// An open watch.
struct WatchStream {
    api: SimApiServer,
    version_changes: watch::Receiver<u64>,
    restores: usize,
    kind: String,
    selected: Selector,
    /// The events of a list.
    initial: VecDeque<Value>,
    sent_version: u64,
    deadline: Instant,
}

impl WatchStream {
    /// The next event or bookmark; `None` at the end of the watch.
    async fn next_event(&mut self) -> Option<Value> {
        if let Some(event) = self.initial.pop_front() {
            return Some(event);
        }
        let bookmark = Instant::now() + BOOKMARK_INTERVAL;
        loop {
            if self.api.data().restores != self.restores {
                return None;
            }
            let is_muted = self.api.paused_kinds().contains(&self.kind);
            let next = self
                .api
                .next_event(&self.kind, &self.selected, self.sent_version);
            if let Some((version, event)) = next.filter(|_| !is_muted) {
                self.sent_version = version;
                return Some(event);
            }
            // No bookmark is sent while the history is behind the version that the client has seen.
            let version = self.api.data().etcd.version;
            if Instant::now() >= bookmark && version > self.sent_version && !is_muted {
                self.sent_version = version;
                return Some(bookmark_event(version, &json!({})));
            }
            let is_due = Instant::now() < bookmark;
            tokio::select! {
                changed = self.version_changes.changed() => changed.ok()?,
                () = sleep_until(self.deadline) => return None,
                () = sleep_until(bookmark), if is_due => {}
            }
        }
    }
}

/// The event with the revision that a watch has reached.
fn bookmark_event(version: u64, annotations: &Value) -> Value {
    let metadata = json!({ "resourceVersion": version.to_string(), "annotations": annotations });
    json!({ "type": "BOOKMARK", "object": { "apiVersion": "v1", "kind": "Any", "metadata": metadata } })
}

fn object_key(object: &Value) -> String {
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

fn query_parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(key, _)| *key == name)?;
    Some(value.replace("%2F", "/").replace("%3D", "="))
}

async fn handle_request(api: SimApiServer, request: Request) -> Result<Response, BoxError> {
    let (parts, body) = request.into_parts();
    let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
    let is_away = {
        let mut data = api.data();
        let verb = match parts.method {
            Method::GET if query.contains("sendInitialEvents=true") => "LIST",
            Method::GET if query.contains("watch=true") => "WATCH",
            Method::GET if query.contains("limit=") => "LIST",
            ref method => method.as_str(),
        };
        let request = format!("{verb} {path}");
        data.requests.push((Instant::now(), request));
        data.is_unavailable
    };
    if is_away {
        return Err("connection refused by the test".into());
    }
    if let Some(refusal) = api.take_refusal(path) {
        return Ok(refusal);
    }
    let body = axum::body::to_bytes(body, 1 << 20)
        .await
        .expect("a whole body");
    Ok(route_request(&api, &parts, &body).await)
}

async fn route_request(api: &SimApiServer, parts: &http::request::Parts, body: &[u8]) -> Response {
    let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
    let segments: Vec<&str> = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .collect();
    let selected = Selector::from_query(query);
    if parts.method == Method::GET {
        let kind = segments.last().copied().unwrap_or_default();
        let object = match segments.as_slice() {
            [
                ..,
                "namespaces",
                namespace,
                kind @ ("pods" | "leases"),
                name,
            ] => Some(api.stored(kind, &format!("{namespace}/{name}"))),
            [.., kind @ ("gpunodes" | "nodes"), name] => {
                Some(api.stored(kind, &format!("/{name}")))
            }
            _ => None,
        };
        if let Some(object) = object {
            return object.map_or_else(
                || error_response(StatusCode::NOT_FOUND),
                |object| json_body(&object),
            );
        }
        return if query.contains("watch=true") {
            let from = query_parameter(query, "resourceVersion").and_then(|text| text.parse().ok());
            api.watch(kind.to_owned(), selected, from.unwrap_or(0), query)
        } else {
            let namespace = match segments.as_slice() {
                [.., "namespaces", namespace, _] => namespace,
                _ => "",
            };
            api.list(kind, namespace, &selected, query)
        };
    }
    let body: Value = serde_json::from_slice(body).expect("JSON");
    if segments.last() == Some(&"events") {
        api.data().published.push(body.clone());
        return json_body(&body);
    }
    match api.record_write(format!("{} {path}", parts.method)) {
        None => api.handle_write(&parts.method, &segments, query, &body),
        Some(WriteFault::Refused(code)) => error_response(code),
        Some(WriteFault::RequestDropped) => std::future::pending().await,
        Some(WriteFault::ResponseDropped) => {
            drop(api.handle_write(&parts.method, &segments, query, &body));
            std::future::pending().await
        }
        Some(WriteFault::ErrorAfterWrite) => {
            drop(api.handle_write(&parts.method, &segments, query, &body));
            error_response(StatusCode::INTERNAL_SERVER_ERROR)
        }
    }
}
