//! Where managed memory should be: prefetches and advice, for parts of it.
//!
//! The location reaches the driver as it is: the ordinal of a device, the host, or a node of the host. Drivers before
//! CUDA 12.2 know no nodes, and refuse them (NOT_SUPPORTED).
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::driver::{Advice, Location, Residency, Stream};
use crate::memory::managed_ref::ManagedRef;
use crate::memory::slice::MemoryError;

impl<T> ManagedRef<T> {
    /// Moves items to where they will be used, in the order of a stream.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`MemoryError::Range`], or what the driver answered.
    pub fn prefetch(
        &self,
        items: Range<usize>,
        to: Location,
        stream: &Stream,
    ) -> Result<(), MemoryError> {
        let (address, bytes) = self.byte_range(items)?;
        Ok(stream.context().prefetch(address, bytes, to, stream)?)
    }

    /// Says how items will be used. The location of the advice on reads that are mostly what is done means nothing.
    ///
    /// # Errors
    /// As [`prefetch`](Self::prefetch).
    pub fn advise(
        &self,
        items: Range<usize>,
        advice: Advice,
        of: Location,
    ) -> Result<(), MemoryError> {
        let (address, bytes) = self.byte_range(items)?;
        Ok(self.stream().context().advise(address, bytes, advice, of)?)
    }

    /// What was last said about items.
    ///
    /// # Errors
    /// As [`prefetch`](Self::prefetch).
    pub fn residency(&self, items: Range<usize>) -> Result<Residency, MemoryError> {
        let (address, bytes) = self.byte_range(items)?;
        Ok(self.stream().context().residency(address, bytes)?)
    }

    /// Where items are, and their size.
    fn byte_range(&self, items: Range<usize>) -> Result<(u64, usize), MemoryError> {
        self.check()?;
        let Range { start, end } = items;
        let len = self.len();
        if start >= end || end > len {
            return Err(MemoryError::Range { start, end, len });
        }
        let size = size_of::<T>();
        Ok((self.address() + (start * size) as u64, (end - start) * size))
    }
}
