//! Refuses allocations once the device's state is stale.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::physical::{PhysicalBlock, PhysicalMemoryResource};
use crate::resource::{Block, DeviceMemoryResource, Tag};
use crate::state::DeviceState;

/// Check of a device's state before each allocation, at the cost of one load. Older blocks can
/// still be freed.
#[derive(Debug)]
pub struct StateGate<R> {
    upstream: Upstream<R>,
    state: Arc<DeviceState>,
}

impl<R> StateGate<R> {
    /// Allocates from a resource while the state is valid.
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
        "state-gate"
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

impl<R: PhysicalMemoryResource> PhysicalMemoryResource for StateGate<R> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        self.state.check()?;
        self.upstream.create(bytes, tag)
    }

    fn kind(&self) -> &'static str {
        "state-gate"
    }

    forward!(release, physical_identity, budget_snapshot);
}
