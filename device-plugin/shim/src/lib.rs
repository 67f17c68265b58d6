//! `libcuda.so.1` as a container sees it.
//!
//! Every function of the driver is exported and forwarded to the real library by one indirect jump
//! ([`forward`]), but for those that take or report memory ([`hooks`]). These charge the container's
//! quota before the call and settle it after, in the [`ledger`]: a credit page that the agent fills.
//!
//! Charged today: linear memory and arrays against the GPU's quota, managed memory against its own,
//! until it is freed or its context ends ([`hooks::contexts`]); stream-ordered memory by what each pool
//! has reserved ([`pools`]); memory of `cuMemCreate` until nothing refers to it ([`vmm`]). The table `symbols.txt` lists what else
//! can take memory.
//!
//! A function that answers with a code which poisons its context is reported to the agent, and the program may be
//! executed again in its place ([`poison`], [`again`]).
//!
//! * Loading the library does nothing, but in a container's first process, which remembers how it was started
//!   ([`again`]): the real one is opened ([`real`]) at the first call.
//! * No environment variable is read, no panic crosses the ABI, nothing waits without a bound.
//! * A forked child has a state of its own ([`state`]): neither the page nor a held lock is inherited.
//! * With the agent away, what is granted stays usable, and more is waited for, for some seconds, and then refused.

mod compat;
mod curesult;
mod fork_local;
mod reexec;
#[macro_use]
mod trampoline;
mod accounting;
mod agent_client;
mod alloc_table;
mod deferred_free;
mod driver;
mod fence;
mod forward;
mod graphs;
mod hooks;
mod library;
mod location;
mod old_glibc;
mod poison;
mod pools;
mod session_state;
mod unwinder;
mod vmm;
