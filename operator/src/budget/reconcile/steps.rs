//! Applies the steps of a plan for one budget.

use bursar_crds::resources::ENFORCED;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use tokio::time::Instant;

use super::Reconciler;
use crate::api::error::ApiError;
use crate::api::events::{publish_eviction, publish_transitions};
use crate::api::job_disruption;
use crate::api::write::EvictionResult;
use crate::budget::{BudgetInputs, ObservedQuota, PodEviction, QuotaKind, QuotaSpec, Step};
use crate::cluster::Key;

impl Reconciler {
    /// Applies one step. `budget` comes from the watch; `current` has the last written status.
    pub(super) async fn apply_step(
        &self,
        key: &Key,
        budget: &GpuMemoryBudget,
        current: &GpuMemoryBudget,
        inputs: &BudgetInputs,
        step: Step,
    ) -> Result<(), ApiError> {
        let namespace = key.namespace.as_str();
        match step {
            Step::ApplyQuota(kind, desired) => {
                let observed = inputs.quota(kind);
                self.apply_quota(budget, namespace, (kind, desired), observed)
                    .await
            }
            Step::LabelNamespace => self.writer.label_namespace(namespace, Some(ENFORCED)).await,
            Step::ReadJob(job) => {
                let client = self.writer.client();
                let answer = job_disruption::ignores_disruption(client, namespace, &job).await;
                self.with_state(key, |state| state.record_job(job, answer));
                Ok(())
            }
            Step::Evict { pod, by_force } => {
                self.evict(key, &pod, by_force).await;
                Ok(())
            }
            Step::ApplyStatus(desired) => self.apply_status(key, budget, current, &desired).await,
        }
    }

    /// Applies a quota. Deletes first a quota that no write can change to the desired one.
    async fn apply_quota(
        &self,
        budget: &GpuMemoryBudget,
        namespace: &str,
        (kind, desired): (QuotaKind, QuotaSpec),
        observed: Option<&ObservedQuota>,
    ) -> Result<(), ApiError> {
        let name = kind.name();
        if let Some(wrong) = observed.filter(|observed| desired.needs_replacement(observed)) {
            self.writer
                .delete_quota(namespace, name, &wrong.uid)
                .await?;
        }
        let patch = desired.patch(kind, namespace, budget, observed);
        self.writer.apply_quota(namespace, name, &patch).await
    }

    /// Evicts a pod. After a failure the next reconcile evicts the pod again. Other steps do not
    /// wait for it.
    async fn evict(&self, key: &Key, pod: &PodEviction, by_force: bool) {
        let namespace = &key.namespace;
        let now = Instant::now();
        if self.with_state(key, |state| state.was_evicted(&pod.uid, now)) {
            return;
        }
        let evict = self.writer.evict(namespace, &pod.pod, &pod.uid, by_force);
        let answer = evict.await;
        self.with_state(key, |state| state.record_eviction(&pod.uid, &answer, now));
        // The API server may have evicted the pod although its answer did not come. The next
        // reconcile then finds no pod, and publishes nothing.
        let may_be_evicted = match &answer {
            Ok(result) => *result == EvictionResult::Accepted,
            Err(error) => error.has_unknown_effect(),
        };
        if may_be_evicted && !self.with_state(key, |state| state.is_announced(&pod.uid)) {
            let subject = (namespace.as_str(), &*pod.pod, &*pod.uid);
            let client = self.writer.client();
            if publish_eviction(client, subject, pod.reason, &pod.message).await {
                self.with_state(key, |state| state.record_announcement(&pod.uid));
            }
        }
    }

    /// Applies a status, and publishes which conditions of `current` it changes.
    async fn apply_status(
        &self,
        key: &Key,
        budget: &GpuMemoryBudget,
        current: &GpuMemoryBudget,
        desired: &GpuMemoryBudgetStatus,
    ) -> Result<(), ApiError> {
        if let Some(written) = self.writer.apply_status(budget, desired).await? {
            let before = current.status.as_ref();
            self.record_status(key, budget, written.clone());
            publish_transitions(self.writer.client(), budget, before, &written).await;
        }
        Ok(())
    }

    /// Stores the written status, and drops the state of deleted budgets.
    fn record_status(&self, key: &Key, budget: &GpuMemoryBudget, status: GpuMemoryBudgetStatus) {
        let mut states = self.lock_states();
        let index = self.index.borrow();
        states.retain(|key, _| index.has_budget(key));
        states
            .entry(key.clone())
            .or_default()
            .record_status(budget, index.budget_lists(), status);
    }
}
