//! Drains GPUs: ends every use by the agent and its pods, for a reset or another driver.
//!
//! ```text
//!   requested -------------------------------------------------> released ----------> drained
//!     the allocator binds and starts no pod on the GPU             its NVML process     `Drained`
//!     its containers get no more memory and are killed             ends
//!     its leases and its provisioner end (retained memory)
//! ```
//!
//! A withdrawn order needs no step of its own. NVML is asked about the GPU again, and its
//! generation grows as for every GPU that was absent. The GPU takes pods once it is healthy. The
//! health record has which GPUs are to be drained, and which are. An agent that starts during a
//! drain begins with the first step, also without the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_apiserver::ParsedSpec;
use bursar_gpu::Inventory;
use bursar_gpu::drain::DrainState;
use bursar_gpu::health::PersistedHealth;
use bursar_ledger::units::GpuUuid;
use bursar_sessions::Sessions;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::audit::kill::kill;

/// How often the sessions are asked which GPUs are in use.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long a GPU must be unused before it is released. By then an audit has found processes that
/// use the driver past the shim.
const IDLE_BEFORE_RELEASE: Duration = Duration::from_secs(2);

/// Decides which GPUs are released: pure.
#[derive(Debug)]
struct DrainPlan {
    state: DrainState,
    /// The time since which each GPU is unused.
    idle_since: BTreeMap<GpuUuid, Instant>,
}

impl DrainPlan {
    fn new(state: DrainState) -> Self {
        Self {
            state,
            idle_since: BTreeMap::new(),
        }
    }

    /// Takes the requested GPUs and those in use. A released GPU stays released until its order is
    /// gone: a later user is killed, for which NVML is not needed.
    fn update(&mut self, requested: BTreeSet<GpuUuid>, used: &BTreeSet<GpuUuid>, now: Instant) {
        let in_use: BTreeSet<_> = requested.intersection(used).cloned().collect();
        self.idle_since
            .retain(|gpu, _| requested.contains(gpu) && !in_use.contains(gpu));
        for gpu in requested.difference(&in_use) {
            let since = *self.idle_since.entry(gpu.clone()).or_insert(now);
            if now.saturating_duration_since(since) >= IDLE_BEFORE_RELEASE {
                self.state.released.insert(gpu.clone());
            }
        }
        self.state.released.retain(|gpu| requested.contains(gpu));
        (self.state.requested, self.state.in_use) = (requested, in_use);
    }
}

/// The GPUs to drain, with their MIG instances; `before` while the API server has sent no orders.
fn requested_gpus(
    orders: Option<&ParsedSpec>,
    inventory: &Inventory,
    before: &BTreeSet<GpuUuid>,
) -> BTreeSet<GpuUuid> {
    let Some(ParsedSpec { drain, .. }) = orders else {
        return before.clone();
    };
    let gpus = inventory.gpus().iter().map(|state| &state.gpu);
    let named = gpus.filter(|gpu| gpu.is_in(drain));
    let named = named.map(|gpu| gpu.uuid.clone());
    named.chain(drain.iter().cloned()).collect()
}

/// The inputs of the drain task.
pub struct DrainInputs {
    /// The host's `/proc`.
    pub proc: PathBuf,
    /// The sessions whose containers end.
    pub sessions: Arc<Sessions>,
    /// The orders in the node's `GpuNode`; none before the API server has sent the object.
    pub orders: watch::Receiver<Option<ParsedSpec>>,
    /// The node's GPUs.
    pub inventory: watch::Receiver<Inventory>,
    /// The requested GPUs on which no lease and no provisioner is left.
    pub released_by_leases: watch::Receiver<BTreeSet<GpuUuid>>,
}

/// The initial state, by the records of the previous agent.
pub fn initial_state<'a>(
    persisted: impl Iterator<Item = (&'a GpuUuid, PersistedHealth)>,
) -> DrainState {
    let mut state = DrainState::default();
    for (gpu, health) in persisted {
        if health.draining || health.drained {
            state.requested.insert(gpu.clone());
        }
        if health.drained {
            state.released.insert(gpu.clone());
        }
    }
    state
}

