//! Tests the checksum kernel against its definition.

use bursar_runtime::checksum::{self, ChecksumError, DeviceChecksum};
use bursar_runtime::driver::{Context, Driver};
use bursar_runtime::{DeviceMemoryResource as _, Direct, Tag};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::raw::Raw as _;

fn context() -> Context {
    let device = Driver::get().unwrap().device(0).unwrap();
    device.primary_context().unwrap()
}

/// Allocates device memory for the life of the process.
fn memory(context: &Context, bytes: usize) -> u64 {
    let layout = std::alloc::Layout::from_size_align(bytes, 1).unwrap();
    let stream = context.default_stream();
    let block = Direct::new(context).allocate(layout, &stream, Tag::default());
    block.unwrap().address()
}

#[test]
fn device_checksum_equals_the_host_checksum() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context();
        let stream = context.stream().unwrap();
        let mut checksum = DeviceChecksum::new(&context).unwrap();
        let bytes: Vec<u8> = (0..100_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let address = memory(&context, bytes.len());
        context.copy_to_device(address, &bytes).unwrap();
        for len in (0..70).chain([4095, 4096, 4097, 99_999, 100_000]) {
            let found = checksum.of(address, len as u64, &stream).unwrap();
            assert_eq!(found, checksum::of(&bytes[..len]), "{len} bytes");
        }
        let found = checksum.of(address + 16, 1000, &stream).unwrap();
        assert_eq!(found, checksum::of(&bytes[16..1016]));
    });
}

#[test]
fn checksum_changes_with_one_byte() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context();
        let stream = context.default_stream();
        let mut checksum = DeviceChecksum::new(&context).unwrap();
        let address = memory(&context, 1 << 20);
        context.fill(address, 7, 1 << 20).unwrap();
        let before = checksum.of(address, 1 << 20, &stream).unwrap();
        context.fill(address + 777_777, 8, 1).unwrap();
        assert_ne!(checksum.of(address, 1 << 20, &stream), Ok(before));
        context.fill(address + 777_777, 7, 1).unwrap();
        assert_eq!(checksum.of(address, 1 << 20, &stream), Ok(before));
    });
}

#[test]
fn unaligned_memory_is_refused() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context();
        let mut checksum = DeviceChecksum::new(&context).unwrap();
        let address = memory(&context, 64) + 8;
        let refused = checksum.of(address, 16, &context.default_stream());
        assert_eq!(refused, Err(ChecksumError::Unaligned(address)));
    });
}
