//! Charges the memory nodes of graphs by what each device's graph pool has reserved.
//!
//! Measured on an H200: instantiating a graph takes nothing. Its upload or first launch takes its
//! allocations in steps of 32 MiB. One of 40 MiB takes 64 MiB, two take 128, small ones share a
//! step. The pool keeps them, past the graph's end too, until it is trimmed. The graphs of a stream
//! share memory, those of others may not (CUDA programming guide, graph memory nodes). So the shim
//! records the needs of an executable graph with memory nodes. Before a call that may take memory
//! it charges what the stream's memory does not cover, and reconciles the pool after it.
//!
//! A launch waits while the same graph runs in another stream, and that graph may wait for another
//! thread of the program. So the lock is not held over a call. While a call runs, its [`Claim`]
//! keeps the memory charged that the call may take.
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
use crate::pools::POOLS;
use crate::session_state::state;

/// The graph pool takes memory in multiples of this (fact F15).
const POOL_STEP: u64 = 32 << 20;

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const ATTR_RESERVED: c_int = 2;

/// The most that an executable graph's memory nodes take, by device.
pub(crate) type Needs = BTreeMap<c_int, Need>;

/// The most that allocations take: large ones, which share no step, in steps; and the sum of small
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
    /// Bytes that graphs took on a device in a stream since pools were last trimmed. An entry has a
    /// step or more of its own, so the pool bounds their number.
    stream_memory: BTreeMap<(c_int, u64), u64>,
    /// The most that the running calls take of each device's pool.
    running: BTreeMap<c_int, Running>,
    /// How often pools were trimmed, which gave up memory that graphs will take again.
    trims: u64,
}

/// The sums of the claims of running calls.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Running {
    pending: u64,
    covered: u64,
}

/// Where a graph is launched.
#[derive(Clone, Copy)]
struct Launch {
    executable: u64,
    stream: u64,
}

/// The memory of a device's graph pool that a running call may take.
struct Claim {
    device: c_int,
    /// The charge of what the stream's memory does not cover.
    pending: Option<PendingCharge>,
    /// Bytes of memory that the pool is charged already. A trim may free that memory before the
    /// call uses it.
    covered: u64,
}

/// A call that is about to be made.
struct Begun {
    claims: Vec<Claim>,
    /// [`GraphRegistry::trims`] before the call.
    trims: u64,
}

/// A denied charge.
struct Refusal {
    device: c_int,
    bytes: u64,
}

/// Whether there ever was an executable graph with memory nodes.
static MAY_HAVE_MEMORY: AtomicBool = AtomicBool::new(false);

static GRAPHS: ForkLocal<GraphRegistry> = ForkLocal::new();

/// Locks the registry.
fn graphs() -> MutexGuard<'static, GraphRegistry> {
    // The state comes first, because it resets the registry in a forked child.
    let _ = state();
    GRAPHS.lock()
}

/// Forgets the parent's graphs, in a forked child.
pub(crate) fn reset() {
    GRAPHS.reset();
    MAY_HAVE_MEMORY.store(false, Ordering::Relaxed);
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
    let known = graphs()
        .execs
        .get(&executable)
        .map(|graph| graph.needs.clone());
    let Some(needs) = known else {
        return call();
    };
    let stream = streams::stream_id(stream);
    with_charge(&needs, Some(Launch { executable, stream }), function, call)
}

/// Makes a call that instantiates and uploads a graph, and charges its memory. The graph has no
/// handle yet.
pub(crate) fn charge_upload(
    needs: &Needs,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    with_charge(needs, None, function, call)
}

/// Makes a call that may take `needs`. Before it denies the call, it trims the pools, and then
/// again after all work has ended.
fn with_charge(
    needs: &Needs,
    launch: Option<Launch>,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let mut begun = graphs().begin(needs, launch);
    for retry in [reclaim, reclaim_after_sync] {
        if begun.is_err() && retry() {
            begun = graphs().begin(needs, launch);
        }
    }
    match begun {
        Ok(begun) => {
            let answer = call();
            graphs().end(begun, launch.filter(|_| answer == curesult::SUCCESS));
            answer
        }
        Err(Refusal { device, bytes }) => {
            if let Some(account) = accounting::account_index(Account::Device(device)) {
                accounting::report_denial(account, bytes, function);
            }
            curesult::OUT_OF_MEMORY
        }
    }
}

