//! Fake API server that answers late or never, and records the Events that it receives.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, Response, StatusCode, header};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::machine::Machine;

/// The longest request that the server reads.
const MAX_BODY: usize = 1 << 20;

/// A server without objects that accepts every Event.
pub(crate) struct FakeApiServer {
    address: SocketAddr,
    events: Arc<Mutex<Vec<Value>>>,
    delay: watch::Sender<Option<Duration>>,
    _server: AbortOnDropHandle<()>,
}

#[derive(Clone)]
struct ServerState {
    events: Arc<Mutex<Vec<Value>>>,
    delay: watch::Receiver<Option<Duration>>,
}

impl FakeApiServer {
    /// Starts a server that answers each request after `delay`.
    pub(crate) async fn start(delay: Duration) -> FakeApiServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let events = Arc::<Mutex<Vec<Value>>>::default();
        let (sender, delay) = watch::channel(Some(delay));
        let answers = ServerState {
            events: Arc::clone(&events),
            delay,
        };
        let routes = Router::new().fallback(answer).with_state(answers);
        let server = async { axum::serve(listener, routes).await.unwrap() };
        FakeApiServer {
            address,
            events,
            delay: sender,
            _server: AbortOnDropHandle::new(tokio::spawn(server)),
        }
    }

    /// From now on the server reads requests and answers none.
    pub(crate) fn stop_answering(&self) {
        self.delay.send_replace(None);
    }

    /// Gives the machine's next agent a kubeconfig for this server.
    pub(crate) fn configure(&self, machine: &Machine) {
        // The agent's home directory is the machine's folder.
        let folder = machine.path(".kube");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config"), self.kubeconfig()).unwrap();
    }

    fn kubeconfig(&self) -> String {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{ "name": "fake", "cluster": { "server": format!("http://{}", self.address) } }],
            "users": [{ "name": "fake", "user": {} }],
            "contexts": [{ "name": "fake", "context": { "cluster": "fake", "user": "fake" } }],
        });
        config.to_string()
    }

    /// The reasons of the Events about an object of this name.
    pub(crate) fn reasons_about(&self, name: &str) -> Vec<String> {
        let events = self.events.lock().unwrap();
        let about = events.iter();
        about
            .filter(|event| event["regarding"]["name"] == name)
            .filter_map(|event| event["reason"].as_str().map(str::to_owned))
            .collect()
    }

    pub(crate) fn events(&self) -> usize {
        self.events.lock().unwrap().len()
    }
}

async fn answer(State(mut answers): State<ServerState>, request: Request) -> Response<Body> {
    let creates = request.method() == Method::POST && request.uri().path().ends_with("/events");
    let body = to_bytes(request.into_body(), MAX_BODY).await.unwrap();
    let event = creates.then(|| serde_json::from_slice::<Value>(&body).unwrap());
    if let Some(event) = &event {
        answers.events.lock().unwrap().push(event.clone());
    }
    let delay = *answers.delay.borrow_and_update();
    match delay {
        Some(delay) => tokio::time::sleep(delay).await,
        None => std::future::pending().await,
    }
    let (code, answer) = match event {
        Some(event) => (StatusCode::CREATED, event),
        None => (
            StatusCode::NOT_FOUND,
            json!({
                "apiVersion": "v1",
                "kind": "Status",
                "status": "Failure",
                "reason": "NotFound",
                "message": "no such object",
                "code": 404,
            }),
        ),
    };
    Response::builder()
        .status(code)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(answer.to_string()))
        .unwrap()
}
