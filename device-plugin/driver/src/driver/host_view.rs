//! Lets the host borrow managed memory as slices.

use super::{Context, call};
use crate::error::CudaError;

/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`, `_RANGE_START_ADDR`, `_RANGE_SIZE`
const IS_MANAGED: i32 = 8;
const RANGE_START: i32 = 11;
const RANGE_SIZE: i32 = 12;
/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// Bytes that the driver says are managed memory. The owner of the view also owns the memory and
/// frees it after the view.
#[derive(Debug)]
pub struct HostView {
    address: usize,
    bytes: usize,
}

impl Context {
    /// Creates the host's view of managed memory.
    ///
    /// # Safety
    /// The caller owns the memory, frees it after the view, and calls the view's methods only when
    /// no work uses the bytes as long as the result lives.
    ///
    /// # Errors
    /// The driver's error, or code 1 (invalid value) for memory that is not managed.
    pub unsafe fn host_view(&self, address: u64, bytes: usize) -> Result<HostView, CudaError> {
        let managed: u32 = self.pointer_attribute(IS_MANAGED, address)?;
        let start: u64 = self.pointer_attribute(RANGE_START, address)?;
        let size: usize = self.pointer_attribute(RANGE_SIZE, address)?;
        let refused = CudaError {
            call: "cuPointerGetAttribute",
            code: INVALID_VALUE,
        };
        let inside = address
            .checked_sub(start)
            .and_then(|before| usize::try_from(before).ok()?.checked_add(bytes))
            .is_some_and(|end| end <= size);
        match usize::try_from(address) {
            Ok(address) if managed != 0 && inside => Ok(HostView { address, bytes }),
            _ => Err(refused),
        }
    }

    fn pointer_attribute<T: bytemuck::Pod>(
        &self,
        attribute: i32,
        address: u64,
    ) -> Result<T, CudaError> {
        let _current = self.enter()?;
        let mut value = T::zeroed();
        call!(
            self.driver(),
            cuPointerGetAttribute((&raw mut value).cast(), attribute, address)
        )?;
        Ok(value)
    }
}

impl HostView {
    /// Returns the bytes. The caller has waited for all work that writes them and admits none while
    /// the slice lives.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the driver said that these bytes are managed, so the host can read them. They
        // live as long as the view, and no work writes them meanwhile.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    /// Returns the bytes for changes. The caller has waited for all work that uses them and admits
    /// none while the slice lives.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the view, of which there is one, is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}
