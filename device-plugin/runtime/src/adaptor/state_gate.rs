//! A layer that admits no allocation once its device's state is not good any more.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::{Block, DeviceMemoryResource, Tag};
use crate::state::DeviceState;

/// A resource under a device's state: one load for each allocation. What was allocated before can still be freed.
#[derive(Debug)]
pub struct StateGate<R> {
    upstream: Upstream<R>,
    state: Arc<DeviceState>,
}

impl<R: DeviceMemoryResource> StateGate<R> {
    /// Admits while the state is good.
    pub fn new(resource: R, state: Arc<DeviceState>) -> Self {
        StateGate {
            upstream: Upstream::new(resource),
            state,
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for StateGate<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.state.check()?;
        self.upstream.allocate(layout, stream, tag)
    }

    fn kind(&self) -> &'static str {
        "supervised"
    }

    forward!(
        deallocate,
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}
