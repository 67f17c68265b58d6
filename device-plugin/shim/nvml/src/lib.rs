//! Implements `libnvidia-ml.so.1` for containers: shows the quota and the container's own
//! processes.
//!
//! Every function of NVML is exported ([`exports`]) and forwarded to the real library by one
//! indirect jump ([`forward`]). The table `nvml-symbols.txt` lists them.
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
mod driver;
mod exports;
mod forward;
mod hooks;
mod nvml_return;
#[path = "../../common/included/old_glibc.rs"]
mod old_glibc;
#[path = "../../common/included/unwinder.rs"]
mod unwinder;
