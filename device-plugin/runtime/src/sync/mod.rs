//! Provides primitives for threads.
//!
//! * [`blocking`] runs work that may block, for tasks.
//! * [`poller`] calls values regularly while they exist.

pub(crate) mod blocking;
pub(crate) mod poller;
