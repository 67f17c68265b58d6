//! Records the loaded libraries.

use std::collections::BTreeSet;

/// The libraries of this image.
#[derive(Debug, Default)]
pub(crate) struct Libraries {
    pub(crate) loaded: BTreeSet<u64>,
    pub(crate) handle_count: u64,
}
