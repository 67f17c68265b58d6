//! Implements `libcuda.so.1` for containers: forwards every call and charges those that allocate.
//!
//! Every function of the driver is exported ([`exports`]). Most jump straight to the real library
//! ([`forward`]). The functions that take or report memory are [`hooks`]: a hook charges the
//! container's quota before the driver call and adjusts the charge after it. Charges go to a credit
//! page that the agent fills ([`accounting`]).
//!
//! * Linear memory and arrays are charged to the GPU's quota. Managed memory is charged to a quota
//!   of its own, or without one to the quotas of all GPUs. The charge ends when the memory is freed
//!   or its context is destroyed ([`hooks::contexts`]).
//! * Stream-ordered memory is charged by what each pool has reserved ([`pools`]).
//! * Memory of `cuMemCreate` is charged until its last reference is gone ([`vmm`]).
//!
//! The table `symbols.txt` lists every other function that can take memory.
//!
//! The shim reports an error that poisons the process's contexts to the agent. The agent may order
//! it to execute the program again in the same process ([`poison`], [`reexec`]).
//!
//! * Loading the library does nothing, except that a container's first process saves its start
//!   state ([`reexec`]). The real library is opened at the first call ([`driver`]).
//! * The library reads no environment variable, lets no panic cross the ABI and bounds every wait.
//! * A forked child starts without a session ([`session_state`]): it inherits neither the credit
//!   page nor a held lock.
//! * While the agent is down, granted credit stays usable. Calls that need more credit wait for
//!   some seconds and then fail.
//!
//! Imports have one direction. From the lowest module: [`driver`], [`forward`], [`driver_calls`],
//! [`session_state`], [`agent_client`], [`accounting`], [`eviction`], then [`pools`] and
//! [`graphs`], then [`poison`], [`hooks`] and [`exports`]. Where a lower module must call higher
//! ones, this file lists their functions.

mod accounting;
mod agent_client;
mod alloc_table;
mod array_chunks;
mod chunk_table;
mod chunks;
mod compat;
mod curesult;
mod deferred_free;
mod driver;
mod driver_calls;
mod eviction;
mod exports;
mod fence;
mod fork_local;
mod forward;
mod graph_nodes;
mod graphs;
mod hooks;
mod location;
#[path = "../../common/included/old_glibc.rs"]
mod old_glibc;
mod poison;
mod pools;
mod reexec;
mod session_state;
#[path = "../../common/included/unwinder.rs"]
mod unwinder;
mod vmm;

/// The functions by which a forked child resets state of its parent. [`session_state`] calls them
/// once in each process.
static FORK_RESETS: [fn(); 12] = [
    accounting::reset,
    chunks::reset,
    array_chunks::reset,
    graph_nodes::reset,
    deferred_free::reset,
    pools::reset,
    hooks::vmm::reset,
    hooks::contexts::reset,
    hooks::context_registry::reset,
    hooks::managed_variables::reset,
    graphs::reset,
    driver_calls::captures::reset,
];

/// The functions that free cached memory of the process and return whether that lowered a charge.
/// [`accounting`] calls each of them before it denies a charge.
static RECLAIMERS: [fn() -> bool; 2] = [pools::reclaim, graphs::reclaim];