/// Drains GPUs until `stop` and publishes the state in `drain`.
pub async fn run(
    mut inputs: DrainInputs,
    drain: watch::Sender<DrainState>,
    stop: CancellationToken,
) {
    let mut plan = DrainPlan::new(drain.borrow().clone());
    let mut ticker = interval(POLL_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticker.tick() => {}
            // Without the API server no order arrives, and the ticks go on.
            Ok(()) = inputs.orders.changed() => {}
        }
        let requested = requested_gpus(
            inputs.orders.borrow_and_update().as_ref(),
            &inputs.inventory.borrow(),
            &plan.state.requested,
        );
        let (mut used, to_kill) = inputs.sessions.drain_gpus(&requested);
        for process in to_kill {
            match kill(&inputs.proc, process) {
                Ok(true) => warn!(pid = process.pid, "killed a process on a drained gpu"),
                Ok(false) => {}
                Err(error) => warn!(pid = process.pid, %error, "failed to kill a process"),
            }
        }
        used.extend(
            requested
                .difference(&inputs.released_by_leases.borrow())
                .cloned(),
        );
        plan.update(requested, &used, Instant::now());
        drain.send_if_modified(|before| {
            let changed = *before != plan.state;
            if changed {
                info!(drain = ?plan.state, "drain state changed");
                before.clone_from(&plan.state);
            }
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(names: &[&str]) -> BTreeSet<GpuUuid> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    struct Fixture {
        plan: DrainPlan,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                plan: DrainPlan::new(DrainState::default()),
                start: Instant::now(),
            }
        }

        /// The GPUs in use and the released GPUs at that second.
        fn at(&mut self, second: u64, requested: &[&str], used: &[&str]) -> [Vec<&str>; 2] {
            let now = self.start + Duration::from_secs(second);
            self.plan.update(gpus(requested), &gpus(used), now);
            let DrainState {
                in_use, released, ..
            } = &self.plan.state;
            [in_use, released].map(|gpus| gpus.iter().map(GpuUuid::as_str).collect())
        }
    }

    #[test]
    fn gpu_is_released_when_unused_for_a_while() {
        let mut fixture = Fixture::new();
        assert_eq!(
            fixture.at(0, &["GPU-a"], &["GPU-a", "GPU-b"]),
            [vec!["GPU-a"], vec![]]
        );
        assert_eq!(fixture.at(1, &["GPU-a"], &["GPU-b"]), [[""; 0]; 2]);
        assert_eq!(
            fixture.at(2, &["GPU-a"], &["GPU-a"]),
            [vec!["GPU-a"], vec![]]
        );
        assert_eq!(fixture.at(3, &["GPU-a"], &[]), [[""; 0]; 2]);
        assert_eq!(fixture.at(4, &["GPU-a"], &[]), [[""; 0]; 2]);
        assert_eq!(fixture.at(5, &["GPU-a"], &[]), [vec![], vec!["GPU-a"]]);
    }

    #[test]
    fn released_gpu_stays_released_when_used_again() {
        let mut fixture = Fixture::new();
        fixture.at(0, &["GPU-a"], &[]);
        fixture.at(2, &["GPU-a"], &[]);
        assert_eq!(
            fixture.at(3, &["GPU-a"], &["GPU-a"]),
            [vec!["GPU-a"], vec!["GPU-a"]]
        );
        assert_eq!(fixture.at(4, &["GPU-a"], &[]), [vec![], vec!["GPU-a"]]);
    }

    #[test]
    fn drain_starts_over_when_its_order_was_withdrawn() {
        let mut fixture = Fixture::new();
        fixture.at(0, &["GPU-a", "GPU-b"], &[]);
        assert_eq!(
            fixture.at(2, &["GPU-a", "GPU-b"], &[]),
            [vec![], vec!["GPU-a", "GPU-b"]]
        );
        assert_eq!(fixture.at(3, &["GPU-b"], &[]), [vec![], vec!["GPU-b"]]);
        assert_eq!(
            fixture.at(4, &["GPU-a", "GPU-b"], &[]),
            [vec![], vec!["GPU-b"]]
        );
    }

    #[test]
    fn recorded_drain_goes_on_until_orders_are_known() {
        let drained = PersistedHealth {
            drained: true,
            ..PersistedHealth::default()
        };
        let draining = PersistedHealth {
            draining: true,
            ..PersistedHealth::default()
        };
        let records = [
            ("GPU-a", drained),
            ("GPU-b", draining),
            ("GPU-c", PersistedHealth::default()),
        ]
        .map(|(gpu, health)| (gpu.parse::<GpuUuid>().unwrap(), health));
        let state = initial_state(records.iter().map(|(gpu, health)| (gpu, *health)));
        let mut plan = DrainPlan::new(state.clone());
        let requested_by = |orders: Option<&ParsedSpec>| {
            requested_gpus(orders, &Inventory::Starting, &state.requested)
        };
        plan.update(requested_by(None), &BTreeSet::new(), Instant::now());
        assert_eq!(plan.state.requested, gpus(&["GPU-a", "GPU-b"]));
        assert_eq!(plan.state.released, gpus(&["GPU-a"]));
        plan.update(
            requested_by(Some(&ParsedSpec::default())),
            &BTreeSet::new(),
            Instant::now(),
        );
        assert_eq!(plan.state, DrainState::default());
    }
}
