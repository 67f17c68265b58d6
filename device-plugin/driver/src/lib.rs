//! The CUDA driver, as Bursar's own processes and the allocator runtime use it.
//!
//! * [`driver`] calls `libcuda.so.1`. Only this module contains `unsafe`.
//! * [`physical`] creates memory that has no address and needs no context.
//! * [`no_context`] is the runtime of a process that must never have a context.
//! * [`account`] counts the bytes of a budget.
//! * [`resource`] identifies resources and describes budgets.
//! * [`state`] says whether the memory of this process image on a device is still valid.
//! * [`error`] classifies each failure and says whether a retry can succeed.

pub mod account;
pub mod driver;
pub mod error;
pub mod no_context;
pub mod physical;
pub mod resource;
pub mod state;

pub use no_context::NoContextRuntime;
