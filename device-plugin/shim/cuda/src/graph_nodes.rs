//! Charges what the driver takes for the nodes of executable graphs.
//!
//! The instantiation of a graph takes memory for each chain of nodes and for each node. The context
//! keeps the memory past the graph's end, and later graphs use it (fact F24). So a context is
//! charged for the most that its graphs have taken at a time. The size that the driver takes
//! depends on the kernels' parameters too; the agent settles the difference.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::accounting::{self, Account, Denied};
use crate::alloc_table::Charge;
use crate::chunks::CHUNK;
use crate::curesult::{self, CuResult};
use crate::fork_local::ForkLocal;
use crate::session_state::state;

/// What a chain of nodes takes, and what each node takes beside it, as the driver does at most for
/// kernels with small parameters (fact F24).
const CHAIN_BYTES: u64 = 112 << 10;
const NODE_BYTES: u64 = 2688;

/// The nodes of a graph and of its child graphs that take memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeCounts {
    /// Nodes that depend on no other: each begins a chain.
    pub(crate) roots: u64,
    /// Kernels, copies and calls of the host.
    pub(crate) nodes: u64,
}

impl NodeCounts {
    /// Returns the bytes that an executable graph takes.
    pub(crate) fn bytes(self) -> u64 {
        let chains = self.roots.min(self.nodes).saturating_mul(CHAIN_BYTES);
        chains.saturating_add(self.nodes.saturating_mul(NODE_BYTES))
    }
}

/// The memory of a context's graphs.
#[derive(Default)]
struct Memory {
    used: u64,
    charges: Vec<Charge>,
    charged: u64,
}

#[derive(Default)]
struct Registry {
    contexts: BTreeMap<u64, Memory>,
    /// The context of each executable graph, and what its nodes take there.
    execs: BTreeMap<u64, (u64, u64)>,
}

static REGISTRY: ForkLocal<Registry> = ForkLocal::new();

/// Whether there ever was an executable graph whose nodes take memory.
static MAY_HAVE_NODES: AtomicBool = AtomicBool::new(false);

/// Forgets the parent's graphs, in a forked child.
pub(crate) fn reset() {
    REGISTRY.reset();
    MAY_HAVE_NODES.store(false, Ordering::Relaxed);
}

impl Registry {
    /// Counts a graph's memory, and charges what no earlier graph has taken.
    fn reserve(&mut self, device: i32, context: u64, bytes: u64) -> Result<(), Denied> {
        let memory = self.contexts.entry(context).or_default();
        let used = memory.used.saturating_add(bytes);
        let needed = used.checked_next_multiple_of(CHUNK).ok_or(Denied)?;
        let growth = needed.saturating_sub(memory.charged);
        if growth > 0 {
            let charge = accounting::charge_unreported(Account::Device(device), growth)?;
            memory.charges.push(charge.into_charge());
            memory.charged += growth;
        }
        memory.used = used;
        Ok(())
    }

    fn release(&mut self, context: u64, bytes: u64) {
        if let Some(memory) = self.contexts.get_mut(&context) {
            memory.used = memory.used.saturating_sub(bytes);
        }
    }
}

/// Makes a call that instantiates a graph, and charges its nodes before. `executable` returns the
/// new handle. The shim holds no lock over the call.
pub(crate) fn instantiate(
    counts: NodeCounts,
    (device, context): (i32, u64),
    function: &str,
    call: impl FnOnce() -> CuResult,
    executable: impl FnOnce() -> u64,
) -> CuResult {
    let bytes = counts.bytes();
    if bytes == 0 || context == 0 || state().is_none() {
        return call();
    }
    let reserved = REGISTRY.lock().reserve(device, context, bytes);
    if reserved.is_err() {
        if let Some(account) = accounting::account_index(Account::Device(device)) {
            accounting::report_denial(account, bytes, function);
        }
        return curesult::OUT_OF_MEMORY;
    }
    let answer = call();
    let mut registry = REGISTRY.lock();
    let before = match answer {
        curesult::SUCCESS => {
            MAY_HAVE_NODES.store(true, Ordering::Relaxed);
            registry.execs.insert(executable(), (context, bytes))
        }
        _ => Some((context, bytes)),
    };
    if let Some((context, bytes)) = before {
        registry.release(context, bytes);
    }
    answer
}

/// Forgets an executable graph that is about to be destroyed. Its context keeps the memory.
pub(crate) fn destroyed(executable: u64) {
    if MAY_HAVE_NODES.load(Ordering::Relaxed) {
        let mut registry = REGISTRY.lock();
        if let Some((context, bytes)) = registry.execs.remove(&executable) {
            registry.release(context, bytes);
        }
    }
}

/// Discharges the memory of a destroyed context's graphs.
pub(crate) fn end_context(context: u64) {
    let mut registry = REGISTRY.lock();
    registry.execs.retain(|_, (of, _)| *of != context);
    let ended = registry.contexts.remove(&context).unwrap_or_default();
    drop(registry);
    ended.charges.into_iter().for_each(accounting::discharge);
}
