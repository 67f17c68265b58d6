//! Records the allocation handles and the address reservations of virtual memory management.

use bursar_sim_state::object::{Object, ObjectPin};

use crate::abi::Code;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) object: Object,
    /// Created for export by this process; an imported handle cannot be exported (F4 in
    /// docs/internals/facts.md).
    pub(crate) exportable: bool,
    /// `cuMemRetainAllocationHandle` increments the number, `cuMemRelease` decrements it.
    ///
    /// A handle without references stays listed while it is mapped, because
    /// `cuMemRetainAllocationHandle` can return it again.
    pub(crate) references: u32,
    pub(crate) pin: Option<ObjectPin>,
}

/// All VMM handles and reserved ranges of this image.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    pub(crate) handles: BTreeMap<u64, Handle>,
    /// Length by address.
    pub(crate) reserved: BTreeMap<u64, u64>,
    handle_count: u64,
}

/// Keeps a bound or mapped object alive.
#[derive(Debug)]
pub(crate) struct PinnedObject(pub(crate) Object, pub(crate) ObjectPin);

impl Vmm {
    pub(crate) fn insert(&mut self, object: Object, exportable: bool, pin: ObjectPin) -> u64 {
        self.handle_count += 1;
        let handle = 0x5177_0000_0000 + self.handle_count * 0x10;
        self.handles.insert(
            handle,
            Handle {
                object,
                exportable,
                references: 1,
                pin: Some(pin),
            },
        );
        handle
    }

    pub(crate) fn find(&mut self, handle: u64) -> Result<&mut Handle, Code> {
        self.handles
            .get_mut(&handle)
            .filter(|found| found.references > 0)
            .ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn is_reserved(&self, address: u64, len: u64) -> bool {
        let around = self.reserved.range(..=address).next_back();
        around.is_some_and(|(base, room)| {
            address
                .checked_add(len)
                .is_some_and(|end| end <= base + room)
        })
    }
}
