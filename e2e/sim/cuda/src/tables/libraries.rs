//! Records the loaded libraries.

use std::collections::BTreeMap;

/// The libraries of this image.
#[derive(Debug, Default)]
pub(crate) struct Libraries {
    /// The loaded libraries, each with the address of its variable in managed memory.
    pub(crate) loaded: BTreeMap<u64, Option<u64>>,
    pub(crate) handle_count: u64,
}
