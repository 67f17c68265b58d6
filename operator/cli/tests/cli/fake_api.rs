//! Serves recorded objects as the API server does: lists in pages, objects, patches, refusals.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// A fake API server. Clones share its state.
#[derive(Clone, Default)]
pub(crate) struct FakeApi {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// By the path of the list, such as `/api/v1/pods`.
    lists: BTreeMap<String, Vec<Value>>,
    /// Texts by path, such as an agent's metrics.
    texts: BTreeMap<String, String>,
    forbidden: Vec<String>,
    /// How many deletions the server carries out and answers with an error.
    lost_deletions: usize,
    requests: Vec<String>,
    queries: Vec<String>,
    /// The patches that another client's write comes before.
    conflicts: usize,
    patches: Vec<Value>,
    /// The reads of an object after a patch that are refused.
    unavailable: usize,
    /// The reads of an object after a patch that get no answer.
    hung: usize,
}

impl FakeApi {
    /// Sets the objects of a list.
    pub(crate) fn put(&self, path: &str, objects: Vec<Value>) {
        self.state
            .lock()
            .unwrap()
            .lists
            .insert(path.to_owned(), objects);
    }

    /// Sets the text of a path.
    pub(crate) fn text(&self, path: &str, text: &str) {
        self.state
            .lock()
            .unwrap()
            .texts
            .insert(path.to_owned(), text.to_owned());
    }

    /// Refuses every request of a path.
    pub(crate) fn forbid(&self, path: &str) {
        self.state.lock().unwrap().forbidden.push(path.to_owned());
    }

    /// Carries out the next deletions and answers with an error.
    pub(crate) fn lose_deletions(&self, lost: usize) {
        self.state.lock().unwrap().lost_deletions = lost;
    }

    /// Lets another client write the object before each of the next patches.
    pub(crate) fn conflict(&self, patches: usize) {
        self.state.lock().unwrap().conflicts = patches;
    }

    /// Answers the first reads of an object after a patch with 503, and the next ones not at all.
    pub(crate) fn break_reads(&self, unavailable: usize, hung: usize) {
        let mut state = self.state.lock().unwrap();
        (state.unavailable, state.hung) = (unavailable, hung);
    }

    /// Whether the request gets no answer.
    fn hangs(&self, method: &Method) -> bool {
        let mut state = self.state.lock().unwrap();
        let hangs = *method == Method::GET
            && !state.patches.is_empty()
            && state.unavailable == 0
            && state.hung > 0;
        state.hung -= usize::from(hangs);
        hangs
    }

    /// The requests so far, as `METHOD path`.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    /// The requests with parameters so far, as `path?query`.
    pub(crate) fn queries(&self) -> Vec<String> {
        self.state.lock().unwrap().queries.clone()
    }

    /// The objects of a list.
    pub(crate) fn list(&self, path: &str) -> Vec<Value> {
        let state = self.state.lock().unwrap();
        state.lists.get(path).cloned().unwrap_or_default()
    }

    /// The patches so far.
    pub(crate) fn patches(&self) -> Vec<Value> {
        self.state.lock().unwrap().patches.clone()
    }

