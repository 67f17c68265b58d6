//! Shares typed device memory between several owners and any streams of its device.
//!
//! [`GpuRef::access`] costs one atomic load, and a second one if the agent can fence this image.
//! Work in several streams is ordered when it is submitted: a read waits for the last write, a
//! write waits for all earlier uses. A write requires the [`WriteToken`], of which one exists at a
//! time.
//!
//! Use in another stream requires a resource that tracks uses, because a free would not wait for
//! that stream otherwise: [`StreamMisuse`](crate::ResourceError::StreamMisuse).
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::Pod;

use crate::driver::{Access, GpuUuid, Stream};
use crate::error::ErrorClass;
use crate::memory::error::MemoryError;
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::multi_stream::MultiStreamMemory;
use crate::memory::slice::TrackedSlice;
use crate::memory::submission::{SubmitError, submit_in};
use crate::memory::write_token::{WriteGate, WriteRefused, WriteToken};
use crate::state::{DeviceGeneration, StaleReason};
use crate::vouched;

/// Reason for which a write did not begin or does not count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The memory is stale.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The gate refused the token.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// The use was not recorded.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl WriteError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            WriteError::Stale(reason) => reason.class(),
            WriteError::Refused(reason) => reason.class(),
            WriteError::Memory(error) => error.class(),
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Shared handle of device memory, which is freed with the last clone.
pub struct GpuRef<T> {
    inner: Arc<Inner>,
    len: usize,
    items: PhantomData<fn() -> T>,
}

#[derive(Debug)]
struct Inner {
    shared: MultiStreamMemory,
    gate: WriteGate,
}

impl<T> Clone for GpuRef<T> {
    fn clone(&self) -> Self {
        GpuRef {
            inner: Arc::clone(&self.inner),
            ..*self
        }
    }
}

impl<T> fmt::Debug for GpuRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuRef").field(&self.inner).finish()
    }
}

impl<T> From<TrackedSlice<T>> for GpuRef<T> {
    fn from(slice: TrackedSlice<T>) -> Self {
        let (memory, len) = slice.into_parts();
        let inner = Inner {
            shared: MultiStreamMemory::new_reported(memory),
            gate: WriteGate::default(),
        };
        GpuRef {
            inner: Arc::new(inner),
            len,
            items: PhantomData,
        }
    }
}

impl<T: Pod> GpuRef<T> {
    /// Copies the memory to the host, after the last write in whatever stream that is, and waits
    /// for the copy. Other threads that use the memory wait meanwhile.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`MemoryError::Length`], or the driver's error, which may be that of
    /// an earlier launch.
    pub fn copy_to_host(&self, items: &mut [T]) -> Result<(), MemoryError> {
        let (len, given) = (self.len, items.len());
        if given != len {
            return Err(MemoryError::Length { len, given });
        }
        let order = self.inner.shared.lock();
        let address = self.access()?;
        let written = order.last_write();
        let context = written.context();
        // An event, because the stream may get other work without end.
        let event = context.event()?;
        event.record(written)?;
        event.synchronize()?;
        let own = self.inner.shared.memory.stream.context();
        Ok(vouched::copy_from_device(
            own,
            bytemuck::cast_slice_mut(items),
            address,
        )?)
    }
}

impl<T> GpuRef<T> {
    /// Returns the address if the memory is valid, at the cost of
    /// [`DeviceState::check`](crate::DeviceState::check).
    ///
    /// # Errors
    /// The reason for which the memory is stale.
    #[inline]
    pub fn access(&self) -> Result<u64, StaleReason> {
        self.inner.shared.memory.state.check()?;
        Ok(self.as_raw())
    }

    /// Returns the address without a check.
    pub fn as_raw(&self) -> u64 {
        self.inner.shared.memory.block_ref.address
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory has no items, which no resource allocates.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.inner.shared.memory.block_ref.bytes()
    }

    /// Returns the generation under which the memory was allocated. The memory is valid only while
    /// that generation is the state's and [`access`](Self::access) succeeds.
    pub fn generation(&self) -> DeviceGeneration {
        self.inner.shared.memory.state.generation()
    }

    /// Returns the UUID of the GPU or MIG instance that has the memory, the same in every process.
    pub fn device_id(&self) -> GpuUuid {
        self.inner.shared.memory.stream.context().uuid()
    }

    /// Returns the ordinal of the GPU in this process.
    pub fn ordinal(&self) -> u32 {
        self.inner.shared.memory.stream.context().ordinal()
    }

