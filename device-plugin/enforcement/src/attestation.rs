//! Attests that containers are under enforcement: mounts in place, the shim loaded before the
//! driver.
//!
//! | module | job |
//! |---|---|
//! | [`mounts`] | resolves a path by a mount table: pure |
//! | [`maps`] | finds the driver's files in a memory map: pure |
//! | [`evaluate`] | decides which gap in the enforcement a container has: pure |
//! | [`device_access`] | asks which device nodes a container may open |
//! | [`probe`] | reads `/proc` of the containers that have GPUs |

pub mod device_access;
pub mod evaluate;
pub mod maps;
pub mod mounts;
pub mod probe;

pub use evaluate::{EnforcementGap, GapReason};
pub(crate) use probe::{AttestationTarget, AttestedContainer, PodAttestor};
pub use probe::{AttestedProcess, HostView};
