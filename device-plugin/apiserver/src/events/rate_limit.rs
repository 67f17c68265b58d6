//! Limits the rate of Events: per pod, for all pods, and for the node.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{EventKey, PodRef, Subject};

/// For how long equal Events are one Event.
pub(super) const DEDUP_WINDOW: Duration = Duration::from_secs(300);

/// The burst of the node, and of all pods together.
pub(super) const BURST: u32 = 25;

/// The interval between two Events after the burst.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) const POD_BURST: u32 = 8;

const POD_INTERVAL: Duration = Duration::from_secs(30);

/// A token bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    tokens: f64,
    filled: Instant,
    burst: u32,
    interval: Duration,
}

impl Bucket {
    fn full(burst: u32, interval: Duration, now: Instant) -> Self {
        let tokens = f64::from(burst);
        Self {
            tokens,
            filled: now,
            burst,
            interval,
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        let more = passed / self.interval.as_secs_f64();
        self.tokens = (self.tokens + more).min(f64::from(self.burst));
        self.filled = now;
    }

    fn has_token(&self) -> bool {
        self.tokens >= 1.0
    }
}

/// Whether an Event is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    New,
    /// The Event was sent a short time ago.
    Repeated,
    RateLimited,
}

/// Limits the rate of new Events: per pod, for all pods, and for the node.
#[derive(Debug)]
pub(super) struct RateLimiter {
    node: Bucket,
    all_pods: Bucket,
    pub(super) pods: HashMap<PodRef, Bucket>,
    /// When each recent Event was sent.
    sent: HashMap<EventKey, Instant>,
}

impl RateLimiter {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            node: Bucket::full(BURST, INTERVAL, now),
            all_pods: Bucket::full(BURST, INTERVAL, now),
            pods: HashMap::new(),
            sent: HashMap::new(),
        }
    }

    pub(super) fn admit(&mut self, key: &EventKey, now: Instant) -> Admission {
        self.sent
            .retain(|_, sent_at| now.saturating_duration_since(*sent_at) < DEDUP_WINDOW);
        if self.sent.contains_key(key) {
            return Admission::Repeated;
        }
        if !self.take_token(&key.subject, now) {
            return Admission::RateLimited;
        }
        self.sent.insert(key.clone(), now);
        Admission::New
    }

    /// Takes a token from each bucket that the Event needs, or from none.
    fn take_token(&mut self, subject: &Subject, now: Instant) -> bool {
        let Subject::Pod(pod) = subject else {
            self.node.refill(now);
            let takes = self.node.has_token();
            self.node.tokens -= f64::from(u8::from(takes));
            return takes;
        };
        // A pod with a full bucket needs no entry.
        self.pods.retain(|_, bucket| {
            bucket.refill(now);
            bucket.tokens < f64::from(bucket.burst)
        });
        let mut own = match self.pods.get(pod) {
            Some(bucket) => *bucket,
            None => Bucket::full(POD_BURST, POD_INTERVAL, now),
        };
        self.all_pods.refill(now);
        if !own.has_token() || !self.all_pods.has_token() {
            return false;
        }
        own.tokens -= 1.0;
        self.all_pods.tokens -= 1.0;
        self.pods.insert(pod.clone(), own);
        true
    }
}
