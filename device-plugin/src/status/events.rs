//! Events on the node and its pods, bounded in kind, number and rate.

use std::collections::HashMap;
use std::time::Duration;

use bursar_crds::AGENT_MANAGER;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics::Metrics;
use crate::units::PodUid;

/// Every reason that the agent gives in an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A container was bound to a GPU (or to managed memory).
    Bound,
    /// A container waits on the node for room.
    WaitingForRoom,
    /// A container cannot be bound for another reason than room.
    NotBound,
    /// A GPU stopped working.
    GpuUnhealthy,
    /// A GPU works again.
    GpuHealthy,
    /// No driver, or it has no GPU.
    GpusMissing,
    /// More tokens than the kubelet can handle.
    TooManyTokens,
    /// The checkpoint was malformed and was rebuilt from the node.
    CheckpointRebuilt,
    /// The checkpoint cannot be written.
    CheckpointUnwritable,
    /// CDI files cannot be written.
    CdiUnusable,
    /// The kubelet does not accept the plugin.
    RegistrationFailed,
    /// A container has more than its quota.
    OverQuota,
    /// A process uses a GPU without the ledger's knowledge.
    Intruder,
    /// A process wrote a grant into its own credit page.
    ForgedPage,
    /// Memory of a GPU is in use and charged to nobody.
    Unaccounted,
    /// Memory that ended pods had exported is held by others.
    MemoryLeaked,
    /// A process was killed by the audit's policy.
    Killed,
    /// A fault has poisoned a process's context.
    ContextPoisoned,
    /// A container is not held to its quota.
    NotEnforced,
    /// A container is held to its quota again.
    Enforced,
}

impl Reason {
    /// The word in the Event and in metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bound => "GpuMemoryBound",
            Self::WaitingForRoom => "WaitingForGpuMemory",
            Self::NotBound => "GpuMemoryNotBound",
            Self::GpuUnhealthy => "GpuUnhealthy",
            Self::GpuHealthy => "GpuHealthy",
            Self::GpusMissing => "GpusMissing",
            Self::TooManyTokens => "TooManyTokens",
            Self::CheckpointRebuilt => "CheckpointRebuilt",
            Self::CheckpointUnwritable => "CheckpointUnwritable",
            Self::CdiUnusable => "CdiUnusable",
            Self::RegistrationFailed => "RegistrationFailed",
            Self::OverQuota => "GpuMemoryOverQuota",
            Self::Intruder => "GpuIntruder",
            Self::ForgedPage => "GpuCreditForged",
            Self::Unaccounted => "GpuMemoryUnaccounted",
            Self::MemoryLeaked => "GpuMemoryLeaked",
            Self::Killed => "GpuProcessKilled",
            Self::ContextPoisoned => "GpuContextPoisoned",
            Self::NotEnforced => "GpuQuotaNotEnforced",
            Self::Enforced => "GpuQuotaEnforced",
        }
    }

    const fn type_(self) -> EventType {
        match self {
            Self::Bound | Self::GpuHealthy | Self::Enforced => EventType::Normal,
            Self::WaitingForRoom
            | Self::NotBound
            | Self::GpuUnhealthy
            | Self::GpusMissing
            | Self::TooManyTokens
            | Self::CheckpointRebuilt
            | Self::CheckpointUnwritable
            | Self::CdiUnusable
            | Self::RegistrationFailed
            | Self::OverQuota
            | Self::Intruder
            | Self::ForgedPage
            | Self::Unaccounted
            | Self::MemoryLeaked
            | Self::Killed
            | Self::ContextPoisoned
            | Self::NotEnforced => EventType::Warning,
        }
    }
}

/// The pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: PodUid,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum About {
    Node,
    Pod(PodRef),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Said {
    about: About,
    reason: Reason,
    message: String,
}

/// How many events may wait to be sent; more are dropped and counted.
const QUEUE: usize = 256;
/// The same thing about the same object is said once in this time.
const REPEAT: Duration = Duration::from_secs(300);
/// Events at once after a quiet time.
const BURST: u32 = 25;
/// From one event to the next when it is not quiet.
const INTERVAL: Duration = Duration::from_secs(1);
/// The longest note that the API server takes (`events.k8s.io/v1`).
const LONGEST: usize = 1024;

/// Says things, and never waits for the API server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Said>,
    metrics: Metrics,
}

/// The other end of [`Events`]: sends them.
#[derive(Debug)]
pub struct Outbox {
    queue: mpsc::Receiver<Said>,
}

impl Events {
    /// A handle, and what [`Outbox::run`] sends from.
    pub fn new(metrics: Metrics) -> (Self, Outbox) {
        let (sender, queue) = mpsc::channel(QUEUE);
        let events = Self {
            queue: sender,
            metrics,
        };
        (events, Outbox { queue })
    }

    /// Says something about this node.
    pub fn on_node(&self, reason: Reason, message: impl Into<String>) {
        self.say(About::Node, reason, message.into());
    }

    /// Says something about a pod.
    pub fn on_pod(&self, pod: PodRef, reason: Reason, message: impl Into<String>) {
        self.say(About::Pod(pod), reason, message.into());
    }

    fn say(&self, about: About, reason: Reason, message: String) {
        let said = Said {
            about,
            reason,
            message,
        };
        if self.queue.try_send(said).is_err() {
            self.metrics.event_dropped();
        }
    }
}

