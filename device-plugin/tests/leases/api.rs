//! Fake API server with one `GpuNode`: a test sets its spec, and the agent writes its status. The
//! server also has the `GpuNamespace` objects that a test set before the agent started.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::machine::Machine;

const OBJECTS: &str = "/apis/bursar.dev/v1alpha1/gpunodes";
const NAMESPACES: &str = "/apis/bursar.dev/v1alpha1/gpunamespaces";

/// The names of all pods that the tests over this server start.
const PODS: [&str; 17] = [
    "a",
    "b",
    "busy",
    "c",
    "d",
    "exporter",
    "fills",
    "full",
    "held",
    "idle",
    "managed",
    "neighbour",
    "open",
    "other",
    "queued",
    "slow",
    "whole",
];

/// The object's spec and status, and its generation.
#[derive(Default)]
struct GpuNodeObject {
    generation: u64,
    /// Grows with each change of spec or status. Without it the agent could take an old status of
    /// its watch for the present one, and write no more.
    version: u64,
    spec: Value,
    status: Value,
    /// The specs of GpuNamespaces by name.
    namespaces: BTreeMap<String, Value>,
    /// The Events that the agent has published.
    events: Vec<Value>,
    /// Whether the server closes each connection.
    away: bool,
}

impl GpuNodeObject {
    fn to_json(&self) -> Value {
        // The operator has written the pods of these tests, so that none waits for it.
        let mut spec = self.spec.clone();
        let uids = PODS
            .iter()
            .map(|pod| json!({ "podUid": format!("{pod}-uid") }));
        spec["pods"] = uids.collect();

        json!({
            "apiVersion": "bursar.dev/v1alpha1",
            "kind": "GpuNode",
            "metadata": {
                "name": "node-1",
                "resourceVersion": self.version.to_string(),
                "generation": self.generation,
            },
            "spec": spec,
            "status": self.status,
        })
    }
}

pub(crate) struct FakeGpuNodeApi(Arc<Mutex<GpuNodeObject>>);

impl FakeGpuNodeApi {
    /// Starts the API server of this machine's next agent.
    pub(crate) fn start(machine: &Machine) -> FakeGpuNodeApi {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "a", "cluster": { "server": server } }],
            "users": [{ "name": "a", "user": {} }],
            "contexts": [{ "name": "a", "context": { "cluster": "a", "user": "a" } }],
            "current-context": "a",
        });
        fs::create_dir_all(machine.path(".kube")).unwrap();
        fs::write(machine.path(".kube/config"), config.to_string()).unwrap();
        let object = Arc::new(Mutex::new(GpuNodeObject {
            generation: 1,
            version: 1,
            spec: json!({}),
            status: json!({}),
            namespaces: BTreeMap::new(),
            events: Vec::new(),
            away: false,
        }));
        let served = Arc::clone(&object);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let object = Arc::clone(&served);
                // An error means that the client has closed the connection.
                std::thread::spawn(move || serve(stream, &object).unwrap_or_default());
            }
        });
        FakeGpuNodeApi(object)
    }

    /// Sets the spec so that these GPUs alone are drained.
    pub(crate) fn drain(&self, gpus: &[&str]) {
        self.set_spec(json!({ "drain": gpus }));
    }

    /// Replaces the spec.
    pub(crate) fn set_spec(&self, spec: Value) {
        let mut object = self.0.lock().unwrap();
        object.spec = spec;
        object.generation += 1;
        object.version += 1;
    }

    /// Sets the spec of a GpuNamespace, before the agent starts.
    pub(crate) fn set_namespace(&self, name: &str, spec: Value) {
        let mut object = self.0.lock().unwrap();
        object.namespaces.insert(name.to_owned(), spec);
    }

    /// From now on the server closes each connection, or answers again.
    pub(crate) fn set_unreachable(&self, away: bool) {
        self.0.lock().unwrap().away = away;
    }

    /// The status that the agent wrote last.
    pub(crate) fn status(&self) -> Value {
        self.0.lock().unwrap().status.clone()
    }

    /// The notes of the Events with this reason.
    pub(crate) fn events(&self, reason: &str) -> Vec<String> {
        let object = self.0.lock().unwrap();
        let events = object.events.iter();
        events
            .filter(|event| event["reason"] == reason)
            .filter_map(|event| event["note"].as_str().map(str::to_owned))
            .collect()
    }

    /// The status of a GPU that the agent wrote last.
    pub(crate) fn gpu(&self, uuid: &str) -> Value {
        let object = self.0.lock().unwrap();
        let mut gpus = object.status["gpus"].as_array().into_iter().flatten();
        gpus.find(|gpu| gpu["uuid"] == uuid)
            .cloned()
            .unwrap_or_default()
    }
}

