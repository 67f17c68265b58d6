//! Records every allocation and mapping of the process image, by address.

use crate::tables::pieces::Pieces;
use bursar_sim_state::object::Object;

use std::collections::BTreeMap;

/// The kind of an allocation, which determines how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocationKind {
    /// Charged to the image; a piece by its chunk.
    Linear,
    /// A variable of a module, charged to the image.
    Variable,
    /// Linear memory that was exported and became an object. The object is charged.
    Shared(Object),
    /// Another process's linear memory, opened from its IPC handle.
    IpcOpened(Object),
    /// From the pool with this handle. The pool is charged.
    Pool(u64),
    /// An address that a captured allocation returned; no memory exists before the graph is
    /// launched.
    Captured,
    /// Managed memory, which no process is charged for.
    Managed,
    /// Pinned host memory, which no GPU is charged for.
    Host,
    /// The program's host memory, registered with `cuMemHostRegister`.
    HostRegistered,
    /// A mapping of a VMM object; freed by unmapping.
    Mapped(Object),
}

/// An allocation or mapping at an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) kind: AllocationKind,
    /// The context whose end frees the allocation; 0 for none.
    pub(crate) context: u64,
    pub(crate) unit: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// All allocations of this image, by address.
#[derive(Debug, Default)]
pub(crate) struct AddressSpace {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// The chunks of linear memory.
    pub(crate) pieces: Pieces,
    /// The chunks of managed memory.
    pub(crate) managed_pieces: Pieces,
}

impl AddressSpace {
    /// The allocation that contains an address, with its start.
    pub(crate) fn find_containing(&self, address: u64) -> Option<(u64, Allocation)> {
        let (base, found) = self.allocations.range(..=address).next_back()?;
        (address - base < found.len).then_some((*base, *found))
    }

    /// Whether any byte of a range is in an allocation.
    pub(crate) fn overlaps(&self, address: u64, len: u64) -> bool {
        let mut before_end = self.allocations.range(..address.saturating_add(len));
        let last = before_end.next_back();
        last.is_some_and(|(base, found)| base + found.len > address)
    }

    /// Whether every byte of a range is accessible. The range may span adjacent VMM mappings.
    pub(crate) fn is_accessible(&self, address: u64, len: u64, write: bool) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut next = address;
        while next < end {
            match self.find_containing(next) {
                Some((base, found))
                    if if write {
                        found.writable
                    } else {
                        found.readable
                    } =>
                {
                    next = base + found.len
                }
                _ => return false,
            }
        }
        true
    }
}
