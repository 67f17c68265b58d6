//! Writes the status of a budget when it changed.
//!
//! ```text
//!   a budget to look at --> status (pure) --> as it is: nothing
//!                                         \--> written --> ok
//!                                                      \--> failed: again after 1, 2, 4 ... 30 s
//! ```

mod memory;
mod object;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_crds::conditions::budget::READY;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use futures::{Stream, StreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Client;
use kube::runtime::controller::{Action, Config, Error as ControllerError, applier};
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::budget::status;
use crate::metrics::{Metrics, Outcome};
use crate::observe::chain;
use crate::world::{Key, World};

use memory::Memory;
pub use object::PublishError;
use object::write;

/// How many budgets are worked on at a time.
const CONCURRENCY: u16 = 8;

/// A budget is looked at this often even if no watch says a thing.
const AT_LEAST_EVERY: Duration = Duration::from_hours(1);

/// Writes statuses.
pub struct Publisher {
    client: Client,
    world: watch::Receiver<World>,
    metrics: Metrics,
    clock: fn() -> Time,
    memories: Mutex<BTreeMap<Key, Memory>>,
}

impl Publisher {
    /// A publisher of what `world` says.
    pub fn new(
        client: Client,
        world: watch::Receiver<World>,
        metrics: Metrics,
        clock: fn() -> Time,
    ) -> Self {
        Self {
            client,
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
        let publisher = Arc::new(self);
        let look =
            |budget, publisher: Arc<Self>| Box::pin(async move { publisher.look(budget).await });
        let retry = |budget: Arc<GpuMemoryBudget>, why: &PublishError, publisher: Arc<Self>| {
            Action::requeue(publisher.failed(&budget, why))
        };
        applier(look, retry, publisher, budgets, work, config)
            .for_each(|result| {
                // A budget that is gone needs no status; a failed write has been told of already.
                if let Err(ControllerError::RunnerError(failure)) = result {
                    error!(error = %chain(&failure), "the budgets are not watched any more");
                }
                ready(())
            })
            .await;
    }

    async fn look(&self, budget: Arc<GpuMemoryBudget>) -> Result<Action, PublishError> {
        let start = Instant::now();
        let key = Key::of(&*budget);
        let held_back = |memory: &Memory| memory.held_back(start);
        if let Some(wait) = self.memories().get(&key).and_then(held_back) {
            return Ok(Action::requeue(wait));
        }
        let current = self.newest(&key, &budget);
        let facts = self
            .world
            .borrow()
            .facts(&key.namespace, &budget.spec.cohort);
        let wanted = status(&current, &facts, &(self.clock)());
        let outcome = if current.status.as_ref() == Some(&wanted) {
            Outcome::Unchanged
        } else {
            if let Some(written) = write(&self.client, &key, &budget, &wanted).await? {
                tell(&key, &current, &written);
                self.remember(&key, &budget, written);
            }
            Outcome::Written
        };
        self.metrics.looked(outcome, start.elapsed());
        self.succeeded(&key);
        Ok(Action::requeue(AT_LEAST_EVERY))
    }

    /// The budget with the status that was written last, where the watch has not brought it yet.
    fn newest(&self, key: &Key, budget: &GpuMemoryBudget) -> GpuMemoryBudget {
        let mut newest = budget.clone();
        let memories = self.memories();
        if let Some(status) = memories.get(key).and_then(|memory| memory.newer(budget)) {
            newest.status = Some(status.clone());
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
            .wrote(budget, status);
    }

    fn succeeded(&self, key: &Key) {
        let failures = self.memories().get_mut(key).map_or(0, Memory::succeeded);
        if failures > 0 {
            info!(
                namespace = key.namespace,
                failures, "status is written again"
            );
        }
    }

    fn failed(&self, budget: &GpuMemoryBudget, why: &PublishError) -> Duration {
        self.metrics.look_failed();
        let mut memories = self.memories();
        let memory = memories.entry(Key::of(budget)).or_default();
        let (first, wait) = memory.failed(Instant::now());
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

/// One line where a budget became ready or unready, or for another reason.
fn tell(key: &Key, before: &GpuMemoryBudget, now: &GpuMemoryBudgetStatus) {
    let said = |conditions: &[Condition]| {
        conditions
            .iter()
            .find(|condition| condition.type_ == READY)
            .map(|condition| (condition.status.clone(), condition.reason.clone()))
    };
    let was = before
        .status
        .as_ref()
        .and_then(|status| said(&status.conditions));
    let is = said(&now.conditions);
    if let Some((ready, reason)) = is.filter(|is| Some(is) != was.as_ref()) {
        info!(namespace = key.namespace, ready, reason, "budget");
    }
}
