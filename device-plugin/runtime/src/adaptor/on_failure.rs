//! A layer that asks its owner what to do where there is no room.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::fmt;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::{ErrorClass, ResourceError};
use crate::resource::{Block, DeviceMemoryResource, Tag};

/// An allocation for which there was no room.
#[derive(Debug)]
pub struct AllocationFailure<'a> {
    /// What was asked for.
    pub layout: Layout,
    /// What for.
    pub tag: Tag,
    /// How often it was tried, this time included.
    pub attempts: u32,
    /// What came of it.
    pub error: &'a ResourceError,
}

/// What the owner says to a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureAction {
    /// Something was freed: try again.
    Retry,
    /// The error is the caller's.
    Fail,
}

/// Calls its owner where there is no room; other errors pass. The owner may free blocks, through this layer too.
pub struct OnFailure<R, F> {
    upstream: Upstream<R>,
    callback: F,
}

impl<R: fmt::Debug, F> fmt::Debug for OnFailure<R, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnFailure")
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

impl<R: DeviceMemoryResource, F: Fn(&AllocationFailure<'_>) -> FailureAction + Send + Sync>
    OnFailure<R, F>
{
    /// Calls `callback`, in the thread that allocates, for as long as it says [`Answer::Retry`].
    pub fn new(resource: R, callback: F) -> Self {
        OnFailure {
            upstream: Upstream::new(resource),
            callback,
        }
    }
}

impl<R: DeviceMemoryResource, F: Fn(&AllocationFailure<'_>) -> FailureAction + Send + Sync>
    DeviceMemoryResource for OnFailure<R, F>
{
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let mut attempts = 0;
        loop {
            let error = match self.upstream.allocate(layout, stream, tag) {
                Err(error) if error.class() == ErrorClass::OutOfMemory => error,
                other => return other,
            };
            attempts += 1;
            let failure = AllocationFailure {
                layout,
                tag,
                attempts,
                error: &error,
            };
            if (self.callback)(&failure) == FailureAction::Fail {
                return Err(error);
            }
        }
    }

    fn kind(&self) -> &'static str {
        "failure-callback"
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