/// Makes a call that frees graph memory: a trim, or the end of a context. The shim holds no lock
/// over the call, because the call may wait for GPU work that waits for another thread.
pub(crate) fn with_trim(call: impl FnOnce() -> CuResult) -> CuResult {
    if !may_have_memory() {
        return call();
    }
    let answer = call();
    graphs().after_trim();
    answer
}

/// Trims what no graph uses. Returns whether that discharged anything; does nothing while the lock
/// is held, because the calling thread may hold it.
pub(crate) fn reclaim() -> bool {
    if !may_have_memory() {
        return false;
    }
    let Some(devices) = GRAPHS.try_lock().map(|graphs| graphs.devices()) else {
        return false;
    };
    let trim = |device: &c_int| {
        let before = reserved(*device);
        let _ = captures::with_relaxed_capture(|| driver!(cuDeviceGraphMemTrim(*device => c_int)));
        before
            .zip(reserved(*device))
            .is_some_and(|(before, now)| now < before)
    };
    let has_freed = devices.iter().filter(|device| trim(device)).count() > 0;
    let mut graphs = graphs();
    let before = graphs.charged();
    if has_freed {
        graphs.after_trim();
    } else {
        graphs.reconcile_all();
    }
    graphs.charged() < before
}

/// Waits for all work and reclaims, where that may free memory. Returns whether a denied charge may
/// succeed now. The caller does not hold the lock, because the work may wait for another thread.
fn reclaim_after_sync() -> bool {
    let charged = graphs().charged();
    if (charged == 0 && !POOLS.may_free_after_sync()) || captures::may_be_active() {
        return false;
    }
    let _ = driver!(cuCtxSynchronize());
    reclaim();
    true
}

impl GraphRegistry {
    /// Charges what a call may take, and counts the call as running.
    fn begin(&mut self, needs: &Needs, launch: Option<Launch>) -> Result<Begun, Refusal> {
        let is_placed = launch.is_some_and(|launch| self.is_placed(launch));
        let mut claims = Vec::new();
        for (device, need) in needs {
            let bytes = need.bytes().unwrap_or(u64::MAX);
            let covered = match launch {
                Some(_) if is_placed => bytes,
                Some(Launch { stream, .. }) => {
                    let held = self.stream_memory.get(&(*device, stream));
                    held.copied().unwrap_or(0).min(bytes)
                }
                None => 0,
            };
            claims.push(Claim {
                device: *device,
                pending: self.charge(*device, bytes - covered)?,
                covered,
            });
        }
        for claim in &claims {
            let running = self.running.entry(claim.device).or_default();
            running.pending += claim.pending_bytes();
            running.covered += claim.covered;
        }
        Ok(Begun {
            claims,
            trims: self.trims,
        })
    }

    /// Charges `bytes` beyond what the pool has reserved; nothing for zero bytes.
    fn charge(&mut self, device: c_int, bytes: u64) -> Result<Option<PendingCharge>, Refusal> {
        if bytes == 0 {
            return Ok(None);
        }
        self.reconcile(device, None);
        match accounting::charge_unreported(Account::Device(device), bytes) {
            Ok(pending) => Ok(Some(pending)),
            Err(Denied) => Err(Refusal { device, bytes }),
        }
    }

    /// Ends a call, and settles its claims. `launch` is where a graph has got its memory.
    fn end(&mut self, begun: Begun, launch: Option<Launch>) {
        let launch = launch.filter(|_| begun.trims == self.trims);
        for claim in begun.claims {
            let (device, pending) = (claim.device, claim.pending_bytes());
            let running = self.running.entry(device).or_default();
            running.pending -= pending;
            running.covered -= claim.covered;
            let is_alone = *running == Running::default();
            let growth = self.reconcile(device, claim.pending).min(pending);
            // Beside other calls it is unknown which call the pool grew for.
            if let Some(Launch { stream, .. }) = launch.filter(|_| is_alone && growth > 0) {
                *self.stream_memory.entry((device, stream)).or_default() += growth;
            }
        }
        if let Some(launch) = launch {
            self.record_placement(launch);
        }
    }

