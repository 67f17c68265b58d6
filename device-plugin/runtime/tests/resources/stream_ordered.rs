//! Tests stream-ordered memory.

use bursar_runtime::driver::{Access, Stream};
use bursar_runtime::{
    Budget, DeviceMemoryResource as _, FreeError, ResourceError, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::{MIB, SPIN_TIME, bytes, context, spin};

fn memory() -> (StreamOrdered, Stream, Stream) {
    let context = context(0);
    let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
    (StreamOrdered::new(&context), first, second)
}

#[test]
fn freed_block_is_retired_until_its_stream_is_done() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, stream, _) = memory();
        let block = memory
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        let freed = block.as_ref();
        spin(&stream, SPIN_TIME);
        memory.deallocate(block, &stream).unwrap();
        let outstanding = memory.bytes_outstanding();
        assert_eq!((outstanding.live, outstanding.retired), (0, 1 << 20));
        assert!(memory.is_retired(freed));
        assert_eq!(memory.reap_pending().unwrap().pending, 1 << 20);
        stream.synchronize().unwrap();
        let reaped = memory.reap_pending().unwrap();
        assert_eq!((reaped.freed, reaped.pending), (1 << 20, 0));
        assert!(!memory.is_retired(freed));
    });
}

#[test]
fn frees_complete_in_the_order_of_the_frees() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, stream, _) = memory();
        let memory = Budget::new(memory, 2 << 20);
        let allocate = || memory.allocate(bytes(MIB), &stream, Tag::default());
        let (old, young) = (allocate().unwrap(), allocate().unwrap());
        memory.deallocate(young, &stream).unwrap();
        stream.synchronize().unwrap();
        spin(&stream, SPIN_TIME);
        memory.deallocate(old, &stream).unwrap();
        // There is room, because the block that was allocated last was freed long ago.
        memory.deallocate(allocate().unwrap(), &stream).unwrap();
    });
}

#[test]
fn free_waits_for_reported_uses_in_other_streams() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let used = memory
            .prepare_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        spin(&other, SPIN_TIME);
        memory.finish_block_use(used, &other).unwrap();
        memory.deallocate(block, &alloc_stream).unwrap();
        assert!(
            !alloc_stream.is_idle().unwrap(),
            "the free is behind the other stream's work"
        );
        assert_eq!(memory.reap_pending().unwrap().freed, 0);
        alloc_stream.synchronize().unwrap();
        assert_eq!(memory.reap_pending().unwrap().freed, 1 << 20);
    });
}

#[test]
fn prepared_use_waits_for_the_allocation() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        spin(&alloc_stream, SPIN_TIME);
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        assert!(other.is_idle().unwrap());
        let used = memory
            .prepare_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        assert!(!other.is_idle().unwrap(), "it waits for the allocation");
        memory.finish_block_use(used, &other).unwrap();
        memory.deallocate(block, &other).unwrap();
    });
}

#[test]
fn recorded_use_delays_the_free() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        spin(&other, SPIN_TIME);
        memory
            .record_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        memory.deallocate(block, &alloc_stream).unwrap();
        assert!(!alloc_stream.is_idle().unwrap());
    });
}

#[test]
fn completed_uses_of_a_live_block_are_pruned() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, busy) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        spin(&busy, SPIN_TIME);
        memory
            .record_block_use(block.as_ref(), &busy, Access::Read)
            .unwrap();
        for _ in 0..100 {
            let stream = alloc_stream.context().stream().unwrap();
            memory
                .record_block_use(block.as_ref(), &stream, Access::Read)
                .unwrap();
            stream.synchronize().unwrap();
        }
        let uses = format!("{memory:?}").matches("StreamUse").count();
        assert!(uses <= 33, "{uses}");
        memory.deallocate(block, &alloc_stream).unwrap();
        assert!(!alloc_stream.is_idle().unwrap(), "the busy use is kept");
    });
}

#[test]
fn free_is_refused_while_a_use_is_open() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let used = memory
            .prepare_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        let Err(FreeError::Refused { block, reason }) = memory.deallocate(block, &alloc_stream)
        else {
            panic!("it was freed");
        };
        assert_eq!(
            reason,
            ResourceError::InUse {
                generation: 0,
                uses: 1
            }
        );
        memory.finish_block_use(used, &other).unwrap();
        memory.deallocate(block, &alloc_stream).unwrap();
    });
}

#[test]
fn use_is_refused_when_finished_in_another_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let used = memory
            .prepare_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        let error = memory.finish_block_use(used, &alloc_stream).unwrap_err();
        assert_eq!(error.reason(), "WrongStream");
    });
}

#[test]
fn block_is_stale_after_its_free() {
    run_in_subprocess(ONE_GPU, |_| {
        let (memory, alloc_stream, other) = memory();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let freed = block.as_ref();
        memory.deallocate(block, &alloc_stream).unwrap();
        // The next block may have the same address.
        let next = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let stale = ResourceError::Stale {
            generation: freed.generation,
        };
        assert_eq!(
            memory.prepare_block_use(freed, &other, Access::ReadWrite),
            Err(stale.clone())
        );
        assert_eq!(
            memory.record_block_use(freed, &other, Access::ReadWrite),
            Err(stale)
        );
        memory
            .record_block_use(next.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        memory.deallocate(next, &alloc_stream).unwrap();
    });
}

#[test]
fn use_in_another_devices_stream_is_refused() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (memory, alloc_stream, _) = memory();
        let other = context(1).stream().unwrap();
        let block = memory
            .allocate(bytes(MIB), &alloc_stream, Tag::default())
            .unwrap();
        let error = memory
            .record_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap_err();
        assert_eq!(error.reason(), "WrongOrdinal");
        memory.deallocate(block, &alloc_stream).unwrap();
    });
}

#[test]
fn eight_threads_of_64_iterations_leak_nothing() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let memory = StreamOrdered::new(&context);
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (memory, context) = (&memory, &context);
                scope.spawn(move || {
                    let (alloc_stream, other) =
                        (context.stream().unwrap(), context.stream().unwrap());
                    for iteration in 1..=64 {
                        let layout = bytes(thread * iteration * 1000);
                        let block = memory
                            .allocate(layout, &alloc_stream, Tag::default())
                            .unwrap();
                        memory
                            .record_block_use(block.as_ref(), &other, Access::ReadWrite)
                            .unwrap();
                        memory.deallocate(block, &alloc_stream).unwrap();
                    }
                });
            }
        });
        context.synchronize().unwrap();
        memory.reap_pending().unwrap();
        assert_eq!(memory.bytes_outstanding().total(), 0);
    });
}
