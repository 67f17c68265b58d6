//! Implements `libnvidia-ml.so.1` for containers: shows the quota and the container's own
//! processes.
//!
//! Every function of NVML is exported and forwarded to the real library by one indirect jump, with
//! the trampolines of the shim of `libcuda` ([`forward`]). The table `nvml-symbols.txt` lists them.
//! Functions that report a device's memory or its processes are [`hooks`]. They show the quota as
//! the total, the container's usage as used, and its own processes only. The agent answers both
//! queries ([`agent_client`]), because NVML knows pid namespaces but no containers.
//!
//! * Loading the library does nothing: the real one is opened ([`driver`]) at the first call.
//! * The library reads no environment variable, lets no panic cross the ABI and bounds every wait.
//! * A forked child may inherit a held lock, so no hook waits for a lock.
//! * While the agent is down, its last answer is shown. Without one the call fails with UNKNOWN.
//!   The whole card is never shown.
//! * Functions that change a device are forwarded: the driver refuses them to processes without
//!   CAP_SYS_ADMIN.

mod agent_client;
mod nvml_return;
#[macro_use]
#[path = "../../src/trampoline.rs"]
#[allow(unused_macros, reason = "NVML's answers are not looked at")]
mod trampoline;
mod driver;
#[path = "../../src/exports.rs"]
#[allow(
    dead_code,
    unused_macros,
    reason = "NVML exports no variables, and the table refuses no function"
)]
mod exports;
#[path = "../../src/forward.rs"]
mod forward;
mod hooks;
#[path = "../../src/library.rs"]
mod library;
#[path = "../../src/old_glibc.rs"]
mod old_glibc;
#[path = "../../src/unwinder.rs"]
mod unwinder;
