//! Decides on which GPUs CUDA was tried: pure.
//!
//! A GPU takes its first pod once the first start of its runtime has succeeded or failed. A driver
//! that answers neither way must not keep a node's pods waiting, so the wait has an end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;

use super::{Demand, Observed, Plan, demand};

/// How long a GPU waits for the result of its first start: longer than a start that hangs takes
/// to be killed.
pub(super) const FIRST_START_WAIT: Duration = Duration::from_secs(30);

/// Remembers since when GPUs wait for the result of their first start.
#[derive(Debug, Default)]
pub(super) struct FirstStarts {
    waits_since: BTreeMap<GpuUuid, Instant>,
}

impl FirstStarts {
    /// The GPUs that were tried, or have waited long enough. The plan wakes when the next wait
    /// ends.
    pub(super) fn tried(
        &mut self,
        observed: Observed<'_>,
        now: Instant,
        plan: &mut Plan,
    ) -> BTreeSet<GpuUuid> {
        let Observed {
            inventory,
            drained,
            leases: _,
            runtimes,
        } = observed;
        let mut tried = BTreeSet::new();
        let mut waits_since = BTreeMap::new();
        let may_start = |state: &&_| demand(state) != Demand::Barred;
        let present = inventory.gpus().iter().filter(may_start);
        // An instance has no runtime before its first lease, and waits for none.
        let present = present.filter(|state| state.gpu.mig_parent.is_none());
        for state in present.filter(|state| !state.gpu.is_in(drained)) {
            let gpu = &state.gpu.uuid;
            if runtimes.get(gpu).is_some_and(|record| record.is_tried()) {
                tried.insert(gpu.clone());
            } else if demand(state) == Demand::Wanted {
                let since = self.waits_since.get(gpu).copied().unwrap_or(now);
                let until = since + FIRST_START_WAIT;
                match until <= now {
                    true => drop(tried.insert(gpu.clone())),
                    false => plan.wake_by(until),
                }
                waits_since.insert(gpu.clone(), since);
            }
        }
        self.waits_since = waits_since;
        tried
    }
}
