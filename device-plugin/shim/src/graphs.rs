//! Charges the memory nodes of graphs by what each device's graph pool has reserved.
//!
//! Measured on an H200: instantiating a graph takes nothing. Its upload or first launch takes its
//! allocations in steps of 32 MiB. One of 40 MiB takes 64 MiB, two take 128, small ones share a
//! step. The pool keeps them, past the graph's end too, until it is trimmed. So the shim records
//! the needs of an executable graph with memory nodes. It charges them before a call that may take
//! memory, and reconciles the pool after it. A launch into the same stream since the last trim
//! takes nothing new. A launch into another stream may (CUDA programming guide, graph memory nodes:
//! graphs of one stream share memory, those of others may not).
//!
//! A process without such graphs pays one load a launch.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use bursar_protocol::units::UNIT;

use crate::accounting::{self, Account, Denied, PendingCharge};
use crate::alloc_table::Charge;
use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, driver, streams};
use crate::fork_local::ForkLocal;

/// The graph pool takes memory in multiples of this (fact F15).
const POOL_STEP: u64 = 32 << 20;

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const ATTR_RESERVED: c_int = 2;

/// What an executable graph's memory nodes take at most, by device.
pub(crate) type Needs = BTreeMap<c_int, Need>;

/// What allocations take at most: large ones, which share no step, in steps; and the sum of small
/// ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    large: u64,
    small: u64,
}

impl Need {
    /// Adds one allocation.
    pub(crate) fn add(&mut self, bytes: u64) {
        let (sum, part) = if bytes > POOL_STEP / 2 {
            let steps = bytes.checked_next_multiple_of(POOL_STEP);
            (&mut self.large, steps.unwrap_or(u64::MAX))
        } else {
            (&mut self.small, bytes)
        };
        *sum = sum.saturating_add(part);
    }

    /// Returns the need in bytes, in whole steps. However small allocations are placed, no two
    /// steps are half empty.
    fn bytes(self) -> Option<u64> {
        let small = match self.small {
            0..=POOL_STEP => self.small,
            more => more.checked_mul(2)?,
        };
        small
            .checked_next_multiple_of(POOL_STEP)?
            .checked_add(self.large)
    }
}

/// An executable graph with memory nodes.
struct GraphExec {
    needs: Needs,
    /// [`GraphRegistry::trims`] when the graph last took its memory, and the ids of the streams in
    /// which it has taken memory since.
    placement: (u64, BTreeSet<u64>),
}

/// The most streams that are remembered for one graph.
const MAX_TRACKED_STREAMS: usize = 64;

#[derive(Default)]
struct GraphRegistry {
    execs: BTreeMap<u64, GraphExec>,
    /// The charge of each device's graph pool.
    pool_charges: BTreeMap<c_int, Charge>,
    /// How often pools were trimmed, which gave up memory that graphs will take again.
    trims: u64,
}

/// Whether there ever was an executable graph with memory nodes.
static MAY_HAVE_MEMORY: AtomicBool = AtomicBool::new(false);

static GRAPHS: ForkLocal<GraphRegistry> = ForkLocal::new();

fn graphs() -> MutexGuard<'static, GraphRegistry> {
    GRAPHS.lock()
}

/// Forgets the parent's graphs, in a forked child.
pub(crate) fn reset() {
    GRAPHS.reset();
}

/// Returns whether there may be graph memory to account for.
pub(crate) fn may_have_memory() -> bool {
    MAY_HAVE_MEMORY.load(Ordering::Relaxed)
}

/// Records an executable graph. An earlier graph with the same handle no longer exists.
pub(crate) fn instantiated(executable: u64, needs: Needs) {
    let mut graphs = graphs();
    graphs.execs.remove(&executable);
    if !needs.is_empty() {
        graphs.execs.insert(
            executable,
            GraphExec {
                needs,
                placement: (0, BTreeSet::new()),
            },
        );
        MAY_HAVE_MEMORY.store(true, Ordering::Relaxed);
    }
}

/// Forgets an executable graph that is about to be destroyed.
pub(crate) fn destroyed(executable: u64) {
    graphs().execs.remove(&executable);
}

/// Makes a call that gives a graph its memory in a stream, and charges that memory.
pub(crate) fn charge_launch(
    executable: u64,
    stream: u64,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let mut graphs = graphs();
    let Some(graph) = graphs.execs.get(&executable) else {
        drop(graphs);
        return call();
    };
    let (needs, stream) = (graph.needs.clone(), streams::stream_id(stream));
    if graph.placement.0 == graphs.trims && graph.placement.1.contains(&stream) {
        let answer = call();
        graphs.reconcile(needs.keys(), Vec::new());
        return answer;
    }
    let answer = graphs.with_charge(&needs, function, call);
    let trims = graphs.trims;
    if let (curesult::SUCCESS, Some(graph)) = (answer, graphs.execs.get_mut(&executable)) {
        if graph.placement.0 != trims || graph.placement.1.len() >= MAX_TRACKED_STREAMS {
            graph.placement = (trims, BTreeSet::new());
        }
        graph.placement.1.insert(stream);
    }
    answer
}

/// Makes a call that instantiates and uploads a graph, and charges its memory. The graph has no
/// handle yet.
pub(crate) fn charge_upload(
    needs: &Needs,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    graphs().with_charge(needs, function, call)
}

/// Makes a call that frees graph memory: a trim, or the end of a context.
pub(crate) fn with_trim(call: impl FnOnce() -> CuResult) -> CuResult {
    if !may_have_memory() {
        return call();
    }
    // A concurrent launch may have to take its memory again. The lock is not held over the call,
    // which may wait for work, and that for another thread of the program.
    graphs().trims += 1;
    let answer = call();
    graphs().after_trim();
    answer
}

