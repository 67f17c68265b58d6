//! Computes the checksum of device memory on the device, at the speed of its memory.
//!
//! [`bursar_protocol::checksum`] defines the checksum; [`of`] computes it for host memory.
#![forbid(unsafe_code)]

use bursar_protocol::checksum;
pub use bursar_protocol::checksum::of;

use crate::driver::{Context, Grid, Kernel, Stream};
use crate::error::CudaError;
use crate::vouched;

/// Bytes that a thread loads at once. Memory must start at a multiple of this.
const LOAD_BYTES: u64 = 16;
const THREADS: u32 = 256;
/// Resident blocks of a multiprocessor: loads in flight keep the memory busy.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
const MULTIPROCESSOR_COUNT: i32 = 16;

/// Reason for which a checksum failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChecksumError {
    /// The kernel cannot load from this address.
    #[error(
        "failed to compute a checksum at {0:#x}: the address is not aligned; use a multiple of {LOAD_BYTES} bytes"
    )]
    Unaligned(u64),
    /// The driver failed. An unmapped address is a fault, which poisons the process image.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Checksum kernel in a context, with device memory for its result.
#[derive(Debug)]
pub struct DeviceChecksum {
    kernel: Kernel,
    /// Address of eight bytes of device memory.
    sum: u64,
    /// Largest useful grid.
    blocks: u32,
}

impl DeviceChecksum {
    /// Loads the kernel into a context.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn new(context: &Context) -> Result<DeviceChecksum, CudaError> {
        let kernel = Kernel::checksum(context)?;
        let multiprocessors = context.device().attribute(MULTIPROCESSOR_COUNT)?;
        Ok(DeviceChecksum {
            kernel,
            sum: context.allocate(size_of::<u64>())?,
            blocks: u32::try_from(multiprocessors)
                .unwrap_or(1)
                .saturating_mul(BLOCKS_PER_MULTIPROCESSOR),
        })
    }

    /// Computes the checksum of memory behind the work of a stream, and waits for the result.
    ///
    /// # Errors
    /// [`ChecksumError::Unaligned`], or the driver's error.
    pub fn of(&mut self, address: u64, bytes: u64, stream: &Stream) -> Result<u64, ChecksumError> {
        if !address.is_multiple_of(LOAD_BYTES) {
            return Err(ChecksumError::Unaligned(address));
        }
        let context = self.kernel.context().clone();
        let enough = bytes.div_ceil(LOAD_BYTES * u64::from(THREADS));
        let blocks = u32::try_from(enough).map_or(self.blocks, |enough| enough.min(self.blocks));
        let mut sum = [0; size_of::<u64>()];
        vouched::fill_async(&context, self.sum, 0, sum.len(), stream)?;
        vouched::launch(
            &self.kernel,
            stream,
            Grid::linear(blocks.max(1), THREADS),
            &mut [address, bytes, self.sum],
        )?;
        stream.synchronize()?;
        vouched::copy_from_device(&context, &mut sum, self.sum)?;
        Ok(checksum::finish(u64::from_le_bytes(sum), bytes))
    }
}

impl Drop for DeviceChecksum {
    fn drop(&mut self) {
        // If the free fails, the context is lost and its memory with it.
        let _ = vouched::free(self.kernel.context(), self.sum);
    }
}

#[cfg(test)]
mod tests {
    use bursar_protocol::checksum::{FACTOR, WEYL};

    const PTX: &str = include_str!("../../driver/src/kernels/checksum.ptx");

    #[test]
    fn kernel_uses_the_factors_of_the_definition() {
        let mut factors: Vec<u64> = PTX
            .lines()
            .filter_map(|line| line.split("0x").nth(1))
            .map(|tail| {
                tail.split(|c: char| !c.is_ascii_hexdigit())
                    .next()
                    .unwrap_or("")
            })
            .map(|digits| u64::from_str_radix(digits, 16).expect("a number"))
            .collect();
        factors.sort_unstable();
        factors.dedup();
        let mut expected = [WEYL, FACTOR, WEYL.wrapping_mul(2)];
        expected.sort_unstable();
        assert_eq!(factors, expected);
    }
}
