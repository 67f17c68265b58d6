//! Tests uses of blocks by streams with their access, first uses, and colliding pointers.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use bursar_runtime::driver::{Access, Context, Stream};
use bursar_runtime::error::CudaError;
use bursar_runtime::source::direct::DriverAllocator;
use bursar_runtime::{
    Block, Budget, DebugGuard, DeviceMemoryResource, DeviceRuntime, Direct, Exportable, FreeError,
    Logging, ResourceError, Statistics, StreamOrdered, Tag, TrackedSlice,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{slice, spin};

fn example() -> Result<()> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let memory = runtime.resource();
    let [own, writer, reader] = [(); 3].map(|()| runtime.stream().unwrap());
    // Asked once at the start: without tracking, blocks stay in their own streams.
    assert!(memory.supports_block_use_tracking());
    let block = memory.allocate(Layout::new::<[f32; 1024]>(), &own, Tag("activations"))?;
    let written = memory.prepare_block_use(block.as_ref(), &writer, Access::Write)?;
    spin(&writer); // stands for kernels that write the block
    memory.finish_block_use(written, &writer)?;
    // A read follows the write in the other stream; the host does not wait.
    let read = memory.prepare_block_use(block.as_ref(), &reader, Access::Read)?;
    assert_eq!(reader.is_idle(), Ok(false));
    memory.finish_block_use(read, &reader)?;
    // Work of a library that was submitted without a prepared use.
    memory.record_block_use(block.as_ref(), &reader, Access::Read)?;
    memory.deallocate(block, &own)?;
    Ok(())
}

#[test]
fn block_uses_are_ordered_by_their_access() {
    run_in_subprocess(ONE_GPU, |_| example().unwrap());
}

fn first_use_example() -> Result<()> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let (compute, upload) = (runtime.stream()?, runtime.streams().next()?);
    let mut weights: TrackedSlice<u32> =
        TrackedSlice::allocate(&runtime, 1024, &compute, Tag("weights"))?;
    // The upload fills fresh memory in its own stream; the compute stream goes on after it.
    let first = weights.prepare_first_use(&upload)?;
    assert_eq!((first.bytes(), first.stream()), (4096, &upload));
    spin(first.stream()); // stands for a copy to first.address()
    first.finish()?;
    assert_eq!(compute.is_idle(), Ok(false));
    assert_eq!(weights.stream(), &compute);
    weights.free()?;
    Ok(())
}

#[test]
fn first_use_in_another_stream_is_joined() {
    run_in_subprocess(ONE_GPU, |_| {
        first_use_example().unwrap();
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (own, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let mut memory = slice(&runtime, &[1], &own);
        let first = memory.prepare_first_use(&other).unwrap();
        spin(&other);
        drop(first);
        assert_eq!(own.is_idle(), Ok(false), "a drop joins too");
        runtime.shut_down();
        memory.prepare_first_use(&other).unwrap_err();
    });
}

fn resources(context: &Context) -> Vec<Box<dyn DeviceMemoryResource>> {
    let pool = bursar_runtime::Pool::new(Direct::new(context), context, Default::default());
    let stacked = Budget::new(Statistics::new(StreamOrdered::new(context)), u64::MAX);
    let log = bursar_runtime::adaptor::logging::MemorySink::default();
    vec![
        Box::new(pool.unwrap()),
        Box::new(StreamOrdered::new(context)),
        Box::new(Exportable::new(context).unwrap()),
        Box::new(Logging::new(stacked, log)),
        Box::new(DebugGuard::new(StreamOrdered::new(context), 0)),
    ]
}

/// Uses a block in two streams, and returns whether the second use waited for the first.
fn waits(
    memory: &dyn DeviceMemoryResource,
    context: &Context,
    first: Access,
    second: Access,
) -> bool {
    let [own, one, other] = [(); 3].map(|()| context.stream().unwrap());
    let layout = Layout::new::<[u8; 4096]>();
    let block = memory.allocate(layout, &own, Tag("test")).unwrap();
    let used = |stream: &Stream, access, work: &dyn Fn()| {
        let known = block.as_ref();
        let used = memory.prepare_block_use(known, stream, access).unwrap();
        work();
        memory.finish_block_use(used, stream).unwrap();
    };
    used(&one, first, &|| spin(&one));
    used(&other, second, &|| {});
    let waited = other.is_idle() == Ok(false);
    context.synchronize().unwrap();
    memory.deallocate(block, &own).unwrap();
    memory.reap_pending().unwrap();
    waited
}

#[test]
fn uses_conflict_unless_both_read() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let context = runtime.context();
        let all = [Access::Read, Access::Write, Access::ReadWrite];
        for memory in resources(context) {
            assert!(memory.supports_block_use_tracking(), "{}", memory.kind());
            for (first, second) in all.iter().flat_map(|one| all.map(|other| (*one, other))) {
                let conflict = first.writes() || second.writes();
                let waited = waits(&*memory, context, first, second);
                assert_eq!(waited, conflict, "{} {first:?} {second:?}", memory.kind());
            }
        }
        let direct = Direct::new(context);
        assert!(!Budget::new(direct, 1).supports_block_use_tracking());
    });
}

