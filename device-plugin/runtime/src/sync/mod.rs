//! Locks of the allocator's hot path.

pub(crate) mod biased_lock;
