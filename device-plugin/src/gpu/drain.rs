//! Has everything of ours let go of the GPUs that are to be drained, so that they can be reset or get another driver.
//!
//! ```text
//!   ordered ---------------------------------------------------------> released ---------------> drained
//!     no pod is bound to it or started on it (node)                     its process that calls     `Drained`
//!     its containers get nothing more, and are killed (sessions)        NVML ends
//!     its leases, its worker, the sentinel end (kept)
//! ```
//!
//! An order that is gone is undone by itself: NVML is asked about the GPU again, its G grows as with every GPU
//! that was away, and once it is well it takes pods. Nothing of this is on record but that a GPU is drained
//! (`Memory::drained`): an agent that starts in the middle begins with the first step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::enforcement::audit::kill::kill;
use crate::gpu::Inventory;
use crate::gpu_node::quota_overrides::Orders;
use crate::sessions::Sessions;
use crate::units::GpuUuid;

/// How often is looked who holds them.
const EVERY: Duration = Duration::from_millis(200);

/// How long nobody holds a GPU before it is released: by then an audit has seen who went past the shim.
const QUIET: Duration = Duration::from_secs(2);

/// How far the GPUs are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drain {
    /// Nothing new begins on these, and what there is ends.
    pub ordered: BTreeSet<GpuUuid>,
    /// Of these, something other than the NVML watcher holds these.
    pub busy: BTreeSet<GpuUuid>,
    /// Only the NVML watcher held these for a while: the watcher lets them go too.
    pub released: BTreeSet<GpuUuid>,
}

/// Decides who is released: pure.
#[derive(Debug)]
struct Plan {
    drain: Drain,
    /// Since when nobody holds a GPU.
    quiet: BTreeMap<GpuUuid, Instant>,
}

impl Plan {
    /// With what a predecessor `drained`.
    fn new(drained: BTreeSet<GpuUuid>) -> Self {
        let drain = Drain {
            ordered: drained.clone(),
            busy: BTreeSet::new(),
            released: drained,
        };
        Self {
            drain,
            quiet: BTreeMap::new(),
        }
    }

    /// These are to be drained, and these are held. What was released stays so until its order is gone: who comes
    /// later than that is ended, and NVML is not needed for it.
    fn next(&mut self, ordered: BTreeSet<GpuUuid>, held: &BTreeSet<GpuUuid>, now: Instant) {
        let busy: BTreeSet<_> = ordered.intersection(held).cloned().collect();
        self.quiet
            .retain(|gpu, _| ordered.contains(gpu) && !busy.contains(gpu));
        for gpu in ordered.difference(&busy) {
            let since = *self.quiet.entry(gpu.clone()).or_insert(now);
            if now.saturating_duration_since(since) >= QUIET {
                self.drain.released.insert(gpu.clone());
            }
        }
        self.drain.released.retain(|gpu| ordered.contains(gpu));
        (self.drain.ordered, self.drain.busy) = (ordered, busy);
    }
}

/// What is to be drained by these orders, with the MIG instances of a GPU; what was before they are told.
fn ordered(
    orders: Option<&Orders>,
    inventory: &Inventory,
    before: &BTreeSet<GpuUuid>,
) -> BTreeSet<GpuUuid> {
    let Some(Orders { drain, .. }) = orders else {
        return before.clone();
    };
    let gpus = inventory.gpus().iter().map(|state| &state.gpu);
    let named = gpus.filter(|gpu| gpu.is_in(drain));
    let named = named.map(|gpu| gpu.uuid.clone());
    named.chain(drain.iter().cloned()).collect()
}

/// What the part works with.
pub struct Around {
    /// The host's `/proc`.
    pub proc: PathBuf,
    /// Whose containers end.
    pub sessions: Arc<Sessions>,
    /// What the node's `GpuNode` orders; none before the API server told any.
    pub orders: watch::Receiver<Option<Orders>>,
    /// The GPUs.
    pub inventory: watch::Receiver<Inventory>,
    /// What of the ordered GPUs kept memory has let go.
    pub let_go: watch::Receiver<BTreeSet<GpuUuid>>,
}

/// As it begins, where a predecessor had `drained` these.
pub fn begin(drained: BTreeSet<GpuUuid>) -> watch::Sender<Drain> {
    watch::Sender::new(Plan::new(drained).drain)
}

