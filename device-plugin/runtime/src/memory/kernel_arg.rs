//! Represents kernel arguments: numbers, and memory that stays borrowed until the launch is
//! submitted.
#![forbid(unsafe_code)]

use crate::driver::{Access, Stream};
use crate::memory::multi_stream::MultiStreamMemory;
use crate::memory::owned_block::OwnedBlock;
use crate::memory::write_token::{WriteGate, WriteToken};
use crate::state::DeviceState;

/// Device memory as an argument, borrowed to read or to write.
#[derive(Clone, Copy, Debug)]
pub struct DevSliceArg<'a> {
    pub(crate) address: u64,
    pub(crate) access: Access,
    pub(crate) state: &'a DeviceState,
    /// Only stream that may use the memory; `None` permits any stream.
    pub(crate) only_stream: Option<&'a Stream>,
    /// Record by which uses in several streams are ordered.
    pub(crate) multi_stream: Option<&'a MultiStreamMemory>,
    /// Write token, which may be revoked before the launch.
    pub(crate) write_right: Option<(&'a WriteGate, &'a WriteToken)>,
}

impl<'a> DevSliceArg<'a> {
    /// Lends memory that only its own stream uses.
    pub(crate) fn of_single_stream(memory: &'a OwnedBlock, access: Access) -> DevSliceArg<'a> {
        DevSliceArg {
            address: memory.block_ref.address,
            access,
            state: &memory.state,
            only_stream: Some(&memory.stream),
            multi_stream: None,
            write_right: None,
        }
    }

    /// Lends memory that any stream may use.
    pub(crate) fn of_multi_stream(
        shared: &'a MultiStreamMemory,
        access: Access,
    ) -> DevSliceArg<'a> {
        DevSliceArg {
            address: shared.memory.block_ref.address,
            access,
            state: &shared.memory.state,
            only_stream: None,
            multi_stream: Some(shared),
            write_right: None,
        }
    }
}

/// Argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum KernelArg<'a> {
    /// Number, passed by value.
    Value {
        /// Bytes of the number in little-endian order.
        bits: u64,
        /// Size of the number in bytes.
        size: usize,
    },
    /// Device memory, passed by address.
    Memory(DevSliceArg<'a>),
}

impl<'a> From<DevSliceArg<'a>> for KernelArg<'a> {
    fn from(memory: DevSliceArg<'a>) -> Self {
        KernelArg::Memory(memory)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl From<$number> for KernelArg<'_> {
            fn from(number: $number) -> Self {
                const SIZE: usize = size_of::<$number>();
                let mut bytes = [0; 8];
                bytes[..SIZE].copy_from_slice(&number.to_le_bytes());
                KernelArg::Value {
                    bits: u64::from_le_bytes(bytes),
                    size: SIZE,
                }
            }
        })*
    };
}

numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(argument: impl Into<KernelArg<'static>>) -> (u64, usize) {
        match argument.into() {
            KernelArg::Value { bits, size } => (bits, size),
            KernelArg::Memory(_) => panic!("a number became memory"),
        }
    }

    #[test]
    fn kernel_arg_keeps_bits_and_size_of_a_number() {
        assert_eq!(parts(-1i8), (0xff, 1));
        assert_eq!(parts(-2i32), (0xffff_fffe, 4));
        assert_eq!(parts(u64::MAX), (u64::MAX, 8));
        assert_eq!(parts(1.0f32), (0x3f80_0000, 4));
        assert_eq!(parts(-0.0f64), (1 << 63, 8));
    }
}
