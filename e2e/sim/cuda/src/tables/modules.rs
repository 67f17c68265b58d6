//! Records the loaded modules.

use std::collections::BTreeSet;

/// The modules of this image.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    pub(crate) loaded: BTreeSet<u64>,
    pub(crate) handle_count: u64,
}
