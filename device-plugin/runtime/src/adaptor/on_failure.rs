//! Calls back when the upstream is out of memory.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::fmt;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::{ErrorClass, ResourceError};
use crate::resource::{Block, DeviceMemoryResource, Tag};

/// Allocation that ran out of memory.
#[derive(Debug)]
pub struct AllocationFailure<'a> {
    /// Requested size and alignment.
    pub layout: Layout,
    /// Purpose of the allocation.
    pub tag: Tag,
    /// Number of attempts so far.
    pub attempts: u32,
    /// Error of the last attempt.
    pub error: &'a ResourceError,
}

/// Decision of the callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureAction {
    /// Try again, because the callback freed memory.
    Retry,
    /// Return the error to the caller.
    Fail,
}

/// Callback over an upstream resource, for out-of-memory errors only. The callback may free blocks
/// through this adaptor.
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
    /// Calls `callback` in the allocating thread, as long as it returns [`FailureAction::Retry`].
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
