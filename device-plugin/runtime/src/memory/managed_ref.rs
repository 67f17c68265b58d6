//! Gives typed managed memory one owner, through which both the host and the device use it.
//!
//! The host borrows the memory as slices. Before the owner lends a slice, it waits for all
//! conflicting work; while the slice lives, the borrow checker prevents new work. Two `&mut`
//! therefore never refer to the same memory on either side. Memory of a stale state is inert and
//! lends nothing.
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
use crate::memory::error::MemoryError;
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::multi_stream::MultiStreamMemory;
use crate::memory::owned_block::OwnedBlock;
use crate::resource::{FreeError, Tag};
use crate::runtime::DeviceRuntime;
use crate::state::{DeviceGeneration, StaleReason};
use crate::vouched;

/// The managed memory is attached to the host, so no kernel may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "failed to lend managed memory to a kernel: it is attached to the host; attach it to a stream or globally"
)]
pub struct HostOnly;

/// Users that the driver permits to access managed memory.
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
    /// Allocates managed memory from a runtime and attaches it. Adaptors over the managed resource
    /// are permitted.
    ///
    /// # Errors
    /// [`MemoryError::Stale`] if the runtime admits no new work, the resource's error, or the
    /// driver's INVALID_VALUE if the resource's memory is not managed.
    pub fn allocate(
        runtime: &DeviceRuntime,
        len: usize,
        attach: Attach,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ManagedRef<T>, MemoryError> {
        let memory = OwnedBlock::allocate::<T>(runtime, len, stream, tag)?;
        let view = vouched::host_view(
            stream.context(),
            memory.block_ref.address,
            memory.block_ref.layout.size(),
        )?;
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

    /// Returns the items after all work that writes them.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or the driver's error, which may be that of an earlier launch.
    pub fn read(&self) -> Result<&[T], MemoryError> {
        self.check()?;
        self.memory.synchronize_host(Access::Read)?;
        Ok(bytemuck::cast_slice(self.view.bytes()))
    }

    /// Returns the items for changes, after all work that uses them.
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
    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory has no items, which no resource allocates.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address, which is the same on the host and the device.
    pub fn address(&self) -> u64 {
        self.memory.memory.block_ref.address
    }

    /// Returns the generation under which the memory was allocated.
    pub fn generation(&self) -> DeviceGeneration {
        self.memory.memory.state.generation()
    }

    /// Checks that the memory is valid, at the cost of one load.
    ///
    /// # Errors
    /// The reason for which the memory is stale.
    #[inline]
    pub fn check(&self) -> Result<(), StaleReason> {
        self.memory.memory.state.check()
    }

    /// Lends the memory to a kernel that reads it.
    ///
    /// # Errors
    /// [`HostOnly`].
    pub fn arg(&self) -> Result<DevSliceArg<'_>, HostOnly> {
        self.kernel_arg(Access::Read)
    }

    /// Lends the memory to a kernel that writes it.
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

    /// Changes the permitted users in the order of a stream, behind all earlier uses.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], or the driver's error.
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

    /// Waits for all work that uses the memory and frees it. Unlike a drop, this returns the
    /// result.
    ///
    /// # Errors
    /// [`FreeError::Retired`] if the driver failed; the bytes stay charged.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.memory.free()
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.memory.memory.stream
    }
}
