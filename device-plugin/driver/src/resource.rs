//! Identifies the resources of a process, and describes what they allocate.
#![forbid(unsafe_code)]

mod origin;

pub use origin::Origin;

/// Labels the purpose of an allocation in logs and statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub &'static str);

/// State of a budget at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetSnapshot {
    /// Largest number of bytes in use.
    pub limit: u64,
    /// Bytes of live and retired blocks and of allocations in progress.
    pub used: u64,
}
