//! Publishes Events on the node and its pods at a bounded rate: one limit per pod, one for all
//! pods, one for the node.

mod object;
mod rate_limit;
mod reason;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_ledger::units::PodUid;
use k8s_openapi::api::events::v1::Event;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics::ApiMetrics;
use object::build_event;
use rate_limit::{Admission, RateLimiter};

pub use reason::Reason;

/// The pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodRef {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: PodUid,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Node,
    Pod(PodRef),
}

impl Subject {
    /// The namespace of the Event. For a Node, `kubectl describe` looks in `default`.
    fn namespace(&self) -> &str {
        match self {
            Subject::Node => "default",
            Subject::Pod(pod) => &pod.namespace,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct EventKey {
    subject: Subject,
    reason: Reason,
    message: String,
}

/// How many Events may wait to be sent; further ones are dropped and counted.
const QUEUE_CAPACITY: usize = 256;

/// Accepts Events without waiting for the API server. Clones share the limits.
#[derive(Clone, Debug)]
pub struct Events {
    /// The limits apply before the queue, so that a noisy pod cannot fill it.
    limiter: Arc<Mutex<RateLimiter>>,
    queue: mpsc::Sender<EventKey>,
    metrics: ApiMetrics,
}

/// Sends the Events that [`Events`] accepted.
#[derive(Debug)]
pub struct EventSender {
    queue: mpsc::Receiver<EventKey>,
}

impl Events {
    /// Returns a handle, and the sender that [`EventSender::run`] drives.
    pub fn new(metrics: ApiMetrics) -> (Self, EventSender) {
        let (sender, queue) = mpsc::channel(QUEUE_CAPACITY);
        let events = Self {
            limiter: Arc::new(Mutex::new(RateLimiter::new(Instant::now()))),
            queue: sender,
            metrics,
        };
        (events, EventSender { queue })
    }

    /// Publishes an Event on this node.
    pub fn on_node(&self, reason: Reason, message: impl Into<String>) {
        self.enqueue(Subject::Node, reason, message.into());
    }

    /// Publishes an Event on a pod.
    pub fn on_pod(&self, pod: PodRef, reason: Reason, message: impl Into<String>) {
        self.enqueue(Subject::Pod(pod), reason, message.into());
    }

    fn enqueue(&self, subject: Subject, reason: Reason, message: String) {
        let key = EventKey {
            subject,
            reason,
            message,
        };
        let passage = lock(&self.limiter).admit(&key, Instant::now());
        let dropped = match passage {
            Admission::Repeated => false,
            Admission::RateLimited => true,
            Admission::New => self.queue.try_send(key).is_err(),
        };
        if dropped {
            self.metrics.count_event_dropped();
        }
    }
}

fn lock(limiter: &Mutex<RateLimiter>) -> MutexGuard<'_, RateLimiter> {
    limiter.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EventSender {
    /// Sends Events until `shutdown`, or until the last [`Events`] is dropped. Events that the API
    /// server refuses are dropped and counted.
    pub async fn run(
        mut self,
        client: Client,
        node: String,
        metrics: ApiMetrics,
        shutdown: CancellationToken,
    ) {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                key = self.queue.recv() => {
                    let Some(key) = key else { return };
                    let sent = shutdown.run_until_cancelled(create_event(&client, &node, &key)).await;
                    let Some(sent) = sent else { return };
                    if let Err(error) = sent {
                        debug!(reason = key.reason.as_str(), %error, "failed to send an event");
                        metrics.count_event_dropped();
                    }
                },
            }
        }
    }
}

/// Creates an Event. The agent may change none, because the response to a refused change has the
/// whole Event, whoever wrote it.
async fn create_event(client: &Client, node: &str, key: &EventKey) -> kube::Result<()> {
    let event = build_event(key, node);
    let api = Api::<Event>::namespaced(client.clone(), key.subject.namespace());
    api.create(&PostParams::default(), &event).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;

    use super::object::MAX_NOTE_LENGTH;
    use super::rate_limit::{BURST, DEDUP_WINDOW, POD_BURST};
    use super::*;

    fn node_event(message: &str) -> EventKey {
        EventKey {
            subject: Subject::Node,
            reason: Reason::GpuUnhealthy,
            message: message.to_owned(),
        }
    }

    fn pod_event(pod: &str, message: &str) -> EventKey {
        EventKey {
            subject: Subject::Pod(PodRef {
                namespace: "n".into(),
                name: pod.into(),
                uid: pod.parse().unwrap(),
            }),
            ..node_event(message)
        }
    }

    #[test]
    fn equal_events_are_one_event_in_each_window() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(start);
        let mut admit = |message, after| limiter.admit(&node_event(message), start + after);
        assert_eq!(admit("a", Duration::ZERO), Admission::New);
        assert_eq!(admit("a", DEDUP_WINDOW / 2), Admission::Repeated);
        assert_eq!(admit("b", DEDUP_WINDOW / 2), Admission::New);
        assert_eq!(admit("a", DEDUP_WINDOW), Admission::New);
    }

