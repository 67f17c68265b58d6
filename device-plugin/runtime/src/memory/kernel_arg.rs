//! What a kernel is given: numbers, and memory that stays while the launch is being submitted.
#![forbid(unsafe_code)]

use crate::driver::{Access, Stream};
use crate::memory::multi_stream::MultiStreamMemory;
use crate::memory::slice::OwnedBlock;
use crate::memory::write_token::{WriteGate, WriteToken};
use crate::state::DeviceState;

/// Device memory as an argument: borrowed for as long as the kernel's arguments are put together, to read or to write.
#[derive(Clone, Copy, Debug)]
pub struct DevSliceArg<'a> {
    pub(crate) address: u64,
    pub(crate) access: Access,
    pub(crate) state: &'a DeviceState,
    /// The only stream that may use it; any where there is none.
    pub(crate) only_stream: Option<&'a Stream>,
    /// Where its uses are put in order.
    pub(crate) multi_stream: Option<&'a MultiStreamMemory>,
    /// The right to write it, which may have ended by the time of the launch.
    pub(crate) write_right: Option<(&'a WriteGate, &'a WriteToken)>,
}

impl<'a> DevSliceArg<'a> {
    /// Memory that is used in its own stream only.
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

    /// Memory that any stream may use.
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

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum KernelArg<'a> {
    /// A number.
    Value {
        /// Its bytes, little endian, from the lowest on.
        bits: u64,
        /// How many bytes it has.
        size: usize,
    },
    /// The address of memory.
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
