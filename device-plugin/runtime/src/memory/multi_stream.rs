//! Memory that several streams use: what has to happen before and after work is submitted.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Access, Stream};
use crate::error::FreeError;
use crate::memory::slice::{MemoryError, Tracked};
use crate::memory::stream_sync::Order;
use crate::resource::{BlockUse, check_stream};

/// Memory, and in which streams it was used.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pub(crate) memory: Tracked,
    order: Mutex<Order<Stream>>,
    /// Whether all streams are waited for before it is freed.
    free_waits: bool,
}

/// The order of memory while work is being submitted: nobody else submits any that uses it.
pub(crate) type Held<'a> = MutexGuard<'a, Order<Stream>>;

impl SharedMemory {
    /// Memory whose resource has to be told of uses in other streams than its own.
    pub(crate) fn told(memory: Tracked) -> SharedMemory {
        SharedMemory::new(memory, false)
    }

    /// Memory whose streams are all waited for before it is freed.
    pub(crate) fn awaited(memory: Tracked) -> SharedMemory {
        SharedMemory::new(memory, true)
    }

    fn new(memory: Tracked, free_waits: bool) -> SharedMemory {
        SharedMemory {
            order: Mutex::new(Order::since(memory.stream.clone())),
            memory,
            free_waits,
        }
    }

    pub(crate) fn hold(&self) -> Held<'_> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a stream wait for what has to be done before the memory is used there.
    pub(crate) fn begin(
        &self,
        order: &Held<'_>,
        stream: &Stream,
        access: Access,
    ) -> Result<Option<BlockUse>, MemoryError> {
        self.memory.state.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        for other in order.before(stream, access) {
            stream.wait_for(&other)?;
        }
        if self.free_waits || *stream == self.memory.stream {
            return Ok(None);
        }
        Ok(Some(
            self.memory
                .resource
                .prepare_block_use(self.memory.at, stream)?,
        ))
    }

    /// Work that uses the memory is in the stream now, unless `submitted` says that it failed.
    pub(crate) fn end(
        &self,
        order: &mut Held<'_>,
        used: Option<BlockUse>,
        stream: &Stream,
        submitted: Option<Access>,
    ) -> Result<(), MemoryError> {
        if let Some(access) = submitted {
            order.note(stream, access);
            order.forget_reads(|stream| stream.is_idle() == Ok(true));
        }
        match used {
            Some(used) => Ok(self.memory.resource.finish_block_use(used, stream)?),
            None => Ok(()),
        }
    }

    /// Frees the memory and says how that went.
    pub(crate) fn free(&mut self) -> Result<(), FreeError> {
        self.wait_to_free();
        self.memory.free()
    }

    fn wait_to_free(&self) {
        if self.free_waits {
            // Where it fails the context is lost, and so is the work.
            let _ = self.settle(Access::ReadWrite);
        }
    }

    /// Waits, as the host, for what has to be done before it uses the memory.
    pub(crate) fn settle(&self, access: Access) -> Result<(), MemoryError> {
        // Nobody is kept from submitting while this waits.
        let streams = self.hold().before_host(access);
        for stream in &streams {
            stream.synchronize()?;
        }
        Ok(())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.wait_to_free();
    }
}
