//! Attests that containers are held to their quota: our mounts in place, the shim where a driver is used.
//!
//! | module | job |
//! |---|---|
//! | [`mounts`] | which file a path leads to, by a mount table: pure |
//! | [`maps`] | which files of a driver a process has mapped: pure |
//! | [`verdict`] | what is amiss: pure |
//! | [`ask`] | asks which device nodes a container may open |
//! | [`look`] | reads `/proc` of the containers that have GPUs |

pub mod ask;
pub mod look;
pub mod maps;
pub mod mounts;
pub mod verdict;

pub use look::{Around, Attested, Attestor, Running, Target};
pub use verdict::{Lack, Reason};
