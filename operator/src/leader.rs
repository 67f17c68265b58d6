//! Elects one of the operator's replicas by a Lease.
//!
//! ```text
//!   no Lease, none's, ours, or unchanged for 15 s --> take it --> renewed every 2 s --> given up
//!   another replica's --> wait                               \--> not renewed for 10 s --> lost
//! ```
//!
//! A replica that lost the Lease ends its work within [`GRACE`], before another one may take the
//! Lease, unless its machine was suspended. Each replica measures by its own monotonic clock how
//! long it has observed the Lease unchanged, so clocks are not compared. Two working replicas do no
//! harm; the election saves the second one's work.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use kube::{Client, Resource as _, ResourceExt as _};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::events::publish_leader;
use crate::clock::Clock;
use crate::error::error_chain;

/// How long other replicas leave an unchanged Lease to its holder.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// The longest duration of another version's Lease that a replica waits for.
const LONGEST_DURATION: Duration = Duration::from_mins(5);
/// How long the holder works without a successful renewal, from the start of the last one.
const RENEWAL_DEADLINE: Duration = Duration::from_secs(10);
/// How long work that has begun goes on after the loss of the Lease.
pub(crate) const GRACE: Duration = Duration::from_secs(4);
/// How long a replica that ended its work by itself then tries to give the Lease up.
pub(crate) const LAST_CALL: Duration = Duration::from_secs(1);
/// The interval between two looks at the Lease.
const INTERVAL: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const TIMEOUT: Duration = Duration::from_secs(4);

/// The name of a Lease, as `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseName {
    /// Its namespace.
    pub namespace: String,
    /// Its name in the namespace.
    pub name: String,
}

/// The text is not of the form `NAMESPACE/NAME`.
#[derive(Debug, thiserror::Error)]
#[error("failed to parse Lease {0:?}: it has no namespace or no name; write NAMESPACE/NAME")]
pub struct LeaseNameError(String);

impl std::str::FromStr for LeaseName {
    type Err = LeaseNameError;

    fn from_str(text: &str) -> Result<Self, LeaseNameError> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(LeaseNameError(text.to_owned())),
        }
    }
}

/// The replica's part in the election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Election {
    /// The Lease of all replicas.
    pub lease: LeaseName,
    /// The name of this replica: its pod's.
    pub identity: String,
}

/// Access to the Lease in the name of one replica.
pub(crate) struct Candidate {
    client: Client,
    leases: Api<Lease>,
    name: String,
    identity: String,
    /// The wall clock, for times that people read.
    clock: Clock,
}

/// A version of the Lease, and when the replica first observed it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ObservedLease {
    version: Option<String>,
    since: Instant,
}

/// Returns whether the replica `identity` may take the Lease now. Records in `observed` since when
/// the Lease has been unchanged.
fn may_take(
    lease: &Lease,
    identity: &str,
    observed: &mut Option<ObservedLease>,
    now: Instant,
) -> bool {
    let holder = lease
        .spec
        .as_ref()
        .and_then(|spec| spec.holder_identity.as_deref());
    match holder {
        // An earlier process of this pod held the Lease, and has exited.
        None | Some("") => return true,
        Some(holder) if holder == identity => return true,
        Some(_) => {}
    }
    let seconds = lease.spec.as_ref();
    let seconds = seconds.and_then(|spec| spec.lease_duration_seconds);
    let told = Duration::from_secs(seconds.and_then(|it| it.try_into().ok()).unwrap_or(0));
    let version = lease.resource_version();
    let known = observed
        .take()
        .filter(|observed| observed.version == version);
    let observed = observed.insert(known.unwrap_or(ObservedLease {
        version,
        since: now,
    }));
    now.duration_since(observed.since) >= told.clamp(LEASE_DURATION, LONGEST_DURATION)
}

impl Candidate {
    /// A candidate with the rights of `client`.
    pub(crate) fn new(client: Client, election: Election, clock: Clock) -> Self {
        let Election { lease, identity } = election;
        Self {
            leases: Api::namespaced(client.clone(), &lease.namespace),
            client,
            name: lease.name,
            identity,
            clock,
        }
    }

