//! A layer that admits no allocation once its device's state is not good any more.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use crate::adaptor::upstream::{Under, pass_on};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::{Block, DeviceMemoryResource, Tag};
use crate::state::DeviceState;

/// A resource under a device's state: one load for each allocation. What was allocated before can still be freed.
#[derive(Debug)]
pub struct Supervised<R> {
    under: Under<R>,
    state: Arc<DeviceState>,
}

impl<R: DeviceMemoryResource> Supervised<R> {
    /// Admits while the state is good.
    pub fn new(resource: R, state: Arc<DeviceState>) -> Self {
        Supervised {
            under: Under::new(resource),
            state,
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Supervised<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.state.check()?;
        self.under.allocate(layout, stream, tag)
    }

    fn kind(&self) -> &'static str {
        "supervised"
    }

    pass_on!(
        deallocate,
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}
