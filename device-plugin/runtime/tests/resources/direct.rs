//! Tests memory that is allocated and freed one block at a time.

use std::alloc::Layout;

use bursar_runtime::driver::{Access, Attach, Stream};
use bursar_runtime::{
    Block, Budget, DebugGuard, DeviceMemoryResource, Direct, Exportable, FreeError, Managed,
    ResourceError, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::raw::Raw as _;
use crate::{MIB, bytes, context, fault};

fn direct(ordinal: u32) -> (Direct, Stream) {
    let context = context(ordinal);
    (Direct::new(&context), context.default_stream())
}

#[test]
fn allocation_is_counted_until_freed() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (direct, stream) = direct(0);
        let before = machine.used(0);
        let block = direct
            .allocate(bytes(4 * MIB), &stream, Tag("weights"))
            .unwrap();
        assert_eq!(direct.bytes_outstanding().live, 4 << 20);
        assert_eq!(machine.used(0), before + (4 << 20));
        direct.deallocate(block, &stream).unwrap();
        assert_eq!(direct.bytes_outstanding().total(), 0);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn zero_bytes_are_refused() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let error = direct
            .allocate(bytes(0), &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error, ResourceError::ZeroBytes { ordinal: 0 });
        assert!(!error.retryable());
    });
}

#[test]
fn alignment_above_the_drivers_is_refused() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let layout = Layout::from_size_align(MIB, 4096).unwrap();
        let error = direct
            .allocate(layout, &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error.reason(), "Alignment");
    });
}

#[test]
fn free_in_another_devices_stream_returns_the_block() {
    run_in_subprocess(TWO_GPUS, |_| {
        let ((first, stream), (_, other)) = (direct(0), direct(1));
        let wrong = ResourceError::WrongOrdinal {
            ordinal: 0,
            found: 1,
        };
        assert_eq!(
            first.allocate(bytes(1), &other, Tag::default()),
            Err(wrong.clone())
        );
        let block = first.allocate(bytes(1), &stream, Tag::default()).unwrap();
        let Err(FreeError::Refused { block, reason }) = first.deallocate(block, &other) else {
            panic!("it was freed");
        };
        assert_eq!(reason, wrong);
        first.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn free_of_a_foreign_block_returns_the_block() {
    run_in_subprocess(ONE_GPU, |_| {
        let ((first, stream), (second, _)) = (direct(0), direct(0));
        let block = first.allocate(bytes(1), &stream, Tag::default()).unwrap();
        let Err(FreeError::Refused { block, reason }) = second.deallocate(block, &stream) else {
            panic!("it was freed");
        };
        assert_eq!(reason.reason(), "Foreign");
        first.deallocate(block, &stream).unwrap();
    });
}

/// Frees a block twice, the second time while another block has its address, if the driver reuses
/// addresses.
fn assert_double_free_is_refused(memory: impl DeviceMemoryResource, stream: &Stream) -> bool {
    let (kind, memory) = (memory.kind(), Budget::new(memory, u64::MAX));
    let block = memory.allocate(bytes(MIB), stream, Tag::default()).unwrap();
    let old = block.as_ref();
    memory.deallocate(block, stream).unwrap();
    memory.reap_pending().unwrap();
    let new = memory.allocate(bytes(MIB), stream, Tag::default()).unwrap();
    let Err(FreeError::Refused { block, reason }) = memory.deallocate(Block::new(old), stream)
    else {
        panic!("{kind}: it was freed");
    };
    let generation = old.generation;
    assert_eq!(reason, ResourceError::Stale { generation }, "{kind}");
    assert_eq!(block.as_ref(), old);
    assert_eq!(memory.account().snapshot().used, 1 << 20, "{kind}");
    assert_eq!(memory.bytes_outstanding().live, 1 << 20, "{kind}");
    stream.context().fill(new.address(), 1, MIB).unwrap();
    let again = new.address() == old.address;
    memory.deallocate(new, stream).unwrap();
    again
}

#[test]
fn double_free_is_refused_when_the_address_was_reused() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let context = stream.context();
        let guarded = Exportable::guarded(context, 0).unwrap();
        assert!(assert_double_free_is_refused(direct, &stream));
        assert!(assert_double_free_is_refused(
            Managed::with_allocator(context, Attach::Global),
            &stream
        ));
        assert!(assert_double_free_is_refused(
            DebugGuard::new(Direct::new(context), 0),
            &stream
        ));
        assert_double_free_is_refused(StreamOrdered::new(context), &stream);
        assert_double_free_is_refused(Exportable::new(context).unwrap(), &stream);
        assert_double_free_is_refused(DebugGuard::new(guarded, 1 << 30), &stream);
    });
}

#[test]
fn only_a_full_device_is_out_of_memory() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let error = direct
            .allocate(bytes(1 << 40), &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error.reason(), "OutOfMemory");
        assert!(error.retryable());
    });
}

#[test]
fn block_use_is_a_stream_misuse_when_untracked() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let block = direct.allocate(bytes(1), &stream, Tag::default()).unwrap();
        let misuse = ResourceError::StreamMisuse { resource: "direct" };
        assert_eq!(
            direct.prepare_block_use(block.as_ref(), &stream, Access::ReadWrite),
            Err(misuse.clone())
        );
        assert_eq!(
            direct.record_block_use(block.as_ref(), &stream, Access::ReadWrite),
            Err(misuse)
        );
        direct.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn failed_free_stays_charged_and_is_reaped() {
    run_in_subprocess(ONE_GPU, |_| {
        let (direct, stream) = direct(0);
        let block = direct
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        let freed = block.as_ref();
        fault(&stream);
        let Err(FreeError::Retired { bytes, source }) = direct.deallocate(block, &stream) else {
            panic!("it was freed");
        };
        assert_eq!((bytes, source.code), (1 << 20, 700));
        assert!(direct.is_retired(freed));
        assert_eq!(direct.bytes_outstanding().retired, 1 << 20);
        // The process image is poisoned for good, so every retry fails and no block is forgotten.
        assert_eq!(direct.reap_pending().unwrap_err().reason(), "Cuda");
        assert_eq!(direct.bytes_outstanding().retired, 1 << 20);
    });
}

#[test]
fn managed_memory_is_counted_and_uses_no_device_memory() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let (managed, stream) = (
            Managed::with_allocator(&context, Attach::Global),
            context.default_stream(),
        );
        let before = machine.used(0);
        let block = managed
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        assert_eq!(machine.used(0), before);
        assert_eq!(managed.bytes_outstanding().live, 1 << 20);
        assert_eq!(managed.kind(), "managed");
        managed.deallocate(block, &stream).unwrap();
        assert_eq!(managed.bytes_outstanding().total(), 0);
    });
}

#[test]
fn eight_threads_of_64_iterations_leak_nothing() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (direct, stream) = direct(0);
        let before = machine.used(0);
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (direct, stream) = (&direct, &stream);
                scope.spawn(move || {
                    for iteration in 1..=64 {
                        let layout = bytes(thread * iteration * 1000);
                        let block = direct.allocate(layout, stream, Tag::default()).unwrap();
                        direct.deallocate(block, stream).unwrap();
                    }
                });
            }
        });
        assert_eq!(direct.bytes_outstanding().total(), 0);
        assert_eq!(machine.used(0), before);
    });
}
