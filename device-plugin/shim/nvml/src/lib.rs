//! `libnvidia-ml.so.1` as a container sees it.
//!
//! Every function of NVML is exported and forwarded to the real library by one indirect jump, as in the
//! shim of `libcuda` whose trampolines these are ([`forward`]). The table `nvml-symbols.txt` lists them.
//! Functions that say how much memory a device has, or who uses it, are [`hooks`]: they show the quota as
//! the total, what the container uses as used, and its own processes only. The agent is asked for both
//! ([`container`]): it is the ledger, and NVML knows pid namespaces, not containers.
//!
//! * Loading the library does nothing: the real one is opened ([`real`]) at the first call.
//! * No environment variable is read, no panic crosses the ABI, nothing waits without a bound.
//! * A forked child may inherit a held lock: none is ever waited for.
//! * With the agent away, what it said last is shown; where it never said anything, the call fails with
//!   UNKNOWN. The whole card is never shown.
//! * Functions that change a device are forwarded: the driver refuses them to who lacks CAP_SYS_ADMIN.

mod agent_client;
mod nvml_return;
#[macro_use]
#[path = "../../src/trampoline.rs"]
#[allow(unused_macros, reason = "NVML's answers are not looked at")]
mod trampoline;
mod driver;
#[path = "../../src/forward.rs"]
#[allow(
    dead_code,
    unused_macros,
    reason = "NVML exports no variables, and the table refuses no function"
)]
mod forward;
mod hooks;
#[path = "../../src/library.rs"]
mod library;
#[path = "../../src/old_glibc.rs"]
mod old_glibc;
#[path = "../../src/unwinder.rs"]
mod unwinder;
