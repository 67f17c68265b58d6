//! A few streams of a device that many share.
#![forbid(unsafe_code)]

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Context, Stream};
use crate::memory::slice::MemoryError;
use crate::runtime::DeviceRuntime;
use crate::state::DeviceState;

/// Gives out its streams in turn; each is made when it is first due.
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
    /// A pool of so many streams of a runtime's device.
    pub fn new(runtime: &DeviceRuntime, size: NonZeroUsize) -> StreamPool {
        StreamPool {
            context: runtime.context().clone(),
            state: Arc::clone(runtime.state()),
            size,
            round_robin: Mutex::default(),
        }
    }

    /// The stream whose turn it is. Others may have it too: what is submitted to it waits for theirs.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or what the driver answered to making one; the next call tries again.
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

    /// Waits for the work of all of them.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
    pub fn synchronize(&self) -> Result<(), MemoryError> {
        // A copy: waiting holds up nobody who wants a stream.
        let made = self
            .round_robin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .streams
            .clone();
        Ok(made.iter().try_for_each(Stream::synchronize)?)
    }
}
