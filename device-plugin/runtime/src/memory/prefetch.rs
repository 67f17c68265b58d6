//! Prefetches managed memory and gives the driver advice about parts of it.
//!
//! The location passes to the driver unchanged: a device ordinal, the host, or a NUMA node of the
//! host. Drivers before CUDA 12.2 do not support NUMA nodes and return NOT_SUPPORTED.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::driver::{Advice, Location, Residency, Stream};
use crate::memory::error::MemoryError;
use crate::memory::managed_ref::ManagedRef;

impl<T> ManagedRef<T> {
    /// Moves items to a location in the order of a stream.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`MemoryError::Range`], or the driver's error.
    pub fn prefetch(
        &self,
        items: Range<usize>,
        to: Location,
        stream: &Stream,
    ) -> Result<(), MemoryError> {
        let (address, bytes) = self.byte_range(items)?;
        Ok(stream.context().prefetch(address, bytes, to, stream)?)
    }

    /// Advises the driver about the use of items. The driver ignores the location of read-mostly
    /// advice.
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

    /// Returns the last advice and prefetch for items.
    ///
    /// # Errors
    /// As [`prefetch`](Self::prefetch).
    pub fn residency(&self, items: Range<usize>) -> Result<Residency, MemoryError> {
        let (address, bytes) = self.byte_range(items)?;
        Ok(self.stream().context().residency(address, bytes)?)
    }

    /// Returns the address and the size of items in bytes.
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
