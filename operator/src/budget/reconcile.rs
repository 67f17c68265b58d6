//! Reconciles one budget: plans its steps and applies them.
//!
//! ```text
//!   budget --> plan (pure) --> empty: no write
//!                          \--> excess pods: re-list, plan again, evict only pods in both plans
//!                          \--> steps, one after another --> ok
//!                                                       \--> failed: retry after 1, 2, 4 ... 30 s
//!                                                            (a failed status ends the steps)
//! ```

mod steps;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_crds::GpuMemoryBudget;
use futures::{Stream, StreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::controller::{Action, Config, Error as ControllerError, applier};
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::state::BudgetState;
use crate::api::error::ApiError;
use crate::api::read;
use crate::api::write::ApiWriter;
use crate::budget::{BudgetInputs, plan};
use crate::clock::Clock;
use crate::cluster::{ClusterIndex, Key};
use crate::error::error_chain;
use crate::serve::metrics::{Metrics, ReconcileOutcome};

/// How many budgets are reconciled at a time.
const CONCURRENCY: u16 = 8;

/// The longest time between two reconciles of a budget.
const RESYNC_PERIOD: Duration = Duration::from_hours(1);

/// Reconciles budgets.
pub struct Reconciler {
    writer: ApiWriter,
    index: watch::Receiver<ClusterIndex>,
    metrics: Metrics,
    clock: Clock,
    states: Mutex<BTreeMap<Key, BudgetState>>,
}

impl Reconciler {
    /// A reconciler over `index`.
    pub fn new(
        writer: ApiWriter,
        index: watch::Receiver<ClusterIndex>,
        metrics: Metrics,
        clock: Clock,
    ) -> Self {
        Self {
            writer,
            index,
            metrics,
            clock,
            states: Mutex::default(),
        }
    }

    /// Reconciles each budget of `work` until `work` ends, and finishes what has begun.
    pub async fn run(
        self,
        budgets: Store<GpuMemoryBudget>,
        work: impl Stream<Item = ObjectRef<GpuMemoryBudget>> + Send + 'static,
    ) {
        let work = work.map(Ok::<_, Infallible>);
        let config = Config::default().concurrency(CONCURRENCY);
        let reconcile = |budget, reconciler: Arc<Self>| {
            Box::pin(async move { reconciler.reconcile(budget).await })
        };
        let retry = |budget: Arc<GpuMemoryBudget>, error: &ApiError, reconciler: Arc<Self>| {
            Action::requeue(reconciler.failed(&budget, error))
        };
        applier(reconcile, retry, Arc::new(self), budgets, work, config)
            .for_each(|result| {
                // A deleted budget needs nothing, and a failed write is logged already.
                if let Err(ControllerError::RunnerError(failure)) = result {
                    error!(error = %error_chain(&failure), "budget reconciler stopped");
                }
                ready(())
            })
            .await;
    }

    async fn reconcile(&self, budget: Arc<GpuMemoryBudget>) -> Result<Action, ApiError> {
        let start = Instant::now();
        let key = Key::of(&*budget);
        let mut current = GpuMemoryBudget::clone(&budget);
        let (mut inputs, list) = self.read_index(&budget);
        let recalled = self.with_state(&key, |state| {
            state.recall(&mut current, &mut inputs, list, start)
        });
        if let Err(wait) = recalled {
            return Ok(Action::requeue(wait));
        }
        let now = Time((self.clock)());
        let mut plan = plan(&current, &inputs, &now);
        if plan.evicts_excess() {
            let inputs = self.refresh_pods(&key.namespace, inputs.clone()).await;
            plan.retain_excess_in(&self::plan(&current, &inputs, &now));
        }
        let outcome = if plan.steps.is_empty() {
            ReconcileOutcome::Unchanged
        } else {
            ReconcileOutcome::Written
        };
        let mut first_failure = None;
        for step in plan.steps {
            let blocks = step.blocks_later_steps();
            let applied = self.apply_step(&key, &budget, &current, &inputs, step);
            match applied.await {
                Err(error) if blocks => return Err(error),
                Err(error) => first_failure = first_failure.or(Some(error)),
                Ok(()) => {}
            }
        }
        self.with_state(&key, |state| {
            state.record_failed_step(first_failure.as_ref());
        });
        if let Some(error) = first_failure {
            return Err(error);
        }
        self.metrics.record_reconcile(outcome, start.elapsed());
        self.succeeded(&key);
        Ok(Action::requeue(plan.requeue_after.unwrap_or(RESYNC_PERIOD)))
    }

    /// The index's inputs for the budget, and the number of the list that the budget is from.
    fn read_index(&self, budget: &GpuMemoryBudget) -> (BudgetInputs, u64) {
        let index = self.index.borrow();
        let namespace = budget.metadata.namespace.as_deref().unwrap_or_default();
        let inputs = index.budget_inputs(namespace, &budget.spec.cohort);
        (inputs, index.budget_lists())
    }

    /// The inputs with the namespace's pods as the API server has them now, because a watch may
    /// have been silent for minutes. After a failed read there are no pods, and so no excess.
    async fn refresh_pods(&self, namespace: &str, mut inputs: BudgetInputs) -> BudgetInputs {
        let pods =
            read::list_requesting_pods(self.writer.client(), namespace, inputs.quantum).await;
        inputs.pods = pods.unwrap_or_else(|error| {
            warn!(error = %error_chain(&error), "failed to list pods; evicting no excess pods");
            Vec::new()
        });
        inputs
    }

    fn succeeded(&self, key: &Key) {
        let failures = self
            .lock_states()
            .get_mut(key)
            .map_or(0, BudgetState::record_success);
        if failures > 0 {
            info!(
                namespace = key.namespace,
                failures, "budget reconciled again"
            );
        }
    }

    fn with_state<T>(&self, key: &Key, update: impl FnOnce(&mut BudgetState) -> T) -> T {
        update(self.lock_states().entry(key.clone()).or_default())
    }

    fn failed(&self, budget: &GpuMemoryBudget, error: &ApiError) -> Duration {
        self.metrics.record_reconcile_failure();
        let mut states = self.lock_states();
        let state = states.entry(Key::of(budget)).or_default();
        let (first, wait) = state.record_failure(error.object(), Instant::now());
        if first {
            warn!(error = %error_chain(error), "failed to reconcile a budget; retrying");
        }
        wait
    }

    fn lock_states(&self) -> MutexGuard<'_, BTreeMap<Key, BudgetState>> {
        // Each change of the map is one step, so a panic leaves it whole.
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
