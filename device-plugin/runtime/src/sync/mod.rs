//! Provides primitives for threads.
//!
//! * [`blocking`] runs work that may block, for tasks.

pub(crate) mod blocking;
