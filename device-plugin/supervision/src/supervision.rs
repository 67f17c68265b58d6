//! Keeps an allocator runtime running for each GPU that may serve pods.
//!
//! | GPU | runtime |
//! |---|---|
//! | healthy | started, at most two at a time, and again after a failure with a back-off |
//! | healthy MIG instance | started with its first lease, ended ten minutes after its last |
//! | drained, lost, or waiting for a reset | ended; none is started meanwhile |
//! | not listed any more | ended |
//! | unhealthy for another reason | left as it is |
//!
//! A MIG instance with a client cannot be destroyed, so an idle instance has none. A tenant's
//! request starts a missing runtime at once, without this task. The task begins after the kubelet
//! has the node's first offer, because no offer waits for a runtime. The first pod of a GPU waits
//! for the result of the first start, for a bounded time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::cuda_fitness::CudaFitnesses;
use bursar_gpu::drain::DrainState;
use bursar_gpu::health::{Health, UnhealthyReason};
use bursar_gpu::{GpuState, Inventory};
use bursar_ledger::units::GpuUuid;
use bursar_sessions::lease_handle::LiveLeases;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::provisioners::Provisioners;
use super::runtimes::{Activity, RuntimeRecord};

mod first_starts;

use self::first_starts::FirstStarts;

/// How many runtimes start at a time: without persistence mode each start takes the driver seconds.
const STARTS_AT_A_TIME: usize = 2;

/// How long the runtime of a MIG instance runs without a lease.
const IDLE_MIG: Duration = Duration::from_secs(600);

/// The delay until a start is tried again that could not begin, because the GPU's last process has
/// not ended.
const START_RETRY: Duration = Duration::from_secs(1);

/// The inputs of a decision.
#[derive(Clone, Copy)]
struct Observed<'a> {
    inventory: &'a Inventory,
    drained: &'a BTreeSet<GpuUuid>,
    leases: &'a LiveLeases,
    runtimes: &'a BTreeMap<GpuUuid, RuntimeRecord>,
}

/// The actions of a decision.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// The GPUs that must have no runtime, besides the drained ones.
    barred: BTreeSet<GpuUuid>,
    /// The runtimes to end, which a request may start again.
    end: BTreeSet<GpuUuid>,
    /// The runtimes to start.
    start: Vec<GpuUuid>,
    /// When to decide again, if nothing changes before.
    wake_at: Option<Instant>,
}

/// Whether a GPU should have a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Demand {
    /// No runtime may run.
    Barred,
    /// A running runtime goes on.
    Tolerated,
    /// A runtime is started.
    Wanted,
}

fn demand(state: &GpuState) -> Demand {
    if state.persisted.away || state.persisted.awaits_reset.is_some() {
        return Demand::Barred;
    }
    match state.health {
        Health::Healthy => Demand::Wanted,
        Health::Unhealthy(UnhealthyReason::Lost | UnhealthyReason::Drained) => Demand::Barred,
        Health::Unhealthy(_) => Demand::Tolerated,
    }
}

/// Decides which runtimes start and end. Remembers since when MIG instances have no lease.
#[derive(Debug, Default)]
struct Supervision {
    idle_since: BTreeMap<GpuUuid, Instant>,
}

impl Supervision {
    fn plan(&mut self, observed: Observed<'_>, now: Instant) -> Plan {
        let Observed {
            inventory,
            drained,
            leases,
            runtimes,
        } = observed;
        let mut plan = Plan::default();
        // Without an answer of NVML nothing is known of any GPU.
        if inventory.gpus().is_empty() {
            return plan;
        }
        let is_there = |gpu: &GpuUuid| inventory.gpus().iter().any(|state| state.gpu.uuid == *gpu);
        let running = runtimes.iter().filter(|(_, record)| record.is_active());
        plan.end = running
            .map(|(gpu, _)| gpu.clone())
            .filter(|gpu| !is_there(gpu))
            .collect();
        self.idle_since.retain(|gpu, _| is_there(gpu));
        let mut due = Vec::new();
        for state in inventory.gpus() {
            let gpu = &state.gpu.uuid;
            if state.gpu.is_in(drained) {
                self.idle_since.remove(gpu);
                continue;
            }
            let record = runtimes.get(gpu).cloned().unwrap_or_default();
            let demand = demand(state);
            if demand == Demand::Barred {
                plan.barred.insert(gpu.clone());
                continue;
            }
            if state.gpu.mig_parent.is_some() && !leases.contains_key(gpu) {
                self.end_when_idle(gpu, &record, now, &mut plan);
                continue;
            }
            self.idle_since.remove(gpu);
            if demand == Demand::Wanted && record.activity() == Activity::Stopped {
                match record.retry_at().filter(|at| *at > now) {
                    Some(at) => plan.wake_by(at),
                    None => due.push((record.failures_in_a_row(), gpu)),
                }
            }
        }
        // The start of one GPU that fails or hangs again and again must not delay the others.
        due.sort_by_key(|(failures, _)| *failures);
        let starting = runtimes
            .values()
            .filter(|record| record.activity() == Activity::Starting)
            .count();
        let room = STARTS_AT_A_TIME.saturating_sub(starting);
        plan.start = due
            .into_iter()
            .take(room)
            .map(|(_, gpu)| gpu.clone())
            .collect();
        plan
    }

