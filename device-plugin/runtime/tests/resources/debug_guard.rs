//! Tests the debug guard.

use std::alloc::Layout;

use bursar_runtime::driver::{Access, Stream};
use bursar_runtime::{
    BlockRef, BlockUse, DebugGuard, DeviceMemoryResource, Direct, Exportable, FreeError,
    ResourceError, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::raw::Raw as _;
use crate::{MIB, bytes, context};

fn corrupted(address: u64, while_live: bool) -> ResourceError {
    ResourceError::Corrupted {
        generation: 0,
        address,
        while_live,
    }
}

/// Writes a byte beside a block and asserts that the free finds it.
fn assert_overwrite_is_found(
    guard: &impl DeviceMemoryResource,
    stream: &Stream,
    layout: Layout,
    offset: i64,
) {
    let block = guard.allocate(layout, stream, Tag::default()).unwrap();
    let address = block.address().wrapping_add_signed(offset);
    stream.context().fill(address, 0, 1).unwrap();
    let Err(FreeError::Refused { block, reason }) = guard.deallocate(block, stream) else {
        panic!("it was not found");
    };
    let generation = block.as_ref().generation;
    assert_eq!(
        reason,
        ResourceError::Corrupted {
            generation,
            address,
            while_live: true
        }
    );
    // A repaired block can be freed.
    stream.context().fill(address, 0xCA, 1).unwrap();
    guard.deallocate(block, stream).unwrap();
}

#[test]
fn write_past_either_end_is_found_on_free() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let stream = context.default_stream();
        let direct = DebugGuard::new(Direct::new(&context), 0);
        let pages = DebugGuard::new(Exportable::guarded(&context, 4).unwrap(), 0);
        for (size, align) in [(1, 1), (1000, 256), (3 * MIB, 16)] {
            let layout = Layout::from_size_align(size, align).unwrap();
            for offset in [-1, -256, size as i64, size as i64 + 255] {
                assert_overwrite_is_found(&direct, &stream, layout, offset);
                assert_overwrite_is_found(&pages, &stream, layout, offset);
            }
        }
    });
}

#[test]
fn write_inside_a_block_is_accepted() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(Direct::new(&context), 0),
            context.default_stream(),
        );
        let block = guard
            .allocate(bytes(1000), &stream, Tag::default())
            .unwrap();
        let mut fresh = [0; 1000];
        context
            .copy_from_device(&mut fresh, block.address())
            .unwrap();
        assert_eq!(
            fresh, [0xCD; 1000],
            "what is not written is not zero by accident"
        );
        context.fill(block.address(), 7, 1000).unwrap();
        guard.deallocate(block, &stream).unwrap();
        assert_eq!(guard.take_violations(), []);
    });
}

#[test]
fn write_after_free_is_found_when_quarantine_ends() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(Direct::new(&context), 1 << 20),
            context.default_stream(),
        );
        let block = guard.allocate(bytes(MIB), &stream, Tag::default()).unwrap();
        let freed = block.as_ref();
        guard.deallocate(block, &stream).unwrap();
        assert!(guard.is_retired(freed));
        let used = guard
            .record_block_use(freed, &stream, Access::ReadWrite)
            .unwrap_err();
        assert_eq!(used.reason(), "Stale");
        assert_eq!(guard.bytes_outstanding().retired, 1 << 20);
        context.fill(freed.address + 5, 1, 1).unwrap();
        assert_eq!(guard.reap_pending().unwrap().freed, 1 << 20);
        assert_eq!(
            guard.take_violations(),
            [corrupted(freed.address + 5, false)]
        );
        assert!(!guard.is_retired(freed));
    });
}

#[test]
fn guarded_block_cannot_be_freed_while_a_use_is_open() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(StreamOrdered::new(&context), 0),
            context.stream().unwrap(),
        );
        let block = guard.allocate(bytes(MIB), &stream, Tag::default()).unwrap();
        let generation = block.as_ref().generation;
        let used = guard
            .prepare_block_use(block.as_ref(), &stream, Access::Read)
            .unwrap();
        let Err(FreeError::Refused { block, reason }) = guard.deallocate(block, &stream) else {
            panic!("it was freed");
        };
        let uses = 1;
        assert_eq!(reason, ResourceError::InUse { generation, uses });
        let mut content = [0; 16];
        context
            .copy_from_device(&mut content, block.address())
            .unwrap();
        assert_eq!(content, [0xCD; 16], "a refused block keeps its content");
        guard.finish_block_use(used, &stream).unwrap();
        guard.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn guard_forgets_blocks_that_its_upstream_released() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(StreamOrdered::new(&context), 0),
            context.stream().unwrap(),
        );
        for _ in 0..1000 {
            let block = guard.allocate(bytes(1), &stream, Tag::default()).unwrap();
            guard.deallocate(block, &stream).unwrap();
        }
        // The upstream still has those since its last reap.
        let known = format!("{guard:?}").matches("BlockRef").count();
        assert!(known < 1000, "{known}");
    });
}

#[test]
fn guard_refuses_a_block_at_an_impossible_address() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(StreamOrdered::new(&context), 0),
            context.stream().unwrap(),
        );
        let block = guard.allocate(bytes(1), &stream, Tag::default()).unwrap();
        let used = guard
            .prepare_block_use(block.as_ref(), &stream, Access::Read)
            .unwrap();
        let made_up = BlockRef {
            address: 1,
            ..block.as_ref()
        };
        assert!(!guard.is_retired(made_up));
        let used = BlockUse {
            block: made_up,
            ..used
        };
        let refused = guard.finish_block_use(used, &stream).unwrap_err();
        assert_eq!(refused.reason(), "Stale");
    });
}

#[test]
fn full_device_empties_the_quarantine() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (guard, stream) = (
            DebugGuard::new(Direct::new(&context), u64::MAX),
            context.default_stream(),
        );
        // Another user takes all but 8 MiB.
        let filler = Direct::new(&context);
        let (free, _) = context.memory_info().unwrap();
        let rest = filler
            .allocate(bytes(free as usize - 8 * MIB), &stream, Tag::default())
            .unwrap();
        for _ in 0..4 {
            let block = guard
                .allocate(bytes(4 * MIB), &stream, Tag::default())
                .unwrap();
            guard.deallocate(block, &stream).unwrap();
        }
        filler.deallocate(rest, &stream).unwrap();
    });
}