fn serve(stream: TcpStream, object: &Mutex<GpuNodeObject>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut line, mut length) = (String::new(), 0);
    reader.read_line(&mut line)?;
    let mut words = line.split(' ').map(str::to_owned);
    let (method, path) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        match header.trim_end().split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.parse().unwrap();
            }
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if object.lock().unwrap().away {
        return Ok(());
    }
    let is_object = path.starts_with(OBJECTS);
    let is_namespaces = path.starts_with(NAMESPACES);
    if path.contains("sendInitialEvents=true") {
        // This server streams no lists.
        let refusal = json!({ "kind": "Status", "apiVersion": "v1", "code": 422 });
        return respond(&stream, "422 Unprocessable", &refusal);
    }
    if path.contains("watch=true") {
        return watch(stream, object, is_object);
    }
    let mut state = object.lock().unwrap();
    let answer = match method.as_str() {
        "PATCH" if is_object => {
            let patch: Value = serde_json::from_slice(&body)?;
            if let Some(status) = patch.get("status") {
                state.status = status.clone();
                state.version += 1;
            }
            state.to_json()
        }
        "GET" if is_object && path.contains('?') => json!({
            "apiVersion": "bursar.dev/v1alpha1",
            "kind": "GpuNodeList",
            "metadata": { "resourceVersion": state.version.to_string() },
            "items": [state.to_json()],
        }),
        "GET" if is_object => state.to_json(),
        "GET" if is_namespaces => {
            let item = |(name, spec): (&String, &Value)| {
                json!({
                    "apiVersion": "bursar.dev/v1alpha1",
                    "kind": "GpuNamespace",
                    "metadata": { "name": name, "resourceVersion": "1" },
                    "spec": spec,
                })
            };
            json!({
                "apiVersion": "bursar.dev/v1alpha1",
                "kind": "GpuNamespaceList",
                "metadata": { "resourceVersion": "1" },
                "items": state.namespaces.iter().map(item).collect::<Vec<_>>(),
            })
        }
        // The agent ignores the answer to an Event, which is the only POST. Other requests read the
        // Node.
        "POST" => {
            let event: Value = serde_json::from_slice(&body)?;
            state.events.push(event.clone());
            event
        }
        _ => json!({
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": { "name": "node-1", "uid": "n" },
        }),
    };
    drop(state);
    respond(&stream, "200 OK", &answer)
}

fn respond(mut stream: &TcpStream, status: &str, answer: &Value) -> std::io::Result<()> {
    let answer = answer.to_string();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{answer}",
        answer.len()
    )
}

/// Holds a watch open, and sends the `GpuNode` at each change if the watch is of that kind.
fn watch(
    mut stream: TcpStream,
    object: &Mutex<GpuNodeObject>,
    is_object: bool,
) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    )?;
    let mut sent_version = 0;
    loop {
        let (version, whole) = {
            let object = object.lock().unwrap();
            if object.away {
                return Ok(());
            }
            (object.version, object.to_json())
        };
        if is_object && version != sent_version {
            writeln!(stream, "{}", json!({ "type": "MODIFIED", "object": whole }))?;
            sent_version = version;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
