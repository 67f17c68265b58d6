//! Attests that containers are held to their quota: our mounts in place, the shim where a driver is used.
//!
//! | module | job |
//! |---|---|
//! | [`mounts`] | which file a path leads to, by a mount table: pure |
//! | [`maps`] | which files of a driver a process has mapped: pure |
//! | [`evaluate`] | what is amiss: pure |
//! | [`device_access`] | asks which device nodes a container may open |
//! | [`probe`] | reads `/proc` of the containers that have GPUs |

pub mod device_access;
pub mod evaluate;
pub mod maps;
pub mod mounts;
pub mod probe;

pub use evaluate::{EnforcementGap, GapReason};
pub use probe::{AttestationTarget, AttestedContainer, AttestedProcess, HostView, PodAttestor};