    /// Ends the runtime of a MIG instance without a lease, once it has had none for long.
    fn end_when_idle(
        &mut self,
        gpu: &GpuUuid,
        record: &RuntimeRecord,
        now: Instant,
        plan: &mut Plan,
    ) {
        if !record.is_active() {
            self.idle_since.remove(gpu);
            return;
        }
        let since = *self.idle_since.entry(gpu.clone()).or_insert(now);
        if now.saturating_duration_since(since) >= IDLE_MIG {
            plan.end.insert(gpu.clone());
        } else {
            plan.wake_by(since + IDLE_MIG);
        }
    }
}

/// Returns the results for the GPUs that have a runtime or count as tried.
fn fitness_of_all(
    runtimes: &BTreeMap<GpuUuid, RuntimeRecord>,
    tried: &BTreeSet<GpuUuid>,
) -> CudaFitnesses {
    let gpus: BTreeSet<&GpuUuid> = runtimes.keys().chain(tried).collect();
    let fitness = |gpu: &GpuUuid| {
        let record = runtimes.get(gpu).cloned().unwrap_or_default();
        (gpu.clone(), record.fitness(tried.contains(gpu)))
    };
    gpus.into_iter().map(fitness).collect()
}

impl Plan {
    fn wake_by(&mut self, at: Instant) {
        self.wake_at = Some(self.wake_at.map_or(at, |before| before.min(at)));
    }
}

/// The task that starts and ends runtimes.
pub struct Supervisor {
    /// The runtimes.
    pub provisioners: Arc<Provisioners>,
    /// The node's GPUs as NVML reports them. A GPU that CUDA refuses counts as healthy here: only
    /// further starts show that it works again.
    pub inventory: watch::Receiver<Inventory>,
    /// The GPUs to drain. The lease service ends their runtimes.
    pub drain: watch::Receiver<DrainState>,
    /// The leases of each GPU.
    pub live_leases: watch::Receiver<LiveLeases>,
    /// The results of the starts, as the task finds them. Untried GPUs take no new pods.
    pub fitness: watch::Sender<CudaFitnesses>,
}

impl Supervisor {
    /// Supervises from the time at which `offered` ends until `stop`. The clock is `now`.
    pub async fn run(
        mut self,
        offered: impl Future<Output = ()>,
        now: impl Fn() -> Instant,
        stop: CancellationToken,
    ) {
        if stop.run_until_cancelled(offered).await.is_none() {
            return;
        }
        let mut supervision = Supervision::default();
        let mut first_starts = FirstStarts::default();
        let mut runtimes = self.provisioners.runtimes();
        loop {
            let (plan, fitness) = {
                let observed = Observed {
                    inventory: &self.inventory.borrow_and_update(),
                    drained: &self.drain.borrow_and_update().requested,
                    leases: &self.live_leases.borrow_and_update(),
                    runtimes: &runtimes.borrow_and_update(),
                };
                let mut plan = supervision.plan(observed, now());
                let tried = first_starts.tried(observed, now(), &mut plan);
                (plan, fitness_of_all(observed.runtimes, &tried))
            };
            self.fitness.send_if_modified(|before| {
                let changed = *before != fitness;
                *before = fitness;
                changed
            });
            let wake_at = self.carry_out(plan, now());
            let wake = async {
                match wake_at {
                    Some(at) => tokio::time::sleep(at.saturating_duration_since(now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                // The senders end only with the agent.
                Ok(()) = self.inventory.changed() => {}
                Ok(()) = self.drain.changed() => {}
                Ok(()) = self.live_leases.changed() => {}
                Ok(()) = runtimes.changed() => {}
                () = wake => {}
            }
        }
    }

    /// Carries the plan out. Returns when to decide again, if nothing changes before.
    fn carry_out(&self, mut plan: Plan, now: Instant) -> Option<Instant> {
        self.provisioners.bar(std::mem::take(&mut plan.barred));
        self.provisioners.end(&plan.end);
        let started = plan.start.iter().map(|gpu| self.provisioners.start(gpu));
        // Each start is tried, whatever becomes of the others.
        let failed = started.filter(|is_begun| !is_begun).count();
        if failed > 0 {
            plan.wake_by(now + START_RETRY);
        }
        plan.wake_at
    }
}

#[cfg(test)]
mod tests;
