//! Typed managed memory: one owner, whom the host's references and the device's work both go through.
//!
//! The host sees the memory as slices, borrowed from the owner as any others; before one is given out, all work
//! that uses the memory is waited for, and while one lives none can be submitted. So no two `&mut` lead to the same
//! place, on whichever side. Where the runtime or the device has ended, it is inert: nothing is given out.
//!
//! ```compile_fail,E0499
//! # use bursar_runtime::ManagedRef;
//! fn two_writers(memory: &mut ManagedRef<f32>) {
//!     let (one, other) = (memory.write().unwrap(), memory.write().unwrap());
//!     one[0] = other[0];
//! }
//! ```
//! ```compile_fail,E0502
//! # use bursar_runtime::ManagedRef;
//! fn a_kernel_while_the_host_reads(memory: &mut ManagedRef<f32>) {
//!     let items = memory.read().unwrap();
//!     let argument = memory.arg_mut();
//!     assert_eq!(items[0], 1.0);
//! }
//! ```
//! ```
//! # use bursar_runtime::ManagedRef;
//! fn one_after_the_other(memory: &mut ManagedRef<f32>) {
//!     memory.write().unwrap()[0] = 1.0;
//!     let argument = memory.arg_mut();
//! }
//! ```
#![forbid(unsafe_code)]

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::driver::{Access, Attach, HostView, Stream};
use crate::error::FreeError;
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::multi_stream::MultiStreamMemory;
use crate::memory::slice::{MemoryError, OwnedBlock};
use crate::resource::Tag;
use crate::runtime::DeviceRuntime;
use crate::state::StaleReason;

/// Why managed memory is not given to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("managed memory that is the host's; attach it to a stream or to all")]
pub struct HostOnly;

/// Who may use managed memory.
#[derive(Debug)]
enum Visibility {
    AllStreams,
    Host,
    OneStream(Stream),
}

/// Managed memory for `len` items of `T`.
#[derive(Debug)]
pub struct ManagedRef<T> {
    view: HostView,
    memory: MultiStreamMemory,
    visibility: Visibility,
    len: usize,
    items: PhantomData<T>,
}

impl<T: Pod> ManagedRef<T> {
    /// Allocates from a runtime whose resource is of managed memory, whatever layers it has, and attaches it.
    ///
    /// # Errors
    /// [`MemoryError::Stale`] where nothing new is allocated; what the resource answered; the driver's INVALID_VALUE where
    /// its memory is not managed.
    pub fn allocate(
        runtime: &DeviceRuntime,
        len: usize,
        attach: Attach,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ManagedRef<T>, MemoryError> {
        let memory = OwnedBlock::allocate::<T>(runtime, len, stream, tag)?;
        let view = stream
            .context()
            .host_view(memory.block_ref.address, memory.block_ref.layout.size())?;
        let mut managed = ManagedRef {
            view,
            memory: MultiStreamMemory::new_synchronized(memory),
            visibility: Visibility::AllStreams,
            len,
            items: PhantomData,
        };
        managed.attach(attach, stream)?;
        Ok(managed)
    }

    /// The items, after all work that writes them.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or what the driver answered: the error of an earlier launch too.
    pub fn read(&self) -> Result<&[T], MemoryError> {
        self.check()?;
        self.memory.synchronize_host(Access::Read)?;
        Ok(bytemuck::cast_slice(self.view.bytes()))
    }

    /// The items to change, after all work that uses them.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self) -> Result<&mut [T], MemoryError> {
        self.check()?;
        self.memory.synchronize_host(Access::ReadWrite)?;
        Ok(bytemuck::cast_slice_mut(self.view.bytes_mut()))
    }
}

impl<T> ManagedRef<T> {
    /// How many items it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none; no resource allocates that.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address, of the host as of the device.
    pub fn address(&self) -> u64 {
        self.memory.memory.block_ref.address
    }

    /// Whether it can be used: one load.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn check(&self) -> Result<(), StaleReason> {
        self.memory.memory.state.check()
    }

    /// For a kernel that reads it.
    ///
    /// # Errors
    /// [`HostOnly`].
    pub fn arg(&self) -> Result<DevSliceArg<'_>, HostOnly> {
        self.kernel_arg(Access::Read)
    }

    /// For a kernel that writes it.
    ///
    /// # Errors
    /// [`HostOnly`].
    pub fn arg_mut(&mut self) -> Result<DevSliceArg<'_>, HostOnly> {
        self.kernel_arg(Access::ReadWrite)
    }

    fn kernel_arg(&self, access: Access) -> Result<DevSliceArg<'_>, HostOnly> {
        let any = DevSliceArg::of_multi_stream(&self.memory, access);
        match &self.visibility {
            Visibility::AllStreams => Ok(any),
            Visibility::Host => Err(HostOnly),
            Visibility::OneStream(only) => Ok(DevSliceArg {
                only_stream: Some(only),
                ..any
            }),
        }
    }

    /// Says who may use it from here on, in the order of a stream and behind all that used it so far.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or what the driver answered.
    pub fn attach(&mut self, attach: Attach, stream: &Stream) -> Result<(), MemoryError> {
        let mut order = self.memory.lock();
        self.memory.begin_use(&order, stream, Access::ReadWrite)?;
        stream.context().attach(stream, self.address(), attach)?;
        order.record(stream, Access::ReadWrite);
        drop(order);
        self.visibility = match attach {
            Attach::Global => Visibility::AllStreams,
            Attach::Host => Visibility::Host,
            Attach::Single => Visibility::OneStream(stream.clone()),
        };
        Ok(())
    }

    /// Waits for all work that uses it, frees it and says how that went, which dropping it does not.
    ///
    /// # Errors
    /// [`FreeError::Retired`]: the driver did not free it, and it stays charged.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.memory.free()
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.memory.memory.stream
    }
}