    /// Returns whether a graph has taken its memory in a stream since pools were last trimmed.
    fn is_placed(&self, Launch { executable, stream }: Launch) -> bool {
        self.execs.get(&executable).is_some_and(|graph| {
            graph.placement.0 == self.trims && graph.placement.1.contains(&stream)
        })
    }

    fn record_placement(&mut self, Launch { executable, stream }: Launch) {
        if let Some(graph) = self.execs.get_mut(&executable) {
            if graph.placement.0 != self.trims || graph.placement.1.len() >= MAX_TRACKED_STREAMS {
                graph.placement = (self.trims, BTreeSet::new());
            }
            graph.placement.1.insert(stream);
        }
    }

    /// Makes the charge of a device's pool what this has reserved, using up the charge of a call
    /// that has ended. Returns the bytes that the charge grew by.
    fn reconcile(&mut self, device: c_int, ended: Option<PendingCharge>) -> u64 {
        let Some(reserved) = reserved(device) else {
            // The pool keeps its charge. The charge of the ended call is discharged on return.
            return 0;
        };
        let running = self.running.get(&device).copied().unwrap_or_default();
        let charged = self.pool_charges.get(&device).map_or(0, bytes);
        let growth = growth_to_charge(
            reserved.saturating_sub(charged),
            ended.as_ref().map_or(0, PendingCharge::bytes),
            running.pending,
        );
        if growth > 0 {
            self.grow(device, growth, ended)
        } else {
            drop(ended);
            self.shrink(device, reserved.saturating_add(running.covered));
            0
        }
    }

    /// Charges a pool's growth, and returns the charged bytes.
    fn grow(&mut self, device: c_int, growth: u64, pending: Option<PendingCharge>) -> u64 {
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
            return 0;
        };
        self.pool_charges
            .entry(device)
            .and_modify(|charge| charge.units = charge.units.saturating_add(more.units))
            .or_insert(more);
        bytes(&more)
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
        self.stream_memory.clear();
        self.reconcile_all();
    }

    fn reconcile_all(&mut self) {
        for device in self.devices() {
            self.reconcile(device, None);
        }
    }

    fn devices(&self) -> Vec<c_int> {
        self.pool_charges.keys().copied().collect()
    }

    /// Returns the bytes that all pools are charged.
    fn charged(&self) -> u64 {
        self.pool_charges.values().map(bytes).sum()
    }
}

impl Claim {
    fn pending_bytes(&self) -> u64 {
        self.pending.as_ref().map_or(0, PendingCharge::bytes)
    }
}

/// Returns how much of a pool's growth is charged when a call ends. The bytes that this call and
/// the running ones were charged before determine it. Running calls may have caused the growth.
/// Each of them keeps its charge until it ends, and charges its part then.
fn growth_to_charge(growth: u64, ended: u64, running: u64) -> u64 {
    growth.min(ended).max(growth.saturating_sub(running))
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
    #[test]
    fn forked_child_waits_for_no_lock_of_its_parent() {
        let _held = graphs();
        MAY_HAVE_MEMORY.store(true, Ordering::Relaxed);
        // SAFETY: the child only looks for a graph and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends a child that waits for the lock.
            unsafe { libc::alarm(10) };
            destroyed(7);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(may_have_memory())) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0, "a signal, or graphs of the parent");
    }

    #[test]
    fn growth_is_charged_once_for_calls_that_run_together() {
        assert_eq!(growth_to_charge(64, 64, 0), 64);
        assert_eq!(growth_to_charge(64, 128, 0), 64, "the call took less");
        assert_eq!(growth_to_charge(96, 64, 0), 96, "the call took more");
        // Another call that runs has taken 32 of its 64, or nothing yet.
        assert_eq!(growth_to_charge(96, 64, 64), 64);
        assert_eq!(growth_to_charge(64, 64, 64), 64);
        assert_eq!(growth_to_charge(32, 0, 64), 0, "it is the other call's");
        assert_eq!(growth_to_charge(96, 0, 64), 32);
    }
}
