//! Memory that can be exported, and guard pages.

use std::alloc::Layout;
use std::os::fd::AsFd as _;
use std::time::Duration;

use bursar_runtime::driver::Access;
use bursar_runtime::{DeviceMemoryResource as _, Exportable, Tag, exportable};
use bursar_sim_lab::{ONE_GPU, inside};

use crate::{MIB, bytes, context, spin};

#[test]
fn an_exported_block_outlives_its_free_in_who_imports_it() {
    inside(ONE_GPU, |machine| {
        let context = context(0);
        let (memory, stream) = (
            Exportable::new(&context).unwrap(),
            context.stream().unwrap(),
        );
        let before = machine.used(0);
        let block = memory
            .allocate(bytes(3 * MIB), &stream, Tag::default())
            .unwrap();
        context.copy_to_device(block.address(), b"bursar").unwrap();
        let gone = block.as_ref();
        let descriptor = memory.export(gone).unwrap();
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().total(), 0);
        assert_eq!(memory.export(gone).unwrap_err().reason(), "Stale");
        let mapping =
            exportable::import(&context, descriptor.as_fd(), 4 << 20, Access::Read).unwrap();
        drop(descriptor);
        let mut back = [0; 6];
        context
            .copy_from_device(&mut back, mapping.address())
            .unwrap();
        assert_eq!(&back, b"bursar");
        assert_eq!(machine.used(0), before + (4 << 20));
        drop(mapping);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn a_freed_block_is_mapped_until_its_stream_is_done() {
    inside(ONE_GPU, |machine| {
        let context = context(0);
        let (memory, stream) = (
            Exportable::new(&context).unwrap(),
            context.stream().unwrap(),
        );
        let block = memory
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        let used = machine.used(0);
        spin(&stream, Duration::from_millis(300));
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().retired, 1 << 20);
        assert_eq!(machine.used(0), used);
        stream.synchronize().unwrap();
        assert_eq!(memory.reap_pending().unwrap().freed, 1 << 20);
        assert_eq!(machine.used(0), used - (2 << 20));
    });
}

#[test]
fn behind_a_guarded_block_and_after_its_free_nothing_is_mapped() {
    inside(ONE_GPU, |_| {
        let context = context(0);
        let memory = Exportable::guarded(&context, 2).unwrap();
        let stream = context.default_stream();
        for (size, align) in [(1, 1), (1000, 8), (2 * MIB, 256), (5 * MIB + 3, 1)] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let block = memory.allocate(layout, &stream, Tag::default()).unwrap();
            let (start, end) = (block.address(), block.address() + block.bytes());
            assert!(start.is_multiple_of(align as u64));
            context.fill(start, 1, size).unwrap();
            let edge = end.next_multiple_of(align as u64);
            assert!(
                context.fill(end, 1, (edge - end + 1) as usize).is_err(),
                "{size} bytes"
            );
            let page = start & !((2 << 20) - 1);
            assert!(context.fill(page - 1, 1, 1).is_err());
            memory.deallocate(block, &stream).unwrap();
            assert!(context.fill(start, 1, 1).is_err(), "it was freed");
        }
    });
}

#[test]
fn addresses_in_quarantine_are_not_given_out_again() {
    inside(ONE_GPU, |_| {
        let context = context(0);
        let (memory, stream) = (
            Exportable::guarded(&context, 8).unwrap(),
            context.default_stream(),
        );
        let mut seen = Vec::new();
        for _ in 0..8 {
            let block = memory
                .allocate(bytes(MIB), &stream, Tag::default())
                .unwrap();
            assert!(!seen.contains(&block.address()));
            seen.push(block.address());
            memory.deallocate(block, &stream).unwrap();
        }
    });
}
