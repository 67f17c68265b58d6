//! Records the loaded modules.

use std::collections::BTreeMap;

/// The modules of this image.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    /// The loaded modules, each with the address of its variable in managed memory.
    pub(crate) loaded: BTreeMap<u64, Option<u64>>,
    pub(crate) handle_count: u64,
}
