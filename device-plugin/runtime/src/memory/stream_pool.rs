//! Shares a few streams of a device between many users.
#![forbid(unsafe_code)]

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Context, Stream};
use crate::memory::error::MemoryError;
use crate::runtime::DeviceRuntime;
use crate::state::DeviceState;

/// Round-robin pool of streams, each created on first use.
#[derive(Debug)]
pub struct StreamPool {
    context: Context,
    state: Arc<DeviceState>,
    size: NonZeroUsize,
    round_robin: Mutex<RoundRobin>,
}

#[derive(Debug, Default)]
struct RoundRobin {
    streams: Vec<Stream>,
    next: usize,
}

impl StreamPool {
    /// Creates a pool of `size` streams of a runtime's device. The runtime has one of its own:
    /// [`DeviceRuntime::streams`].
    pub fn new(runtime: &DeviceRuntime, size: NonZeroUsize) -> StreamPool {
        StreamPool::with_parts(runtime.context(), runtime.state(), size)
    }

    pub(crate) fn with_parts(
        context: &Context,
        state: &Arc<DeviceState>,
        size: NonZeroUsize,
    ) -> StreamPool {
        StreamPool {
            context: context.clone(),
            state: Arc::clone(state),
            size,
            round_robin: Mutex::default(),
        }
    }

    /// Returns the next stream. Other users may have the same stream, and their work is ordered
    /// with this user's.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or the driver's error for a new stream; the next call tries again.
    pub fn next(&self) -> Result<Stream, MemoryError> {
        self.state.check()?;
        let mut turns = self
            .round_robin
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let turn = turns.next;
        if turn == turns.streams.len() {
            turns.streams.push(self.context.stream()?);
        }
        turns.next = (turn + 1) % self.size;
        Ok(turns.streams[turn].clone())
    }

    /// Waits for the work of all streams.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), MemoryError> {
        // A copy, so that the wait does not block users of the pool.
        let streams = self
            .round_robin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .streams
            .clone();
        Ok(streams.iter().try_for_each(Stream::synchronize)?)
    }
}
