//! Orders the uses of memory that several streams share.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Access, Stream};
use crate::memory::error::MemoryError;
use crate::memory::owned_block::OwnedBlock;
use crate::memory::stream_sync::StreamSync;
use crate::resource::{BlockUse, FreeError, check_stream};

/// Access that is reported to the resource for every use. [`StreamSync`] orders the uses, so the
/// resource only keeps the block until they are done.
const REPORTED_ACCESS: Access = Access::Read;

/// Block with a record of the streams that used it.
#[derive(Debug)]
pub(crate) struct MultiStreamMemory {
    pub(crate) memory: OwnedBlock,
    sync: Mutex<StreamSync<Stream>>,
    /// Whether the host waits for all streams before a free.
    synchronize_on_free: bool,
}

/// Locked record of uses, which prevents other threads from submitting work with the memory.
pub(crate) type SyncGuard<'a> = MutexGuard<'a, StreamSync<Stream>>;

impl MultiStreamMemory {
    /// Creates memory whose uses in other streams are reported to its resource.
    pub(crate) fn new_reported(memory: OwnedBlock) -> MultiStreamMemory {
        MultiStreamMemory::new(memory, false)
    }

    /// Creates memory whose streams the host synchronizes before a free.
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

    /// Orders a stream behind all conflicting uses, and opens a use at the resource.
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
        let (resource, block) = (&self.memory.resource, self.memory.block_ref);
        Ok(Some(resource.prepare_block_use(
            block,
            stream,
            REPORTED_ACCESS,
        )?))
    }

    /// Orders a stream of any device behind the last write, and opens a read. The resource tracks
    /// no streams of other devices; [`MultiStreamMemory`] itself orders the free behind them.
    pub(crate) fn begin_peer_read(
        &self,
        order: &SyncGuard<'_>,
        stream: &Stream,
    ) -> Result<Option<BlockUse>, MemoryError> {
        if stream.context() == self.memory.stream.context() {
            return self.begin_use(order, stream, Access::Read);
        }
        self.memory.state.check()?;
        for other in order.streams_before(stream, Access::Read) {
            stream.wait_for(&other)?;
        }
        Ok(None)
    }

    /// Ends a use. `submitted` is the access of the work, or `None` if the submission failed.
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

    /// Records a use by work that is already in a stream. After an error the use is not recorded,
    /// so the caller must synchronize the stream before the free.
    pub(crate) fn record_use(
        &self,
        order: &mut SyncGuard<'_>,
        stream: &Stream,
        access: Access,
    ) -> Result<(), MemoryError> {
        self.memory.state.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        // A later use waits for this stream only, so this stream must follow the earlier uses.
        for other in order.streams_before(stream, access) {
            stream.wait_for(&other)?;
        }
        if !self.synchronize_on_free && *stream != self.memory.stream {
            let (resource, block) = (&self.memory.resource, self.memory.block_ref);
            resource.record_block_use(block, stream, REPORTED_ACCESS)?;
        }
        order.record(stream, access);
        Ok(())
    }

    /// Frees the memory and returns the result.
    pub(crate) fn free(&mut self) -> Result<(), FreeError> {
        self.synchronize_before_free();
        self.memory.free()
    }

    fn synchronize_before_free(&self) {
        if self.synchronize_on_free {
            // If the wait fails, the context is lost and its work with it.
            let _ = self.synchronize_host(Access::ReadWrite);
            return;
        }
        // No resource tracks streams of other devices, so the free itself is ordered behind them.
        let own = &self.memory.stream;
        let sync = self.lock();
        for peer in sync
            .streams()
            .filter(|peer| peer.context() != own.context())
        {
            if own.wait_for(peer).is_err() {
                let _ = peer.synchronize();
            }
        }
    }

    /// Waits on the host for all uses that conflict with an access by the host.
    pub(crate) fn synchronize_host(&self, access: Access) -> Result<(), MemoryError> {
        // The lock is not held during the wait, so that other threads can submit work.
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
