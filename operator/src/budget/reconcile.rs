//! Does what a budget's plan says, and tells what changed.
//!
//! ```text
//!   a budget to look at --> plan (pure) --> empty: nothing
//!                                       \--> ends surplus pods: all are listed, and who goes by a plan of that list too goes
//!                                       \--> its steps, one after another --> ok
//!                                                                         \--> one failed: again after 1, 2, 4 ... 30 s
//! ```

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_crds::resources::ENFORCED;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use futures::{Stream, StreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::controller::{Action, Config, Error as ControllerError, applier};
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use crate::api::job_disruption;
use crate::api::read;
use crate::api::write::{Evicted, WriteError, Writer};
use crate::budget::Facts;
use crate::budget::{Step, is_exceeded, plan};
use crate::cluster::{Key, World};
use crate::error::chain;
use crate::run::Clock;
use crate::serve::metrics::{Metrics, Outcome};

use super::state::Memory;
use crate::api::events::{tell, tell_pod};

/// How many budgets are worked on at a time.
const CONCURRENCY: u16 = 8;

/// A budget is looked at this often even if no watch says a thing.
const AT_LEAST_EVERY: Duration = Duration::from_hours(1);

/// Keeps budgets as they are declared.
pub struct Reconciler {
    writer: Writer,
    world: watch::Receiver<World>,
    metrics: Metrics,
    clock: Clock,
    memories: Mutex<BTreeMap<Key, Memory>>,
}

impl Reconciler {
    /// A reconciler by what `world` says.
    pub fn new(
        writer: Writer,
        world: watch::Receiver<World>,
        metrics: Metrics,
        clock: Clock,
    ) -> Self {
        Self {
            writer,
            world,
            metrics,
            clock,
            memories: Mutex::default(),
        }
    }

    /// Looks at each budget of `work`, until `work` ends and what was begun is done.
    pub async fn run(
        self,
        budgets: Store<GpuMemoryBudget>,
        work: impl Stream<Item = ObjectRef<GpuMemoryBudget>> + Send + 'static,
    ) {
        let work = work.map(Ok::<_, Infallible>);
        let config = Config::default().concurrency(CONCURRENCY);
        let look =
            |budget, reconciler: Arc<Self>| Box::pin(async move { reconciler.look(budget).await });
        let retry = |budget: Arc<GpuMemoryBudget>, why: &WriteError, reconciler: Arc<Self>| {
            Action::requeue(reconciler.failed(&budget, why))
        };
        applier(look, retry, Arc::new(self), budgets, work, config)
            .for_each(|result| {
                // A budget that is gone needs nothing; a failed write has been told of already.
                if let Err(ControllerError::RunnerError(failure)) = result {
                    error!(error = %chain(&failure), "the budgets are not watched any more");
                }
                ready(())
            })
            .await;
    }

    async fn look(&self, budget: Arc<GpuMemoryBudget>) -> Result<Action, WriteError> {
        let start = Instant::now();
        let key = Key::of(&*budget);
        let held_back = |memory: &Memory| memory.held_back(start);
        if let Some(wait) = self.memories().get(&key).and_then(held_back) {
            return Ok(Action::requeue(wait));
        }
        let current = self.newest(&key, &budget);
        let mut facts = self
            .world
            .borrow()
            .facts(&key.namespace, &budget.spec.cohort);
        facts.jobs = self.memory(&key, |memory| memory.jobs(&facts.pods));
        facts.refused = self.memory(&key, |memory| memory.refused(start));
        self.memory(&key, |memory| {
            memory.see_faults(&mut facts.sufferers, start)
        });
        facts.exceeded_for = self.memory(&key, |memory| {
            memory.exceeded_for(is_exceeded(&current), start)
        });
        let now = Time((self.clock)());
        let mut plan = plan(&current, &facts, &now);
        if plan.repairs() {
            let facts = self.read_again(&key.namespace, facts.clone()).await;
            plan.repair_only_by(&self::plan(&current, &facts, &now));
        }
        let outcome = if plan.steps.is_empty() {
            Outcome::Unchanged
        } else {
            Outcome::Written
        };
        for step in plan.steps {
            self.take(&key, &budget, &current, &facts, step).await?;
        }
        self.metrics.looked(outcome, start.elapsed());
        self.succeeded(&key);
        Ok(Action::requeue(plan.again.unwrap_or(AT_LEAST_EVERY)))
    }

    /// The facts with the pods that the namespace has now: a watch may have been silent for minutes. Where nobody says
    /// which, there are none to go beyond the budget.
    async fn read_again(&self, namespace: &str, mut facts: Facts) -> Facts {
        let pods = read::asking(self.writer.client(), namespace, facts.quantum).await;
        facts.pods = pods.unwrap_or_else(|why| {
            warn!(error = %chain(&why), "trying on");
            Vec::new()
        });
        facts
    }

    /// One step: `budget` is as the watch told, `current` has the status that was written last.
    async fn take(
        &self,
        key: &Key,
        budget: &GpuMemoryBudget,
        current: &GpuMemoryBudget,
        facts: &Facts,
        step: Step,
    ) -> Result<(), WriteError> {
        let Key { namespace, .. } = key;
        match step {
            Step::Quota(which, cap) => {
                let (name, there) = (which.name(), facts.quota(which));
                if let Some(wrong) = there.filter(|there| cap.has_to_replace(there)) {
                    self.writer
                        .delete_quota(namespace, name, &wrong.uid)
                        .await?;
                }
                let patch = cap.patch(which, namespace, budget, there);
                self.writer.quota(namespace, name, &patch).await
            }
            Step::Label => self.writer.label(namespace, Some(ENFORCED)).await,
            Step::LookAtJob(job) => {
                match job_disruption::lets_go(self.writer.client(), namespace, &job).await {
                    Ok(lets_go) => self.memory(key, |memory| memory.looked_at(job, lets_go)),
                    // It is asked again with the next look.
                    Err(why) => debug!(error = %chain(&why), "trying on"),
                }
                Ok(())
            }
            Step::Evict { pod, by_force } => {
                let now = Instant::now();
                if self.memory(key, |memory| memory.has_ended(&pod.uid, now)) {
                    return Ok(());
                }
                let evict = self.writer.evict(namespace, &pod.pod, &pod.uid, by_force);
                let evicted = evict.await;
                let news = self.memory(key, |memory| memory.evicts(evicted.is_ok()));
                match evicted {
                    Ok(Evicted::Ends) => {
                        self.memory(key, |memory| memory.ends(&pod.uid, now));
                        let client = self.writer.client();
                        tell_pod(client, namespace, &pod).await;
                    }
                    Ok(Evicted::Kept) => {
                        self.memory(key, |memory| memory.is_refused(&pod.uid, now));
                    }
                    // It is asked again with the next look, for which neither the others nor the status wait.
                    Err(why) if news => warn!(error = %chain(&why), "trying on"),
                    Err(_) => {}
                }
                Ok(())
            }
            Step::Status(wanted) => {
                if let Some(written) = self.writer.status(budget, &wanted).await? {
                    let before = current.status.as_ref();
                    self.remember(key, budget, written.clone());
                    tell(self.writer.client(), budget, before, &written).await;
                }
                Ok(())
            }
        }
    }

    /// The budget with the status that was written last, where the watch has not brought it yet.
    fn newest(&self, key: &Key, budget: &GpuMemoryBudget) -> GpuMemoryBudget {
        let mut newest = budget.clone();
        let list = self.world.borrow().budget_lists();
        let memories = self.memories();
        let newer = |memory: &Memory| memory.newer(budget, list).cloned();
        if let Some(status) = memories.get(key).and_then(newer) {
            newest.status = Some(status);
        }
        newest
    }

    /// Keeps what was written, and forgets the budgets that are gone.
    fn remember(&self, key: &Key, budget: &GpuMemoryBudget, status: GpuMemoryBudgetStatus) {
        let mut memories = self.memories();
        let world = self.world.borrow();
        memories.retain(|key, _| world.has_budget(key));
        memories
            .entry(key.clone())
            .or_default()
            .wrote(budget, world.budget_lists(), status);
    }

    fn succeeded(&self, key: &Key) {
        let failures = self.memories().get_mut(key).map_or(0, Memory::succeeded);
        if failures > 0 {
            info!(namespace = key.namespace, failures, "written again");
        }
    }

    fn memory<T>(&self, key: &Key, ask: impl FnOnce(&mut Memory) -> T) -> T {
        ask(self.memories().entry(key.clone()).or_default())
    }

    fn failed(&self, budget: &GpuMemoryBudget, why: &WriteError) -> Duration {
        self.metrics.look_failed();
        let mut memories = self.memories();
        let memory = memories.entry(Key::of(budget)).or_default();
        let (first, wait) = memory.failed(why.what(), Instant::now());
        if first {
            warn!(error = %chain(why), "trying on");
        }
        wait
    }

    fn memories(&self) -> MutexGuard<'_, BTreeMap<Key, Memory>> {
        // A panic while it was held left a whole map behind: each change of it is one step.
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