    /// A client in namespace `ml`.
    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move {
                let (parts, body) = request.into_parts();
                if api.hangs(&parts.method) {
                    std::future::pending::<()>().await;
                }
                let body = body.collect_bytes().await?;
                Ok::<_, kube::Error>(api.respond(&parts, &body))
            }
        });
        Client::new(service, "ml")
    }

    /// The answer to a request.
    pub(crate) fn respond(&self, parts: &http::request::Parts, body: &[u8]) -> Response<Body> {
        let mut state = self.state.lock().unwrap();
        let path = parts.uri.path();
        state.requests.push(format!("{} {path}", parts.method));
        state
            .queries
            .extend(parts.uri.query().map(|query| format!("{path}?{query}")));
        if state.forbidden.iter().any(|forbidden| forbidden == path) {
            return failure(StatusCode::FORBIDDEN, "Forbidden");
        }
        if path == "/version" {
            return json_response(
                &json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.3", "gitCommit": "", "gitTreeState": "",
                "buildDate": "", "goVersion": "", "compiler": "", "platform": "" }),
            );
        }
        if let Some(text) = state.texts.get(path) {
            return Response::new(Body::from(text.clone().into_bytes()));
        }
        if parts.method == Method::POST {
            let object: Value = serde_json::from_slice(body).unwrap();
            let objects = state.lists.entry(path.to_owned()).or_default();
            let name = |object: &Value| object["metadata"]["name"].clone();
            if objects.iter().any(|known| name(known) == name(&object)) {
                return failure(StatusCode::CONFLICT, "AlreadyExists");
            }
            objects.push(object.clone());
            return json_response(&object);
        }
        if let Some(objects) = state.lists.get(path) {
            return json_response(&page(objects, parts.uri.query().unwrap_or_default()));
        }
        if parts.method == Method::GET && !state.patches.is_empty() && state.unavailable > 0 {
            state.unavailable -= 1;
            return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
        }
        let (list, name) = path.rsplit_once('/').unwrap_or_default();
        let State {
            lists,
            conflicts,
            lost_deletions,
            ..
        } = &mut *state;
        let objects = lists.get_mut(list);
        let found = objects.and_then(|objects| {
            objects
                .iter_mut()
                .find(|object| object["metadata"]["name"] == name)
        });
        let Some(object) = found else {
            return failure(StatusCode::NOT_FOUND, "NotFound");
        };
        if parts.method == Method::DELETE {
            let wanted: Value = serde_json::from_slice(body).unwrap_or_default();
            let uid = object["metadata"]["uid"].clone();
            if wanted["preconditions"]["uid"] != uid {
                return failure(StatusCode::CONFLICT, "Conflict");
            }
            // A DaemonSet's controller replaces its pod.
            let all = lists.values_mut().flatten();
            for object in all.filter(|object| object["metadata"]["uid"] == uid) {
                object["metadata"]["uid"] = json!("another");
            }
            if let Some(left) = lost_deletions.checked_sub(1) {
                *lost_deletions = left;
                return failure(StatusCode::GATEWAY_TIMEOUT, "Timeout");
            }
            return json_response(&json!({ "kind": "Status" }));
        }
        if parts.method == Method::PATCH {
            let patch: Value = serde_json::from_slice(body).unwrap();
            if let Some(left) = conflicts.checked_sub(1) {
                *conflicts = left;
                object["metadata"]["resourceVersion"] = json!(format!("other-{left}"));
            }
            if patch["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                return failure(StatusCode::CONFLICT, "Conflict");
            }
            for (field, value) in patch["spec"].as_object().unwrap() {
                object["spec"][field] = value.clone();
            }
            let object = object.clone();
            state.patches.push(patch);
            return json_response(&object);
        }
        json_response(object)
    }
}

fn page(objects: &[Value], query: &str) -> Value {
    let parameter = |name: &str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs
            .filter(|(key, _)| *key == name)
            .find_map(|(_, value)| value.parse::<usize>().ok())
    };
    let from = parameter("continue").unwrap_or(0);
    let until = parameter("limit").map_or(objects.len(), |limit| objects.len().min(from + limit));
    let next = if until < objects.len() {
        until.to_string()
    } else {
        String::new()
    };
    json!({ "kind": "List", "metadata": { "continue": next }, "items": objects[from..until] })
}

fn json_response(value: &Value) -> Response<Body> {
    Response::new(Body::from(value.to_string().into_bytes()))
}

fn failure(code: StatusCode, reason: &str) -> Response<Body> {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("{reason} by the test"), "reason": reason, "code": code.as_u16() });
    let mut response = json_response(&status);
    *response.status_mut() = code;
    response
}
