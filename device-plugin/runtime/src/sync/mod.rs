//! Provides primitives for threads.
//!
//! * [`biased_lock`] is the lock of the allocator's hot path.
//! * [`blocking`] runs work that may block, for tasks.
//! * [`poller`] calls values regularly while they exist.

pub(crate) mod biased_lock;
pub(crate) mod blocking;
pub(crate) mod poller;
