//! Fills and copies the memory of mappings, to which the host cannot refer.

use super::{Context, Mapping, raw};
use crate::error::CudaError;

impl Mapping {
    /// Fills a part of the mapping, from byte `at` on, and waits.
    ///
    /// # Errors
    /// The driver's error, or code 1 (invalid value) for a range past the end.
    pub fn fill(
        &self,
        context: &Context,
        at: u64,
        value: u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let address = self.checked_address("Mapping::fill", at, bytes)?;
        // SAFETY: the mapping is device memory.
        unsafe { raw::fill(context, address, value, bytes) }
    }

    /// Copies bytes of the host to a part of the mapping, from byte `at` on, and waits.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn write(&self, context: &Context, at: u64, from: &[u8]) -> Result<(), CudaError> {
        let address = self.checked_address("Mapping::write", at, from.len())?;
        // SAFETY: the mapping is device memory.
        unsafe { raw::copy_to_device(context, address, from) }
    }

    /// Copies a part of the mapping, from byte `at` on, to the host and waits.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn read(&self, context: &Context, at: u64, to: &mut [u8]) -> Result<(), CudaError> {
        let from = self.checked_address("Mapping::read", at, to.len())?;
        // SAFETY: the mapping is device memory.
        unsafe { raw::copy_from_device(context, to, from) }
    }

    /// Returns the address of a range inside the mapping.
    fn checked_address(&self, call: &'static str, at: u64, bytes: usize) -> Result<u64, CudaError> {
        /// `CUDA_ERROR_INVALID_VALUE`
        const INVALID_VALUE: i32 = 1;
        match at.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes() => Ok(self.address() + at),
            _ => Err(CudaError {
                call,
                code: INVALID_VALUE,
            }),
        }
    }
}