/// Trims what no graph uses. Returns whether that discharged anything; does nothing while another
/// thread holds the lock.
pub(crate) fn reclaim() -> bool {
    may_have_memory() && GRAPHS.try_lock().is_some_and(|mut graphs| graphs.reclaim())
}

impl GraphRegistry {
    /// Makes a call that may take `needs`.
    fn with_charge(
        &mut self,
        needs: &Needs,
        function: &str,
        call: impl FnOnce() -> CuResult,
    ) -> CuResult {
        self.reconcile(needs.keys(), Vec::new());
        let charge = || -> Result<Vec<(c_int, PendingCharge)>, Denied> {
            let charge = |(device, need): (&c_int, &Need)| {
                let bytes = need.bytes().ok_or(Denied)?;
                let pending = accounting::charge(Account::Device(*device), bytes, function)?;
                Ok((*device, pending))
            };
            needs.iter().map(charge).collect()
        };
        let charged = match charge() {
            Err(Denied) if self.reclaim() => charge(),
            first => first,
        };
        let Ok(charged) = charged else {
            return curesult::OUT_OF_MEMORY;
        };
        let answer = call();
        self.reconcile(needs.keys(), charged);
        answer
    }

    /// Makes the charges of the devices' pools what these have reserved, using up `charged`.
    fn reconcile<'a>(
        &mut self,
        devices: impl IntoIterator<Item = &'a c_int>,
        mut charged: Vec<(c_int, PendingCharge)>,
    ) {
        for device in devices {
            let Some(reserved) = reserved(*device) else {
                // The reserved amount is unknown, so the charge stays.
                continue;
            };
            let place = charged.iter().position(|(charged, _)| charged == device);
            let growth = match self.pool_charges.get(device) {
                Some(before) => reserved.saturating_sub(bytes(before)),
                None => reserved,
            };
            if growth > 0 {
                let pending = place.map(|place| charged.swap_remove(place).1);
                self.grow(*device, growth, pending);
            } else {
                self.shrink(*device, reserved);
            }
        }
    }

    fn grow(&mut self, device: c_int, growth: u64, pending: Option<PendingCharge>) {
        let pending = match pending {
            Some(mut pending) => {
                // Growth beyond the request is charged if the quota allows it; otherwise the audit
                // finds it.
                let _ = pending.adjust(growth);
                Ok(pending)
            }
            None => accounting::charge(Account::Device(device), growth, "cuGraphLaunch"),
        };
        let Ok(more) = pending.map(PendingCharge::into_charge) else {
            return;
        };
        self.pool_charges
            .entry(device)
            .and_modify(|charge| charge.units = charge.units.saturating_add(more.units))
            .or_insert(more);
    }

    fn shrink(&mut self, device: c_int, reserved: u64) {
        if let Some(charge) = self.pool_charges.get_mut(&device) {
            let target = u32::try_from(reserved.div_ceil(UNIT)).unwrap_or(u32::MAX);
            let excess = charge.units.saturating_sub(target);
            charge.units -= excess;
            accounting::discharge(Charge {
                units: excess,
                ..*charge
            });
        }
    }

    /// Counts the trim: every graph may have to take its memory again.
    fn after_trim(&mut self) {
        self.trims += 1;
        let devices: Vec<c_int> = self.pool_charges.keys().copied().collect();
        self.reconcile(&devices, Vec::new());
    }

    /// Trims every pool. Returns whether that freed anything. Running graphs keep their memory.
    fn reclaim(&mut self) -> bool {
        let charged: u64 = self.pool_charges.values().map(bytes).sum();
        let before = charged.max(self.reserved());
        for device in self.pool_charges.keys() {
            let _ =
                captures::with_relaxed_capture(|| driver!(cuDeviceGraphMemTrim(*device => c_int)));
        }
        let has_freed = self.reserved() < before;
        if has_freed {
            self.after_trim();
        }
        has_freed
    }

    /// Returns what all devices' graph pools have reserved.
    fn reserved(&self) -> u64 {
        let devices = self.pool_charges.keys();
        devices.filter_map(|device| reserved(*device)).sum()
    }
}

fn bytes(charge: &Charge) -> u64 {
    u64::from(charge.units) * UNIT
}

/// Returns what a device's graph pool has reserved.
fn reserved(device: c_int) -> Option<u64> {
    let mut bytes = 0_u64;
    let code = captures::with_relaxed_capture(|| {
        driver!(cuDeviceGetGraphMemAttribute(
            device => c_int, ATTR_RESERVED => c_int, &raw mut bytes => *mut u64,
        ))
    });
    (code == curesult::SUCCESS).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn need(allocations: &[u64]) -> Option<u64> {
        let mut need = Need::default();
        allocations.iter().for_each(|bytes| need.add(*bytes));
        need.bytes()
    }

    #[test]
    fn need_covers_the_measured_sizes() {
        assert_eq!(need(&[1]), Some(32 * MIB));
        assert_eq!(need(&[1, 1]), Some(32 * MIB));
        assert_eq!(need(&[40 * MIB]), Some(64 * MIB));
        assert_eq!(need(&[40 * MIB; 2]), Some(128 * MIB));
        assert_eq!(need(&[100 * MIB]), Some(128 * MIB));
    }

    #[test]
    fn need_counts_small_allocations_in_half_full_steps() {
        // Three fit in a step: ten take four.
        assert!(need(&[10 * MIB; 10]) >= Some(128 * MIB));
        assert_eq!(need(&[16 * MIB; 2]), Some(32 * MIB));
        assert_eq!(need(&[u64::MAX; 2]), Some(u64::MAX), "no quota has that");
    }
}