    #[test]
    fn event_storm_is_cut_to_its_rate() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(start);
        let sent = (0..6_000)
            .filter(|i| {
                let now = start + Duration::from_millis(10) * *i;
                limiter.admit(&node_event(&i.to_string()), now) == Admission::New
            })
            .count();
        assert!((84..=86).contains(&sent), "{sent} in a minute");
    }

    #[test]
    fn event_storm_of_a_pod_leaves_room_for_other_pods() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(start);
        let (mut of_storm, mut of_others) = (0, 0);
        for i in 0..6_000_u32 {
            let now = start + Duration::from_millis(10) * i;
            let storm = limiter.admit(&pod_event("storm", &i.to_string()), now);
            of_storm += u32::from(storm == Admission::New);
            if i % 300 == 299 {
                let other = pod_event(&format!("pod-{i}"), "over its quota");
                of_others += u32::from(limiter.admit(&other, now) == Admission::New);
            }
        }
        assert_eq!(of_others, 20, "each of them");
        assert!(of_storm <= POD_BURST + 2, "{of_storm} in a minute");
        assert_eq!(limiter.admit(&node_event("n"), start), Admission::New);
        // The number of entries is bounded by the pods with recent Events.
        assert!(limiter.pods.len() <= 21, "{}", limiter.pods.len());
    }

    #[test]
    fn event_has_the_writer_label() {
        let labels = build_event(&node_event("n"), "node-1")
            .metadata
            .labels
            .unwrap();
        assert_eq!(labels["bursar.dev/writer"], "agent");
    }

    #[test]
    fn long_note_is_cut_at_a_character() {
        let note = build_event(&node_event(&"ü".repeat(2_000)), "node-1")
            .note
            .unwrap();
        assert_eq!(note.len(), MAX_NOTE_LENGTH);
    }

    #[tokio::test]
    async fn each_message_about_a_pod_is_its_own_event() {
        use axum::body::{Body, to_bytes};
        use axum::http::{Method, Request, Response};

        let (sent, mut received) = mpsc::channel(4);
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
        let metrics = ApiMetrics::new(&mut Registry::default());
        let (events, event_sender) = Events::new(metrics.clone());
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
        event_sender.run(client, "node".into(), metrics, stop).await;
        for why in ["one reason", "another"] {
            assert_eq!(received.recv().await, Some((Method::POST, why.into())));
        }
    }

    #[tokio::test]
    async fn events_over_the_rate_are_dropped_and_counted() {
        let metrics = ApiMetrics::new(&mut Registry::default());
        let (events, _outbox) = Events::new(metrics.clone());
        for i in 0..BURST + 3 {
            events.on_node(Reason::GpuHealthy, i.to_string());
        }
        assert_eq!(metrics.events_dropped.get(), 3);
        // A repeated Event takes no place in the queue.
        events.on_node(Reason::GpuHealthy, "0");
        assert_eq!(metrics.events_dropped.get(), 3);
    }

    #[tokio::test]
    async fn repeated_event_is_created_once_and_never_changed() {
        use axum::body::{Body, to_bytes};
        use axum::http::{Request, Response};

        let (sent, mut received) = mpsc::channel(4);
        let server = tower::service_fn(move |request: Request<kube::client::Body>| {
            let sent = sent.clone();
            async move {
                let call = format!("{} {}", request.method(), request.uri().path());
                let event = to_bytes(Body::new(request.into_body()), usize::MAX).await?;
                sent.send(call).await.unwrap();
                Ok::<_, axum::Error>(Response::new(Body::from(event)))
            }
        });
        let metrics = ApiMetrics::new(&mut Registry::default());
        let (events, event_sender) = Events::new(metrics.clone());
        let key = pod_event("p", "over its quota");
        let Subject::Pod(pod) = key.subject else {
            unreachable!("it is about a pod")
        };
        for _ in 0..1_000 {
            events.on_pod(pod.clone(), key.reason, key.message.clone());
        }
        drop(events);
        let client = Client::new(server, "default");
        let stop = CancellationToken::new();
        event_sender.run(client, "node".into(), metrics, stop).await;
        let created = "POST /apis/events.k8s.io/v1/namespaces/n/events".to_owned();
        assert_eq!(received.recv().await, Some(created));
        assert_eq!(received.recv().await, None);
    }
}
