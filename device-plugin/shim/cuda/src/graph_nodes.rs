//! Charges what the driver takes for the nodes of executable graphs.
//!
//! The instantiation of a graph takes memory for each chain of nodes and for each node. The context
//! keeps the memory past the graph's end, and later graphs use it (fact F24). So a context is
//! charged for the most that its graphs have taken at a time. The size that the driver takes
//! depends on the kernels' parameters too; the agent settles the difference.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::curesult::{self, CuResult};
use crate::fork_local::ForkLocal;
use crate::hooks::context_registry;
use crate::session_state::state;

/// A chain of nodes and each of its nodes take at most this, if their kernels have small parameters
/// (fact F24).
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

/// The context of each executable graph, and what its nodes take there.
static EXECS: ForkLocal<BTreeMap<u64, (u64, u64)>> = ForkLocal::new();

/// Whether there ever was an executable graph whose nodes take memory.
static MAY_HAVE_NODES: AtomicBool = AtomicBool::new(false);

/// Forgets the parent's graphs, in a forked child.
pub(crate) fn reset() {
    EXECS.reset();
    MAY_HAVE_NODES.store(false, Ordering::Relaxed);
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
    if context_registry::charge_graph((device, context), bytes, function).is_err() {
        return curesult::OUT_OF_MEMORY;
    }
    let answer = call();
    let ended = match answer {
        curesult::SUCCESS => {
            MAY_HAVE_NODES.store(true, Ordering::Relaxed);
            EXECS.lock().insert(executable(), (context, bytes))
        }
        _ => Some((context, bytes)),
    };
    if let Some((context, bytes)) = ended {
        context_registry::graph_ended(context, bytes);
    }
    answer
}

/// Forgets an executable graph that is about to be destroyed. Its context keeps the memory.
pub(crate) fn destroyed(executable: u64) {
    if MAY_HAVE_NODES.load(Ordering::Relaxed)
        && let Some((context, bytes)) = EXECS.lock().remove(&executable)
    {
        context_registry::graph_ended(context, bytes);
    }
}

/// Forgets the executable graphs of a destroyed context.
pub(crate) fn end_context(context: u64) {
    EXECS.lock().retain(|_, (of, _)| *of != context);
}