#[test]
fn own_stream_follows_conflicting_uses_of_other_streams() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        for memory in resources(runtime.context()) {
            let (own, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
            let layout = Layout::new::<u64>();
            let block = memory.allocate(layout, &own, Tag("test")).unwrap();
            spin(&other);
            let known = block.as_ref();
            memory
                .record_block_use(known, &other, Access::Write)
                .unwrap();
            let used = memory.prepare_block_use(known, &own, Access::Read).unwrap();
            assert_eq!(own.is_idle(), Ok(false), "{}", memory.kind());
            memory.finish_block_use(used, &own).unwrap();
            memory.deallocate(block, &own).unwrap();
        }
    });
}

/// Driver with a defect: its second allocation overlaps the first.
#[derive(Debug, Default)]
struct FakeDefectiveDriver {
    first: AtomicU64,
}

impl DriverAllocator for FakeDefectiveDriver {
    const KIND: &'static str = "defective";

    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64, CudaError> {
        match self.first.load(Ordering::Relaxed) {
            0 => {
                let real = Direct::new(context);
                let layout = Layout::from_size_align(bytes, 1).unwrap();
                let block = real.allocate(layout, &context.default_stream(), Tag::default());
                let address = block.unwrap().address();
                self.first.store(address, Ordering::Relaxed);
                Ok(address)
            }
            first => Ok(first + 256),
        }
    }
}

#[test]
fn colliding_pointer_is_an_error_until_the_block_is_freed() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let stream = runtime.stream().unwrap();
        let memory = Direct::with_allocator(runtime.context(), FakeDefectiveDriver::default());
        let layout = Layout::from_size_align(1024, 1).unwrap();
        let block = memory.allocate(layout, &stream, Tag("first")).unwrap();
        let address = block.address() + 256;
        let collision = ResourceError::PointerCollision {
            ordinal: 0,
            address,
            generation: block.as_ref().generation,
        };
        let refused = memory.allocate(layout, &stream, Tag("second")).unwrap_err();
        assert_eq!(refused, collision);
        assert_eq!(
            (refused.reason(), refused.retryable()),
            ("PointerCollision", false)
        );
        // The live block stays its owner's, and is freed once.
        assert_eq!(memory.bytes_outstanding().live, 1024);
        let known = block.as_ref();
        memory.deallocate(block, &stream).unwrap();
        let again = memory.deallocate(Block::new(known), &stream);
        assert!(matches!(again, Err(FreeError::Refused { .. })));
        let third = memory.allocate(layout, &stream, Tag("third")).unwrap();
        assert_eq!(third.address(), address);
    });
}
