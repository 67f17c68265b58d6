//! Records the memory that is bound to multicast objects.

use crate::abi::Code;
use crate::tables::vmm::PinnedObject;
use std::collections::BTreeMap;

/// Memory bound at an offset.
#[derive(Debug)]
pub(crate) struct Binding {
    pub(crate) len: u64,
    pub(crate) memory: PinnedObject,
}

#[derive(Debug)]
pub(crate) struct Multicast {
    pub(crate) size: u64,
    pub(crate) bindings: BTreeMap<u64, Binding>,
}

/// All multicast objects of this image, by handle.
#[derive(Debug, Default)]
pub(crate) struct Multicasts {
    pub(crate) live: BTreeMap<u64, Multicast>,
    pub(crate) handle_count: u64,
}

impl Multicasts {
    pub(crate) fn find(&mut self, object: u64) -> Result<&mut Multicast, Code> {
        self.live.get_mut(&object).ok_or(Code::INVALID_VALUE)
    }
}
