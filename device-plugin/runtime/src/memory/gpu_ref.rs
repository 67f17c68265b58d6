//! Typed device memory with several owners, used in any streams of its device.
//!
//! [`GpuRef::access`] is one atomic load, and where an agent may fence this image one more of what it said: the address, or
//! why there is nothing behind it any more. Work in several streams
//! is put in order when it is submitted: a read waits for the last write, a write for all that came before. To
//! write takes a [`WriteToken`], of which there is one at a time. A stream other than the memory's own takes
//! a resource that tracks uses, for else a free would not wait for it:
//! [`StreamMisuse`](crate::ResourceError::StreamMisuse).
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Access, Stream};
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::multi_stream::{MultiStreamMemory, SyncGuard};
use crate::memory::slice::{MemoryError, TrackedSlice};
use crate::memory::write_token::{WriteGate, WriteRefused, WriteToken};
use crate::state::StaleReason;

/// Why a write did not begin or does not count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The memory cannot be used.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The right to write was not given, or has ended.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// The work was not submitted.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A shared handle of device memory; freed with the last clone.
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

impl<T> GpuRef<T> {
    /// The address, where there is something behind it: what [`DeviceState::check`](crate::DeviceState::check) costs.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn access(&self) -> Result<u64, StaleReason> {
        self.inner.shared.memory.state.check()?;
        Ok(self.as_raw())
    }

    /// The address, whatever is behind it.
    pub fn as_raw(&self) -> u64 {
        self.inner.shared.memory.block_ref.address
    }

    /// How many items it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none; no resource allocates that.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.inner.shared.memory.block_ref.bytes()
    }

    /// The stream that it was last written in.
    pub fn last_write(&self) -> Stream {
        self.inner.shared.lock().last_write().clone()
    }

    /// How often a write was committed.
    pub fn commits(&self) -> u64 {
        self.inner.gate.commits()
    }

    /// For a kernel that reads it.
    pub fn arg(&self) -> DevSliceArg<'_> {
        DevSliceArg::of_multi_stream(&self.inner.shared, Access::Read)
    }

    /// For a kernel that writes it, as long as the token may: the launch looks again.
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

    /// Runs a function that submits work of others, which reads the memory, to a stream; it must not wait for anything.
    ///
    /// # Errors
    /// Why it did not run, or that its work cannot be tracked.
    pub fn read_in<R>(
        &self,
        stream: &Stream,
        submit: impl FnOnce(u64) -> R,
    ) -> Result<R, MemoryError> {
        self.submit_in(self.inner.shared.lock(), stream, Access::Read, submit)
    }

    /// As [`read_in`](Self::read_in), for work that writes.
    ///
    /// # Errors
    /// As there; [`WriteError::Refused`] where the right to write has ended.
    pub fn write_in<R>(
        &self,
        token: &WriteToken,
        stream: &Stream,
        submit: impl FnOnce(u64) -> R,
    ) -> Result<R, WriteError> {
        let order = self.inner.shared.lock();
        // In the order of all uses: whoever has the right next writes behind this.
        self.inner.gate.admit(token)?;
        Ok(self.submit_in(order, stream, Access::ReadWrite, submit)?)
    }

    fn submit_in<R>(
        &self,
        mut order: SyncGuard<'_>,
        stream: &Stream,
        access: Access,
        submit: impl FnOnce(u64) -> R,
    ) -> Result<R, MemoryError> {
        let shared = &self.inner.shared;
        let used = shared.begin_use(&order, stream, access)?;
        let result = submit(self.as_raw());
        shared.end_use(&mut order, used, stream, Some(access))?;
        Ok(result)
    }

    /// The right to write it, from `now` on.
    ///
    /// # Errors
    /// [`WriteError::Stale`], or [`WriteRefused::Held`] while another has it.
    pub fn begin_write(&self, now: Instant, lifetime: Duration) -> Result<WriteToken, WriteError> {
        self.access()?;
        Ok(self.inner.gate.issue(now, lifetime)?)
    }

    /// Ends a write as whole, and says which commit it was. Its work may still be under way: who reads waits for it.
    ///
    /// # Errors
    /// What became of the memory or of the right to write it: the write does not count.
    pub fn commit(&self, token: WriteToken, now: Instant) -> Result<u64, WriteError> {
        self.access()?;
        Ok(self.inner.gate.commit(token, now)?)
    }

    /// Takes the right to write from whoever has it.
    pub fn fence_writer(&self) {
        self.inner.gate.fence();
    }
}