impl Outbox {
    /// Sends what is said, until `shutdown` or until nobody can say anything any more. What the API
    /// server does not take is dropped and counted.
    pub async fn run(
        mut self,
        client: Client,
        node: String,
        metrics: Metrics,
        shutdown: CancellationToken,
    ) {
        let reporter = Reporter {
            controller: AGENT_MANAGER.to_owned(),
            instance: Some(node.clone()),
        };
        let mut gate = Gate::new(Instant::now());
        loop {
            let said = tokio::select! {
                () = shutdown.cancelled() => return,
                said = self.queue.recv() => match said {
                    Some(said) => said,
                    None => return,
                },
            };
            if !gate.admits(&said, Instant::now()) {
                metrics.event_dropped();
                continue;
            }
            let (event, about) = (event(&said), reference(&said.about, &node));
            // A new one each: it takes a second Event with the same reason for the first one again, and drops its note.
            let recorder = Recorder::new(client.clone(), reporter.clone());
            tokio::select! {
                () = shutdown.cancelled() => return,
                sent = recorder.publish(&event, &about) => if let Err(error) = sent {
                    debug!(reason = said.reason.as_str(), %error, "event not sent");
                    metrics.event_dropped();
                },
            }
        }
    }
}

fn event(said: &Said) -> Event {
    let mut note = said.message.clone();
    note.truncate(note.floor_char_boundary(LONGEST));
    Event {
        type_: said.reason.type_(),
        reason: said.reason.as_str().to_owned(),
        note: Some(note),
        action: said.reason.as_str().to_owned(),
        secondary: None,
    }
}

fn reference(about: &About, node: &str) -> ObjectReference {
    match about {
        // The kubelet gives its own events the node's name for a UID, and so does `kubectl describe`.
        About::Node => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        },
        About::Pod(PodRef {
            namespace,
            name,
            uid,
        }) => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.as_str().to_owned()),
            ..ObjectReference::default()
        },
    }
}

/// Lets through what is new, at a bounded rate: a token bucket, and a memory of what was said.
struct Gate {
    tokens: f64,
    filled: Instant,
    said: HashMap<Said, Instant>,
}

impl Gate {
    fn new(now: Instant) -> Self {
        Self {
            tokens: f64::from(BURST),
            filled: now,
            said: HashMap::new(),
        }
    }

    fn admits(&mut self, said: &Said, now: Instant) -> bool {
        self.said
            .retain(|_, at| now.saturating_duration_since(*at) < REPEAT);
        if self.said.contains_key(said) {
            return false;
        }
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + passed / INTERVAL.as_secs_f64()).min(f64::from(BURST));
        self.filled = now;
        if self.tokens < 1.0 {
            return false;
        }
        self.tokens -= 1.0;
        self.said.insert(said.clone(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(message: &str) -> Said {
        Said {
            about: About::Node,
            reason: Reason::GpuUnhealthy,
            message: message.to_owned(),
        }
    }

    #[test]
    fn the_same_thing_is_said_once_in_five_minutes() {
        let start = Instant::now();
        let mut gate = Gate::new(start);
        assert!(gate.admits(&said("a"), start));
        assert!(!gate.admits(&said("a"), start + REPEAT / 2));
        assert!(gate.admits(&said("b"), start + REPEAT / 2));
        assert!(gate.admits(&said("a"), start + REPEAT));
    }

    #[test]
    fn a_storm_is_cut_to_its_rate() {
        let start = Instant::now();
        let mut gate = Gate::new(start);
        let sent = (0..6_000)
            .filter(|i| {
                let now = start + Duration::from_millis(10) * *i;
                gate.admits(&said(&i.to_string()), now)
            })
            .count();
        assert!((84..=86).contains(&sent), "{sent} in a minute");
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let note = event(&said(&"ü".repeat(2_000))).note.unwrap();
        assert_eq!(note.len(), LONGEST);
    }

    #[tokio::test]
    async fn each_message_about_a_pod_is_an_event_of_its_own() {
        use axum::body::{Body, to_bytes};
        use axum::http::{Method, Request, Response};

        let (sent, mut seen) = mpsc::channel(4);
        let server = tower::service_fn(move |request: Request<kube::client::Body>| {
            let sent = sent.clone();
            async move {
                let method = request.method().clone();
                let event = to_bytes(Body::new(request.into_body()), usize::MAX).await?;
                let note = serde_json::from_slice::<serde_json::Value>(&event).unwrap();
                sent.send((method, note["note"].clone())).await.unwrap();
                Ok::<_, axum::Error>(Response::new(Body::from(event)))
            }
        });
        let metrics = Metrics::new();
        let (events, outbox) = Events::new(metrics.clone());
        let pod = PodRef {
            namespace: "n".into(),
            name: "p".into(),
            uid: "u".parse().unwrap(),
        };
        for why in ["one reason", "another"] {
            events.on_pod(pod.clone(), Reason::NotEnforced, why);
        }
        drop(events);
        let client = Client::new(server, "default");
        let stop = CancellationToken::new();
        outbox.run(client, "node".into(), metrics, stop).await;
        for why in ["one reason", "another"] {
            assert_eq!(seen.recv().await, Some((Method::POST, why.into())));
        }
    }

    #[tokio::test]
    async fn saying_more_than_can_wait_drops_and_counts() {
        let metrics = Metrics::new();
        let (events, _outbox) = Events::new(metrics.clone());
        for i in 0..QUEUE + 3 {
            events.on_node(Reason::GpuHealthy, i.to_string());
        }
        assert!(
            metrics
                .encode()
                .contains("bursar_agent_events_dropped_total 3")
        );
    }
}