    /// Waits until this replica has the Lease. Returns since when, or `None` when `shutdown` came
    /// first.
    pub(crate) async fn acquire(&self, shutdown: &CancellationToken) -> Option<Instant> {
        let (mut observed, mut failing, mut waiting) = (None, None, false);
        loop {
            if shutdown.is_cancelled() {
                return None;
            }
            let started = Instant::now();
            let attempt = outcome(timeout(TIMEOUT, self.try_acquire(&mut observed)).await);
            if shutdown.is_cancelled() {
                // An attempt without an answer may have taken the Lease, too.
                self.release().await;
                return None;
            }
            match attempt {
                Ok(true) => {
                    info!(lease = self.name, identity = self.identity, "leading");
                    return Some(started);
                }
                Ok(false) => {
                    if !waiting {
                        info!(lease = self.name, identity = self.identity, "standing by");
                    }
                    (failing, waiting) = (None, true);
                }
                Err(cause) => {
                    if is_news(&mut failing, &cause) {
                        warn!(error = cause, "failed to take the Lease; retrying");
                    }
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = sleep(INTERVAL) => {}
            }
        }
    }

    async fn try_acquire(&self, observed: &mut Option<ObservedLease>) -> kube::Result<bool> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            return self.create().await;
        };
        if !may_take(&lease, &self.identity, observed, Instant::now()) {
            return Ok(false);
        }
        lease.spec = Some(self.spec(lease.spec.as_ref()));
        taken(self.replace(&lease).await)
    }

    async fn create(&self) -> kube::Result<bool> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(self.spec(None)),
        };
        taken(self.leases.create(&PostParams::default(), &lease).await)
    }

    /// Publishes that this replica leads.
    pub(crate) async fn announce(&self) {
        let lease = timeout(TIMEOUT, self.leases.get(&self.name)).await;
        if let Ok(Ok(lease)) = lease {
            publish_leader(&self.client, &lease.object_ref(&()), &self.identity).await;
        }
    }

    /// Renews the Lease that the replica has had since `renewed` until `shutdown`, or until the
    /// replica has lost it.
    pub(crate) async fn hold(&self, mut renewed: Instant, shutdown: &CancellationToken) {
        let mut failing = None;
        loop {
            let next = (Instant::now() + INTERVAL).min(renewed + RENEWAL_DEADLINE);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = sleep_until(next) => {}
            }
            let started = Instant::now();
            let deadline = (started + TIMEOUT).min(renewed + RENEWAL_DEADLINE);
            match outcome(timeout_at(deadline, self.renew()).await) {
                Ok(true) => (renewed, failing) = (started, None),
                Ok(false) => {
                    warn!(lease = self.name, "another replica has the Lease; exiting");
                    return;
                }
                Err(cause) => {
                    if is_news(&mut failing, &cause) {
                        warn!(error = cause, "failed to renew the Lease; retrying");
                    }
                }
            }
            if renewed.elapsed() >= RENEWAL_DEADLINE {
                warn!(
                    lease = self.name,
                    "the Lease was not renewed in time; exiting"
                );
                return;
            }
        }
    }

    /// Returns `false` when another replica has the Lease. A Lease that was deleted is created.
    async fn renew(&self) -> kube::Result<bool> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            return self.create().await;
        };
        if !self.is_own(&lease) {
            return Ok(false);
        }
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(MicroTime((self.clock)()));
        }
        self.replace(&lease).await.map(|_| true)
    }

    /// Gives the Lease up, so that another replica takes it at once. After a failure it waits for
    /// [`LEASE_DURATION`].
    pub(crate) async fn release(&self) {
        let release = async {
            let lease = self.leases.get_opt(&self.name).await?;
            let Some(mut lease) = lease.filter(|lease| self.is_own(lease)) else {
                return Ok(());
            };
            if let Some(spec) = &mut lease.spec {
                spec.holder_identity = None;
            }
            self.replace(&lease).await.map(drop)
        };
        if let Err(cause) = outcome(timeout(TIMEOUT, release).await) {
            warn!(error = cause, "failed to give up the Lease");
        }
    }

    /// Whether this replica holds the Lease.
    fn is_own(&self, lease: &Lease) -> bool {
        let spec = lease.spec.as_ref();
        spec.and_then(|spec| spec.holder_identity.as_deref()) == Some(&self.identity)
    }

    /// Replaces the Lease unless it has changed since it was read.
    async fn replace(&self, lease: &Lease) -> kube::Result<Lease> {
        let params = PostParams::default();
        self.leases.replace(&self.name, &params, lease).await
    }

    fn spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime((self.clock)());
        let transitions = before.and_then(|spec| spec.lease_transitions);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(LEASE_DURATION.as_secs() as i32),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions.map_or(0, |count| count.saturating_add(1))),
            ..LeaseSpec::default()
        }
    }
}

/// The result of an attempt, or why it failed.
fn outcome<T>(attempt: Result<kube::Result<T>, Elapsed>) -> Result<T, String> {
    match attempt {
        Ok(answer) => answer.map_err(|error| error_chain(&error)),
        Err(_) => Err("the API server did not answer in time".to_owned()),
    }
}

/// Whether the attempt before failed not at all or for another cause. Records the cause.
fn is_news(failing: &mut Option<String>, cause: &str) -> bool {
    failing.replace(cause.to_owned()).as_deref() != Some(cause)
}