    /// Returns the stream of the last write.
    pub fn last_write(&self) -> Stream {
        self.inner.shared.lock().last_write().clone()
    }

    /// Returns the number of committed writes.
    pub fn commits(&self) -> u64 {
        self.inner.gate.commits()
    }

    /// Lends the memory to a kernel that reads it.
    pub fn arg(&self) -> DevSliceArg<'_> {
        DevSliceArg::of_multi_stream(&self.inner.shared, Access::Read)
    }

    /// Lends the memory to a kernel that writes it. The launch checks the token again.
    ///
    /// # Errors
    /// [`WriteRefused::Fenced`] or [`WriteRefused::Foreign`].
    pub fn arg_mut<'a>(&'a self, token: &'a WriteToken) -> Result<DevSliceArg<'a>, WriteRefused> {
        let Inner { shared, gate } = &*self.inner;
        gate.admit(token)?;
        Ok(DevSliceArg {
            write_right: Some((gate, token)),
            ..DevSliceArg::of_multi_stream(shared, Access::ReadWrite)
        })
    }

    /// Calls `submit` with the address, in order to submit foreign work that reads the memory.
    /// [`submit_in`] is the call for work over several memories, and says what `submit` must not
    /// do.
    ///
    /// # Errors
    /// As [`submit_in`].
    pub fn read_in<R>(
        &self,
        stream: &Stream,
        submit: impl FnOnce(u64) -> R,
    ) -> Result<R, SubmitError> {
        submit_in(stream, [self.arg()], |[address]| submit(address))
    }

    /// Calls `submit` as [`read_in`](Self::read_in) does, for work that writes.
    ///
    /// # Errors
    /// As [`submit_in`], and [`SubmitError::Refused`] if the gate refuses the token.
    pub fn write_in<R>(
        &self,
        token: &WriteToken,
        stream: &Stream,
        submit: impl FnOnce(u64) -> R,
    ) -> Result<R, SubmitError> {
        submit_in(stream, [self.arg_mut(token)?], |[address]| submit(address))
    }

    /// Records a read by work that is already in `stream`, such as a foreign library's. Later
    /// writes and the free wait for that work.
    ///
    /// The caller has ordered the work behind the last write.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`WrongOrdinal`](crate::ResourceError::WrongOrdinal),
    /// [`StreamMisuse`](crate::ResourceError::StreamMisuse), or the driver's error. The use is not
    /// recorded then, so synchronize the stream before the memory is freed.
    pub fn record_read(&self, stream: &Stream) -> Result<(), MemoryError> {
        let mut order = self.inner.shared.lock();
        self.inner
            .shared
            .record_use(&mut order, stream, Access::Read)
    }

    /// Records a write by work that is already in `stream`, such as a foreign library's. Later uses
    /// and the free wait for that work.
    ///
    /// The caller has ordered the work behind all earlier uses; [`write_in`](Self::write_in) does
    /// both. The write is recorded even if the token is refused, because it is in the stream.
    ///
    /// # Errors
    /// As [`record_read`](Self::record_read), and [`WriteError::Refused`] if the gate refuses the
    /// token.
    pub fn record_write(&self, token: &WriteToken, stream: &Stream) -> Result<(), WriteError> {
        let mut order = self.inner.shared.lock();
        self.inner
            .shared
            .record_use(&mut order, stream, Access::ReadWrite)?;
        Ok(self.inner.gate.admit(token)?)
    }

    /// Returns the memory with the record of its uses.
    pub(crate) fn shared(&self) -> &MultiStreamMemory {
        &self.inner.shared
    }

    /// Returns the gate that issues the memory's write tokens.
    pub(crate) fn gate(&self) -> &WriteGate {
        &self.inner.gate
    }

    /// Issues the write token from `now` on.
    ///
    /// # Errors
    /// [`WriteError::Stale`], or [`WriteRefused::Busy`] while another writer has the token.
    pub fn begin_write(&self, now: Instant, lifetime: Duration) -> Result<WriteToken, WriteError> {
        self.access()?;
        Ok(self.inner.gate.issue(now, lifetime)?)
    }

    /// Commits a write and returns the number of the commit. The work may still run: a reader waits
    /// for it.
    ///
    /// # Errors
    /// The memory or the token became invalid, and the write does not count.
    pub fn commit(&self, token: WriteToken, now: Instant) -> Result<u64, WriteError> {
        self.access()?;
        Ok(self.inner.gate.commit(token, now)?)
    }

    /// Revokes the current write token.
    pub fn fence_writer(&self) {
        self.inner.gate.fence();
    }
}