/// Drains until `stop`, and keeps `drain` at how far that is.
pub async fn run(mut around: Around, drain: watch::Sender<Drain>, stop: CancellationToken) {
    let mut plan = Plan::new(drain.borrow().ordered.clone());
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
            // Without the API server nothing is ordered: the ticks go on.
            Ok(()) = around.orders.changed() => {}
        }
        let ordered = ordered(
            around.orders.borrow_and_update().as_ref(),
            &around.inventory.borrow(),
            &plan.drain.ordered,
        );
        let (mut held, doomed) = around.sessions.drain(&ordered);
        for process in doomed {
            match kill(&around.proc, process) {
                Ok(true) => warn!(pid = process.pid, "killed: its gpu is drained"),
                Ok(false) => {}
                Err(error) => warn!(pid = process.pid, %error, "not killed"),
            }
        }
        held.extend(ordered.difference(&around.let_go.borrow()).cloned());
        plan.next(ordered, &held, Instant::now());
        drain.send_if_modified(|before| {
            let changed = *before != plan.drain;
            if changed {
                info!(drain = ?plan.drain, "drain");
                before.clone_from(&plan.drain);
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

    struct Bed {
        plan: Plan,
        start: Instant,
    }

    impl Bed {
        fn new() -> Self {
            Self {
                plan: Plan::new(BTreeSet::new()),
                start: Instant::now(),
            }
        }

        /// What is busy and what is released at that second.
        fn at(&mut self, second: u64, ordered: &[&str], held: &[&str]) -> [Vec<&str>; 2] {
            let now = self.start + Duration::from_secs(second);
            self.plan.next(gpus(ordered), &gpus(held), now);
            let Drain { busy, released, .. } = &self.plan.drain;
            [busy, released].map(|gpus| gpus.iter().map(GpuUuid::as_str).collect())
        }
    }

    #[test]
    fn a_gpu_is_released_when_nobody_has_held_it_for_a_while() {
        let mut bed = Bed::new();
        assert_eq!(
            bed.at(0, &["GPU-a"], &["GPU-a", "GPU-b"]),
            [vec!["GPU-a"], vec![]]
        );
        assert_eq!(bed.at(1, &["GPU-a"], &["GPU-b"]), [[""; 0]; 2]);
        assert_eq!(bed.at(2, &["GPU-a"], &["GPU-a"]), [vec!["GPU-a"], vec![]]);
        assert_eq!(bed.at(3, &["GPU-a"], &[]), [[""; 0]; 2]);
        assert_eq!(bed.at(4, &["GPU-a"], &[]), [[""; 0]; 2]);
        assert_eq!(bed.at(5, &["GPU-a"], &[]), [vec![], vec!["GPU-a"]]);
    }

    #[test]
    fn who_comes_later_makes_it_busy_and_nvml_does_not_come_back_for_it() {
        let mut bed = Bed::new();
        bed.at(0, &["GPU-a"], &[]);
        bed.at(2, &["GPU-a"], &[]);
        assert_eq!(
            bed.at(3, &["GPU-a"], &["GPU-a"]),
            [vec!["GPU-a"], vec!["GPU-a"]]
        );
        assert_eq!(bed.at(4, &["GPU-a"], &[]), [vec![], vec!["GPU-a"]]);
    }

    #[test]
    fn an_order_that_is_gone_leaves_nothing_and_a_later_one_begins_anew() {
        let mut bed = Bed::new();
        bed.at(0, &["GPU-a", "GPU-b"], &[]);
        assert_eq!(
            bed.at(2, &["GPU-a", "GPU-b"], &[]),
            [vec![], vec!["GPU-a", "GPU-b"]]
        );
        assert_eq!(bed.at(3, &["GPU-b"], &[]), [vec![], vec!["GPU-b"]]);
        assert_eq!(bed.at(4, &["GPU-a", "GPU-b"], &[]), [vec![], vec!["GPU-b"]]);
    }

    #[test]
    fn before_the_orders_are_told_what_was_drained_stays_so() {
        let drained = gpus(&["GPU-a"]);
        let mut plan = Plan::new(drained.clone());
        let told = |orders: Option<&Orders>| ordered(orders, &Inventory::Starting, &drained);
        plan.next(told(None), &BTreeSet::new(), Instant::now());
        assert_eq!(plan.drain.released, drained);
        plan.next(
            told(Some(&Orders::default())),
            &BTreeSet::new(),
            Instant::now(),
        );
        assert_eq!(plan.drain, Drain::default());
    }
}
