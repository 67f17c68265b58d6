//! Identifies the resource that allocated a block.
#![forbid(unsafe_code)]

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies one resource in this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(NonZeroU64);

impl Origin {
    /// Returns an origin that no other resource has.
    pub fn unique() -> Origin {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // A process cannot create 2^64 resources.
        Origin(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "resource {}", self.0)
    }
}
