//! Tests that contexts, streams and slices of cudarc go in and out of the runtime.

use std::sync::Arc;

use bursar_runtime::driver::Stream;
use bursar_runtime::driver::interop::InteropError;
use bursar_runtime::{DeviceMemoryResource as _, DeviceRuntime, GpuRef, StaleReason, TrackedSlice};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};
use cudarc::driver::{CudaContext, CudaSlice};

use crate::examples::cudarc_interop;
use crate::{items, slice, spin};

#[test]
fn cudarc_program_adopts_memory_without_addresses() {
    run_in_subprocess(ONE_GPU, |_| cudarc_interop::main().unwrap());
}

#[test]
fn adopted_slice_is_freed_once_or_returned() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let runtime = DeviceRuntime::for_cudarc(&context).unwrap();
        stream.synchronize().unwrap();
        let used = machine.used(0);
        let take = || -> CudaSlice<u8> { stream.alloc_zeros(64 << 20).unwrap() };
        let memory = GpuRef::from(TrackedSlice::from_cudarc(&runtime, take()).unwrap());
        let clone = memory.clone();
        assert_eq!(
            (memory.len(), memory.generation()),
            (64 << 20, runtime.generation())
        );
        drop(memory);
        assert!(machine.used(0) > used);
        let busy = runtime.stream().unwrap();
        clone.read_in(&busy, |_| spin(&busy)).unwrap();
        drop(clone);
        let own = Stream::from_cudarc(&stream).unwrap();
        assert_eq!(
            own.is_idle(),
            Ok(false),
            "the free follows the other stream"
        );
        context.synchronize().unwrap();
        // cudarc's own allocations show that the memory is free again.
        let adopted = TrackedSlice::from_cudarc(&runtime, take()).unwrap();
        let address = adopted.address();
        let returned = adopted.into_cudarc().unwrap();
        assert_eq!(returned.len(), 64 << 20);
        let again = TrackedSlice::from_cudarc(&runtime, returned).unwrap();
        assert_eq!(again.address(), address);
        let foreign = slice(&runtime, &[1], &own)
            .into_cudarc()
            .unwrap_err()
            .unwrap();
        assert_eq!(foreign.len(), 1);
    });
}

#[test]
fn returned_slice_follows_its_uses_in_every_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = CudaContext::new(0).unwrap();
        let [stream, other] = [(); 2].map(|()| context.new_stream().unwrap());
        let runtime = DeviceRuntime::for_cudarc(&context).unwrap();
        let slice: CudaSlice<u32> = stream.clone_htod(&[1]).unwrap();
        let adopted = TrackedSlice::from_cudarc(&runtime, slice).unwrap();
        spin(&Stream::from_cudarc(&stream).unwrap());
        let returned = adopted.into_cudarc().unwrap();
        let _copied = other.clone_dtod(&returned).unwrap();
        let other = Stream::from_cudarc(&other).unwrap();
        assert_eq!(other.is_idle(), Ok(false));
    });
}

#[test]
fn returned_slice_leaves_nothing_behind() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let runtime = DeviceRuntime::for_cudarc(&context).unwrap();
        let slice: CudaSlice<u32> = stream.clone_htod(&[1]).unwrap();
        let handles = Arc::strong_count(&stream);
        let adopted = TrackedSlice::from_cudarc(&runtime, slice).unwrap();
        assert!(Arc::strong_count(&stream) > handles);
        let _returned = adopted.into_cudarc().unwrap();
        assert_eq!(Arc::strong_count(&stream), handles);
    });
}

#[test]
fn streams_of_cudarc_keep_their_identity() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = CudaContext::new(0).unwrap();
        let foreign = context.new_stream().unwrap();
        let first = Stream::from_cudarc(&foreign).unwrap();
        assert_eq!(Stream::from_cudarc(&foreign).unwrap(), first);
        assert_eq!(first.to_cudarc(&context).unwrap(), foreign);
        // The wrapped stream outlives cudarc's handle.
        drop(foreign);
        spin(&first);
        first.synchronize().unwrap();
        let null = Stream::from_cudarc(&context.default_stream()).unwrap();
        assert_eq!(null, first.context().default_stream());
        assert_eq!(null.to_cudarc(&context).unwrap(), context.default_stream());
        let per_thread = Stream::from_cudarc(&context.per_thread_stream());
        assert_eq!(per_thread, Err(InteropError::PerThreadStream));
        let own = DeviceRuntime::for_ordinal(0).unwrap().stream().unwrap();
        let lent = own.to_cudarc(&context).unwrap();
        drop(own);
        lent.synchronize().unwrap();
    });
}

#[test]
fn foreign_contexts_and_stale_runtimes_are_refused() {
    run_in_subprocess(TWO_GPUS, |_| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let other = DeviceRuntime::for_ordinal(1).unwrap();
        let other_context = CudaContext::new(1).unwrap();
        let wrong = other.stream().unwrap().to_cudarc(&context);
        assert_eq!(wrong, Err(InteropError::NotPrimary { ordinal: 0 }));
        assert_eq!(
            other.to_cudarc().unwrap().ordinal(),
            other_context.ordinal()
        );
        let memory: CudaSlice<u8> = stream.alloc_zeros(16).unwrap();
        let wrong_device = TrackedSlice::from_cudarc(&other, memory).unwrap_err();
        assert!(
            wrong_device.to_string().contains("device"),
            "{wrong_device}"
        );
        let runtime = DeviceRuntime::for_cudarc(&context).unwrap();
        let memory: CudaSlice<u32> = stream.clone_htod(&[5]).unwrap();
        let memory = GpuRef::from(TrackedSlice::from_cudarc(&runtime, memory).unwrap());
        assert_eq!(items(&memory), [5]);
        runtime.shut_down();
        let stale = memory.read_in_cudarc(&stream, |_| unreachable!("it is stale"));
        assert!(stale.unwrap_err().to_string().contains("shut down"));
        assert_eq!(memory.access(), Err(StaleReason::ShutDown));
        let late: CudaSlice<u8> = stream.alloc_zeros(16).unwrap();
        TrackedSlice::from_cudarc(&runtime, late).unwrap_err();
        assert_eq!(runtime.resource().bytes_outstanding().live, 0);
    });
}
