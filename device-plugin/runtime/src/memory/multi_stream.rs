//! Memory that several streams use: what has to happen before and after work is submitted.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Access, Stream};
use crate::error::FreeError;
use crate::memory::slice::{MemoryError, OwnedBlock};
use crate::memory::stream_sync::StreamSync;
use crate::resource::{BlockUse, check_stream};

/// Memory, and in which streams it was used.
#[derive(Debug)]
pub(crate) struct MultiStreamMemory {
    pub(crate) memory: OwnedBlock,
    sync: Mutex<StreamSync<Stream>>,
    /// Whether all streams are waited for before it is freed.
    synchronize_on_free: bool,
}

/// The order of memory while work is being submitted: nobody else submits any that uses it.
pub(crate) type SyncGuard<'a> = MutexGuard<'a, StreamSync<Stream>>;

impl MultiStreamMemory {
    /// Memory whose resource has to be told of uses in other streams than its own.
    pub(crate) fn new_reported(memory: OwnedBlock) -> MultiStreamMemory {
        MultiStreamMemory::new(memory, false)
    }

    /// Memory whose streams are all waited for before it is freed.
    pub(crate) fn new_synchronized(memory: OwnedBlock) -> MultiStreamMemory {
        MultiStreamMemory::new(memory, true)
    }

    fn new(memory: OwnedBlock, free_waits: bool) -> MultiStreamMemory {
        MultiStreamMemory {
            sync: Mutex::new(StreamSync::new(memory.stream.clone())),
            memory,
            synchronize_on_free: free_waits,
        }
    }

    pub(crate) fn lock(&self) -> SyncGuard<'_> {
        self.sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a stream wait for what has to be done before the memory is used there.
    pub(crate) fn begin_use(
        &self,
        order: &SyncGuard<'_>,
        stream: &Stream,
        access: Access,
    ) -> Result<Option<BlockUse>, MemoryError> {
        self.memory.state.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        for other in order.streams_before(stream, access) {
            stream.wait_for(&other)?;
        }
        if self.synchronize_on_free || *stream == self.memory.stream {
            return Ok(None);
        }
        Ok(Some(
            self.memory
                .resource
                .prepare_block_use(self.memory.block_ref, stream)?,
        ))
    }

    /// Work that uses the memory is in the stream now, unless `submitted` says that it failed.
    pub(crate) fn end_use(
        &self,
        order: &mut SyncGuard<'_>,
        used: Option<BlockUse>,
        stream: &Stream,
        submitted: Option<Access>,
    ) -> Result<(), MemoryError> {
        if let Some(access) = submitted {
            order.record(stream, access);
            order.prune_reads(|stream| stream.is_idle() == Ok(true));
        }
        match used {
            Some(used) => Ok(self.memory.resource.finish_block_use(used, stream)?),
            None => Ok(()),
        }
    }

    /// Frees the memory and says how that went.
    pub(crate) fn free(&mut self) -> Result<(), FreeError> {
        self.synchronize_before_free();
        self.memory.free()
    }

    fn synchronize_before_free(&self) {
        if self.synchronize_on_free {
            // Where it fails the context is lost, and so is the work.
            let _ = self.synchronize_host(Access::ReadWrite);
        }
    }

    /// Waits, as the host, for what has to be done before it uses the memory.
    pub(crate) fn synchronize_host(&self, access: Access) -> Result<(), MemoryError> {
        // Nobody is kept from submitting while this waits.
        let streams = self.lock().streams_before_host(access);
        for stream in &streams {
            stream.synchronize()?;
        }
        Ok(())
    }
}

impl Drop for MultiStreamMemory {
    fn drop(&mut self) {
        self.synchronize_before_free();
    }
}