/// Whether a write took the Lease. A conflict means that another replica was faster.
fn taken(written: kube::Result<Lease>) -> kube::Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use bursar_sim_api::SimApiServer;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;

    fn candidate(api: &SimApiServer, identity: &str) -> Candidate {
        let lease = "system/operator".parse().unwrap();
        let identity = identity.to_owned();
        let election = Election { lease, identity };
        Candidate::new(api.client(), election, Timestamp::now)
    }

    fn holder(api: &SimApiServer) -> Value {
        api.get("leases", "system", "operator")["spec"]["holderIdentity"].clone()
    }

    #[tokio::test(start_paused = true)]
    async fn second_replica_waits_until_the_first_gives_up() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        let (first, second) = (candidate(&api, "a"), candidate(&api, "b"));
        let since = first.acquire(&never).await.unwrap();
        let stop = CancellationToken::new();
        let work = async {
            tokio::select! {
                () = first.hold(since, &never) => panic!("the first replica lost the Lease"),
                () = sleep(Duration::from_mins(2)) => {}
            }
            assert_eq!(holder(&api), "a");
            first.release().await;
            Instant::now()
        };
        let (given_up, taken) = tokio::join!(work, second.acquire(&stop));
        assert!(taken.is_some() && given_up.elapsed() <= INTERVAL);
        assert_eq!(holder(&api), "b");
    }

    #[tokio::test(start_paused = true)]
    async fn dead_replicas_lease_is_taken_after_its_duration() {
        for (seconds, duration) in [(None, 15), (Some(3), 15), (Some(60), 60), (Some(-1), 15)] {
            let (api, never) = (SimApiServer::start(), CancellationToken::new());
            candidate(&api, "a").acquire(&never).await.unwrap();
            let mut lease = api.get("leases", "system", "operator");
            lease["spec"]["leaseDurationSeconds"] = json!(seconds);
            api.put("leases", lease);
            let start = Instant::now();
            candidate(&api, "b").acquire(&never).await.unwrap();
            let (took, duration) = (start.elapsed(), Duration::from_secs(duration));
            assert!(
                took >= duration && took <= duration + INTERVAL,
                "{seconds:?}: {took:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn restarted_container_takes_its_pods_lease_at_once() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        candidate(&api, "a").acquire(&never).await.unwrap();
        let start = Instant::now();
        candidate(&api, "a").acquire(&never).await.unwrap();
        assert!(start.elapsed() < INTERVAL);
    }

    #[tokio::test(start_paused = true)]
    async fn holder_stops_before_another_may_take_the_lease() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        let first = candidate(&api, "a");
        let since = first.acquire(&never).await.unwrap();
        api.set_unavailable(true);
        // The answer to the attempt that took the Lease came late.
        sleep(Duration::from_secs(3)).await;
        first.hold(since, &never).await;
        let took = since.elapsed();
        assert!(
            took >= RENEWAL_DEADLINE && took <= RENEWAL_DEADLINE + Duration::from_millis(100),
            "{took:?}"
        );
        assert!(took + GRACE < LEASE_DURATION);
    }

    #[tokio::test(start_paused = true)]
    async fn deleted_lease_is_created_again_by_its_holder() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        let first = candidate(&api, "a");
        let since = first.acquire(&never).await.unwrap();
        api.delete("leases", "system", "operator");
        let held = timeout(Duration::from_mins(1), first.hold(since, &never)).await;
        assert!(held.is_err(), "it leads on");
        assert_eq!(holder(&api), "a");
    }

    #[tokio::test(start_paused = true)]
    async fn lease_taken_while_the_replica_stops_is_given_up() {
        let (api, stop) = (SimApiServer::start(), CancellationToken::new());
        let first = candidate(&api, "a");
        let mut acquired = Box::pin(first.acquire(&stop));
        // The API server has the request when the kubelet tells the replica to stop.
        assert!(futures::poll!(&mut acquired).is_pending());
        stop.cancel();
        assert_eq!(acquired.await, None);
        assert_eq!(holder(&api), Value::Null);
    }

    #[tokio::test(start_paused = true)]
    async fn holder_stops_when_another_has_the_lease() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        let first = candidate(&api, "a");
        let since = first.acquire(&never).await.unwrap();
        let mut lease = api.get("leases", "system", "operator");
        lease["spec"]["holderIdentity"] = json!("b");
        api.put("leases", lease);
        let start = Instant::now();
        first.hold(since, &never).await;
        assert!(start.elapsed() <= INTERVAL + Duration::from_secs(1));
        first.release().await;
        assert_eq!(holder(&api), "b", "a replica gives up only its own Lease");
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_ends_the_wait() {
        let (api, never) = (SimApiServer::start(), CancellationToken::new());
        candidate(&api, "a").acquire(&never).await.unwrap();
        let stop = CancellationToken::new();
        stop.cancel();
        assert_eq!(candidate(&api, "b").acquire(&stop).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn failure_is_news_when_a_timeout_precedes_it() {
        let api = SimApiServer::start();
        api.set_unavailable(true);
        let candidate = candidate(&api, "a");
        let silent = timeout(TIMEOUT, std::future::pending::<kube::Result<bool>>()).await;
        let refused = || async { Ok(candidate.try_acquire(&mut None).await) };
        let mut failing = None;
        for (attempt, expected) in [
            (silent, true),
            (refused().await, true),
            (refused().await, false),
        ] {
            let cause = outcome(attempt).unwrap_err();
            assert_eq!(is_news(&mut failing, &cause), expected, "{cause}");
        }
    }

    #[test]
    fn lease_name_needs_both_parts() {
        assert!("system/operator".parse::<LeaseName>().is_ok());
        for text in ["operator", "/operator", "system/"] {
            let refusal = text.parse::<LeaseName>().unwrap_err().to_string();
            assert!(refusal.contains("write NAMESPACE/NAME"), "{refusal}");
        }
    }
}
