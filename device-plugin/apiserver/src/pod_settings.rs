//! Waits for what the operator writes of a pod into the spec of the node's `GpuNode`.
//!
//! The agent asks the API server for no pod. The operator writes a pod's settings when the
//! scheduler has bound the pod, while the kubelet creates its sandbox. So the settings are usually
//! there when the kubelet calls PreStartContainer.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bursar_crds::gpu_node::PodSettings;
use bursar_ledger::units::PodUid;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::ParsedSpec;

/// How long a pod waits for its settings while the operator is silent.
pub const SILENT_WAIT: Duration = Duration::from_secs(3);

/// The pods of a spec by UID.
pub(crate) type PodsByUid = Arc<BTreeMap<String, PodSettings>>;

/// Reads the settings of pods. Clones share what is known of the operator.
#[derive(Clone, Debug)]
pub struct PodSettingsReader {
    /// None without an API server.
    spec: Option<watch::Receiver<Option<ParsedSpec>>>,
    /// The pods in the spec at the end of the last wait without an answer. The operator counts as
    /// silent until it writes other pods. The agent looks at no time of a write, because it would
    /// compare the clocks of two machines.
    unanswered: Arc<Mutex<Option<PodsByUid>>>,
}

impl PodSettingsReader {
    /// A reader of the node's `spec`; none without an API server.
    pub fn new(spec: Option<watch::Receiver<Option<ParsedSpec>>>) -> Self {
        Self {
            spec,
            unanswered: Arc::default(),
        }
    }

    /// Whether there is an API server, and so an operator to wait for.
    pub fn has_api_server(&self) -> bool {
        self.spec.is_some()
    }

    /// Waits for the settings of `pod`: for `limit`, or shortly while the operator is silent.
    /// Returns `None` after that, and at once without an API server.
    pub async fn read(&self, pod: &PodUid, limit: Duration) -> Option<PodSettings> {
        let mut spec = self.spec.clone()?;
        let started = Instant::now();
        loop {
            let pods = pods_of(&spec.borrow_and_update());
            if let Some(settings) = pods.as_ref().and_then(|pods| pods.get(pod.as_str())) {
                return Some(settings.clone());
            }
            let wait = match self.is_silent(pods.as_ref()) {
                true => limit.min(SILENT_WAIT),
                false => limit,
            };
            if timeout_at(started + wait, changed(&mut spec))
                .await
                .is_err()
            {
                *self.unanswered() = pods;
                return None;
            }
        }
    }

    /// Returns once the operator has passed on the deletion of `pod`, or has removed the pod.
    pub async fn wait_for_deletion(&self, pod: &PodUid) {
        let Some(mut spec) = self.spec.clone() else {
            return pending().await;
        };
        let mut was_there = false;
        loop {
            if let Some(pods) = pods_of(&spec.borrow_and_update()) {
                match pods.get(pod.as_str()) {
                    Some(settings) if settings.deletion_grace().is_none() => was_there = true,
                    None if !was_there => {}
                    Some(_) | None => return,
                }
            }
            changed(&mut spec).await;
        }
    }

    /// Whether nothing shows that the operator writes. While the agent has not read the object, a
    /// short wait is enough, because the agent reads it within that time.
    fn is_silent(&self, pods: Option<&PodsByUid>) -> bool {
        pods.is_none() || self.unanswered().as_ref() == pods
    }

