//! Records every state of every pod of a namespace, deleted pods included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bursar_e2e::pods::{PodState, Pods};
use bursar_e2e::wait::{self, Poll};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use libtest_mimic::Failed;
use tokio::task::JoinHandle;

use crate::shared_cluster::START_TIMEOUT;

const PAUSE: Duration = Duration::from_millis(100);

/// A running watch, which ends when this value is dropped.
pub(crate) struct PodHistory {
    pods: Pods,
    /// The number of pods that were created before the watch began.
    earlier: usize,
    records: Arc<Mutex<BTreeMap<String, PodRecord>>>,
    watch: JoinHandle<()>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct PodRecord {
    /// The pod's name.
    pub(crate) name: String,
    /// The message of the pod's status when it was Failed.
    pub(crate) failed: Option<String>,
    /// The runtime's ids of each container that ran, by container name. More than one id is a
    /// restart.
    pub(crate) containers: BTreeMap<String, BTreeSet<String>>,
    /// Whether the pod ever ran.
    pub(crate) ran: bool,
    /// A description of the last state.
    pub(crate) last_state: String,
    /// The resource version of the last state.
    version: Option<String>,
    /// Whether the API server has deleted the pod.
    deleted: bool,
}

impl PodRecord {
    fn observe(&mut self, pod: &Pod) {
        let state = PodState::of(pod);
        let status = pod.status.clone().unwrap_or_default();
        self.name = pod.name_any();
        self.version = pod.resource_version();
        self.ran |= state.running;
        let containers = status.container_statuses.unwrap_or_default();
        let codes: Vec<i32> = containers.iter().filter_map(exit_code).collect();
        if state.phase == "Failed" && !is_killed_by_its_deletion(pod, &codes) {
            let reason = status.reason.unwrap_or_default();
            let message = status.message.unwrap_or_default();
            let termination_messages: Vec<String> =
                containers.iter().filter_map(termination_message).collect();
            self.failed = Some(format!(
                "{reason} {message} {}, exit codes {codes:?}, {termination_messages:?}",
                state.waiting_reason
            ));
        }
        let inits = status.init_container_statuses.unwrap_or_default();
        for container in containers.into_iter().chain(inits) {
            let ids = self.containers.entry(container.name).or_default();
            ids.extend(container.container_id);
        }
        let gone = if pod.metadata.deletion_timestamp.is_some() {
            ", being deleted"
        } else {
            ""
        };
        self.last_state = format!(
            "{} {}, {} restarts{gone}",
            state.phase, state.waiting_reason, state.restarts
        );
    }
}

fn termination_message(container: &ContainerStatus) -> Option<String> {
    container
        .state
        .as_ref()?
        .terminated
        .as_ref()?
        .message
        .clone()
}

fn exit_code(container: &ContainerStatus) -> Option<i32> {
    let terminated = container.state.as_ref()?.terminated.as_ref()?;
    Some(terminated.exit_code)
}

/// Returns whether a Failed pod was killed by its deletion. A program too young to handle SIGTERM
/// ends by SIGKILL, or with the exit code of Go programs while runc still sets up its container.
fn is_killed_by_its_deletion(pod: &Pod, codes: &[i32]) -> bool {
    const SIGKILL: i32 = 128 + 9;
    const GO: i32 = 2;
    let deleted = pod.metadata.deletion_timestamp.is_some();
    deleted && !codes.is_empty() && codes.iter().all(|code| [0, SIGKILL, GO].contains(code))
}

impl PodHistory {
    /// Starts to watch all pods of the namespace.
    pub(crate) fn of(pods: &Pods) -> Self {
        let records = Arc::default();
        let watch = tokio::spawn(watch(pods.api(), Arc::clone(&records)));
        Self {
            pods: pods.clone(),
            earlier: pods.created().len(),
            records,
            watch,
        }
    }

    /// Returns the record of every pod.
    pub(crate) fn records(&self) -> Vec<PodRecord> {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.values().cloned().collect()
    }

    /// Fails if a pod was ever Failed, or a container was started twice.
    ///
    /// # Errors
    /// Names the pods with their records, or those whose history is incomplete.
    pub(crate) async fn check_none_failed_or_restarted(&self) -> Result<(), Failed> {
        self.wait_until_complete().await?;
        let restarted = |record: &PodRecord| record.containers.values().any(|ids| ids.len() > 1);
        let bad = |record: &PodRecord| record.failed.is_some() || restarted(record);
        let bad: Vec<PodRecord> = self.records().into_iter().filter(bad).collect();
        if bad.is_empty() {
            return Ok(());
        }
        Err(format!("Failed or restarted pods: {bad:#?}").into())
    }

    /// Drops the failures of the deleted pods with this name, which the trial has judged itself.
    ///
    /// # Errors
    /// When the history is incomplete.
    pub(crate) async fn forgive(&self, name: &str) -> Result<(), Failed> {
        self.wait_until_complete().await?;
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        for record in records.values_mut() {
            record
                .failed
                .take_if(|_| record.name == name && record.deleted);
        }
        Ok(())
    }

    /// Waits until the watch has reported the present state of every created pod, or its end.
    async fn wait_until_complete(&self) -> Result<(), Failed> {
        let poll = async || match self.pods.list().await {
            Ok(listed) => {
                let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
                let created = self.pods.created().into_iter().skip(self.earlier);
                let late = |uid: &String| is_late(records.get(uid), uid, &listed);
                match created.filter(late).collect::<Vec<_>>() {
                    late if late.is_empty() => Poll::Ready(()),
                    late => Poll::Pending(format!("the watch is late for {late:?}")),
                }
            }
            Err(error) => Poll::Pending(error.to_string()),
        };
        let what = "the whole history of the trial's pods";
        Ok(wait::poll_until(what, START_TIMEOUT, PAUSE, poll).await?)
    }

    /// Formats a line for each pod.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for record in self.records() {
            let failed = record.failed.map(|why| format!("; was Failed: {why}"));
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{}: {}{}",
                record.name,
                record.last_state,
                failed.unwrap_or_default()
            );
        }
        text
    }
}

/// Returns whether a pod's record lacks the state in a list of the present pods, or the pod's end.
fn is_late(record: Option<&PodRecord>, uid: &str, listed: &[Pod]) -> bool {
    let present = listed.iter().find(|pod| pod.uid().as_deref() == Some(uid));
    record.is_none_or(|record| match present {
        Some(pod) => record.version != pod.resource_version(),
        None => !record.deleted,
    })
}

impl Drop for PodHistory {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

async fn watch(api: Api<Pod>, records: Arc<Mutex<BTreeMap<String, PodRecord>>>) {
    let events = watcher::watcher(api, watcher::Config::default());
    let mut events = Box::pin(events.default_backoff());
    while let Some(event) = events.next().await {
        let (pod, deleted) = match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => (pod, false),
            Ok(Event::Delete(pod)) => (pod, true),
            // The watch resumes; an event that it has lost makes the history incomplete.
            Ok(Event::Init | Event::InitDone) | Err(_) => continue,
        };
        let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.entry(pod.uid().unwrap_or_default()).or_default();
        record.observe(&pod);
        record.deleted = deleted;
    }
}
