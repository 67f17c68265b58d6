//! Evicts the pods of faults in namespaces without a budget.
//!
//! ```text
//!   faults, pods --> index --> plan (pure) --> Event on the pod --> eviction
//! ```
//!
//! No budget's status can record such an eviction. So the operator publishes the pod's Event with
//! the reason before it requests the eviction. It evicts no pod whose Event was refused.
//! The eviction has the pod's UID as a precondition: a second operator evicts no other pod.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::plan::plan_without_budget;
use super::state::BudgetState;
use super::{BudgetInputs, PodEviction, Step};
use crate::api::error::ApiError;
use crate::api::events::announce_eviction;
use crate::api::job_disruption;
use crate::api::write::{ApiWriter, EvictionResult};
use crate::cluster::ClusterIndex;

/// The interval between two plans, and so the delay before a refused or failed eviction is retried.
const INTERVAL: Duration = Duration::from_secs(2);

/// Runs until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    let mut states = BTreeMap::<String, BudgetState>::new();
    while shutdown
        .run_until_cancelled(sleep(INTERVAL))
        .await
        .is_some()
    {
        let now = Instant::now();
        let Some(affected) = index.borrow().inputs_without_budget() else {
            continue;
        };
        states.retain(|namespace, _| affected.iter().any(|(affected, _)| affected == namespace));
        for (namespace, inputs) in affected {
            let state = states.entry(namespace.clone()).or_default();
            for step in steps(state, inputs, now) {
                // A shutdown ends the round after the current write.
                if shutdown.is_cancelled() {
                    return;
                }
                match step {
                    Step::Evict { pod, by_force } => {
                        evict(&writer, state, &namespace, &pod, by_force).await;
                    }
                    Step::ReadJob(job) => {
                        let client = writer.client();
                        let answer =
                            job_disruption::ignores_disruption(client, &namespace, &job).await;
                        state.record_job(job, answer);
                    }
                    // Only a budget has these.
                    Step::ApplyQuota(..) | Step::LabelNamespace | Step::ApplyStatus(_) => {}
                }
            }
        }
    }
}

/// The due steps in a namespace.
fn steps(state: &mut BudgetState, mut inputs: BudgetInputs, now: Instant) -> Vec<Step> {
    state.recall_evictions(&mut inputs, now);
    plan_without_budget(&inputs).steps
}

/// Evicts a pod. After a failure the next round evicts the pod again. Other evictions do not wait
/// for it.
async fn evict(
    writer: &ApiWriter,
    state: &mut BudgetState,
    namespace: &str,
    pod: &PodEviction,
    by_force: bool,
) {
    let now = Instant::now();
    if state.was_evicted(&pod.uid, now) {
        return;
    }
    let answer = announced_eviction(writer, state, namespace, pod, by_force).await;
    state.record_eviction(&pod.uid, &answer, now);
}

/// Publishes the pod's Event unless that is done, and requests the eviction.
async fn announced_eviction(
    writer: &ApiWriter,
    state: &mut BudgetState,
    namespace: &str,
    pod: &PodEviction,
    by_force: bool,
) -> Result<EvictionResult, ApiError> {
    if !state.is_announced(&pod.uid) {
        let subject = (namespace, &*pod.pod, &*pod.uid);
        announce_eviction(writer.client(), subject, pod.reason, &pod.message).await?;
        state.record_announcement(&pod.uid);
    }
    writer.evict(namespace, &pod.pod, &pod.uid, by_force).await
}
