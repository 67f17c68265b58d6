//! Records every state of every pod of a namespace, deleted pods included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use bursar_e2e::pods::PodState;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt};
use libtest_mimic::Failed;
use tokio::task::JoinHandle;

/// A running watch, which ends when this value is dropped.
pub(crate) struct PodHistory {
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
}

impl PodRecord {
    fn observe(&mut self, pod: &Pod) {
        let state = PodState::of(pod);
        let status = pod.status.clone().unwrap_or_default();
        self.name = pod.name_any();
        self.ran |= state.running;
        let containers = status.container_statuses.unwrap_or_default();
        let codes: Vec<i32> = containers.iter().filter_map(exit_code).collect();
        if state.phase == "Failed" && !is_killed_by_its_deletion(pod, &codes) {
            let reason = status.reason.unwrap_or_default();
            let message = status.message.unwrap_or_default();
            let said: Vec<String> = containers.iter().filter_map(termination_message).collect();
            self.failed = Some(format!(
                "{reason} {message} {}, exit codes {codes:?}, {said:?}",
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
    /// Starts to watch the pods of `namespace`.
    pub(crate) fn of(client: &Client, namespace: &str) -> Self {
        let records = Arc::default();
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let watch = tokio::spawn(watch(api, Arc::clone(&records)));
        Self { records, watch }
    }

    /// Returns the record of every pod.
    pub(crate) fn records(&self) -> Vec<PodRecord> {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.values().cloned().collect()
    }

    /// Fails if a pod was ever Failed, or a container was started twice.
    ///
    /// # Errors
    /// Names the pods with their records.
    pub(crate) fn check_none_failed_or_restarted(&self) -> Result<(), Failed> {
        let restarted = |record: &PodRecord| record.containers.values().any(|ids| ids.len() > 1);
        let bad = |record: &PodRecord| record.failed.is_some() || restarted(record);
        let bad: Vec<PodRecord> = self.records().into_iter().filter(bad).collect();
        if bad.is_empty() {
            return Ok(());
        }
        Err(format!("Failed or restarted pods: {bad:#?}").into())
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

impl Drop for PodHistory {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

async fn watch(api: Api<Pod>, records: Arc<Mutex<BTreeMap<String, PodRecord>>>) {
    let events = watcher::watcher(api, watcher::Config::default());
    let mut events = Box::pin(events.default_backoff());
    while let Some(event) = events.next().await {
        if let Ok(Event::Apply(pod) | Event::InitApply(pod) | Event::Delete(pod)) = event {
            let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
            let uid = pod.uid().unwrap_or_default();
            records.entry(uid).or_default().observe(&pod);
        }
    }
}
