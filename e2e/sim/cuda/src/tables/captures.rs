//! Records the stream captures in progress.

use crate::tables::graphs::Node;
use std::collections::BTreeMap;

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) mode: i32,
    pub(crate) valid: bool,
    pub(crate) nodes: Vec<Node>,
}

/// The captures of this image, by stream.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    pub(crate) streams: BTreeMap<u64, Capture>,
}