    fn unanswered(&self) -> std::sync::MutexGuard<'_, Option<PodsByUid>> {
        self.unanswered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pods of a spec; `None` where the agent has read no object, or the object was deleted.
fn pods_of(spec: &Option<ParsedSpec>) -> Option<PodsByUid> {
    let spec = spec.as_ref()?;
    spec.generation.is_some().then(|| spec.pods.clone())
}

/// Waits for a change. The sender ends only with the agent.
async fn changed(spec: &mut watch::Receiver<Option<ParsedSpec>>) {
    if spec.changed().await.is_err() {
        pending().await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(26);

    fn pod() -> PodUid {
        "a".parse().unwrap()
    }

    fn settings(uid: &str) -> PodSettings {
        let annotations = [("bursar.dev/gpus".to_owned(), "2".to_owned())];
        PodSettings::new(uid.to_owned(), 5, &annotations.into())
    }

    fn spec(pods: &[PodSettings]) -> Option<ParsedSpec> {
        let by_uid = pods.iter().map(|pod| (pod.pod_uid.clone(), pod.clone()));
        Some(ParsedSpec {
            generation: Some(1),
            pods: Arc::new(by_uid.collect()),
            ..ParsedSpec::default()
        })
    }

    fn reader(pods: &[PodSettings]) -> (watch::Sender<Option<ParsedSpec>>, PodSettingsReader) {
        let (sender, spec) = watch::channel(spec(pods));
        (sender, PodSettingsReader::new(Some(spec)))
    }

    #[tokio::test(start_paused = true)]
    async fn settings_that_are_there_are_read_at_once() {
        let (_operator, reader) = reader(&[settings("a")]);
        let started = Instant::now();
        assert_eq!(reader.read(&pod(), LIMIT).await, Some(settings("a")));
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn pod_without_an_api_server_waits_for_nothing() {
        let started = Instant::now();
        assert_eq!(PodSettingsReader::new(None).read(&pod(), LIMIT).await, None);
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn late_operator_is_waited_for_by_500_pods() {
        let (operator, reader) = reader(&[]);
        let uids: Vec<String> = (0..500).map(|index| format!("pod-{index}")).collect();
        let waits = uids.iter().map(|uid| {
            let (reader, uid) = (reader.clone(), uid.parse().unwrap());
            tokio::spawn(async move { reader.read(&uid, LIMIT).await })
        });
        let waits: Vec<_> = waits.collect();
        // The operator writes in pieces, the last one shortly before the end.
        for told in [1, 200, 500] {
            sleep(Duration::from_secs(8)).await;
            let told: Vec<_> = uids[..told].iter().map(|uid| settings(uid)).collect();
            operator.send_replace(spec(&told));
        }
        for (uid, wait) in uids.iter().zip(waits) {
            let settings = wait.await.unwrap().expect(uid);
            assert_eq!(settings.min_gpus().get(), 2, "{uid}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_operator_delays_later_pods_for_3_s() {
        let (operator, reader) = reader(&[]);
        let waited = async || {
            let started = Instant::now();
            assert_eq!(reader.read(&pod(), LIMIT).await, None);
            started.elapsed()
        };
        assert_eq!(waited().await, LIMIT, "nothing is known of the operator");
        assert_eq!(waited().await, SILENT_WAIT);
        operator.send_replace(spec(&[settings("b")]));
        assert_eq!(waited().await, LIMIT, "the operator writes again");
    }

    #[tokio::test(start_paused = true)]
    async fn agent_that_has_read_no_object_waits_for_3_s() {
        let (operator, spec_of_none) = watch::channel(None);
        let reader = PodSettingsReader::new(Some(spec_of_none));
        let started = Instant::now();
        assert_eq!(reader.read(&pod(), LIMIT).await, None);
        assert_eq!(started.elapsed(), SILENT_WAIT);
        let pod = pod();
        let read = reader.read(&pod, LIMIT);
        let object = async {
            sleep(Duration::from_secs(1)).await;
            operator.send_replace(spec(&[]));
            sleep(Duration::from_secs(10)).await;
            operator.send_replace(spec(&[settings("a")]));
        };
        let (read, ()) = tokio::join!(read, object);
        assert_eq!(read, Some(settings("a")), "the wait is longer once it has");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_with_the_deletion_of_its_pod_alone() {
        let deleted = |uid| PodSettings {
            deletion_grace_seconds: Some(30),
            ..settings(uid)
        };
        for end in [vec![deleted("a"), settings("b")], vec![settings("b")]] {
            let (operator, reader) = reader(&[settings("a")]);
            let started = Instant::now();
            let writes = async {
                sleep(Duration::from_secs(1)).await;
                operator.send_replace(spec(&[settings("a"), deleted("b")]));
                // A deleted GpuNode says nothing of its pods.
                sleep(Duration::from_secs(1)).await;
                operator.send_replace(Some(ParsedSpec::default()));
                sleep(Duration::from_secs(1)).await;
                operator.send_replace(spec(&end));
            };
            let pod = pod();
            tokio::join!(reader.wait_for_deletion(&pod), writes);
            assert_eq!(started.elapsed(), Duration::from_secs(3));
        }
    }
}
