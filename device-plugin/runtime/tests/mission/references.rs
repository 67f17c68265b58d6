//! Tests what a shared reference tells of its memory, and foreign work that is recorded afterwards.

use std::time::Instant;

use anyhow::Result;
use bursar_runtime::driver::Stream;
use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::memory::gpu_ref::WriteError;
use bursar_runtime::memory::write_token::WriteRefused;
use bursar_runtime::{DeviceMemoryResource as _, StaleReason};
use bursar_runtime::{DeviceRuntime, Direct, GpuRef, ResourceError, StreamOrdered};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{LASTS, slice, spin};

/// Stands for a library that submits its own work, to a stream and an address.
fn foreign_library(_address: u64, stream: &Stream) {
    spin(stream);
}

fn example() -> Result<()> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let [own, foreign, reader] = [(); 3].map(|()| runtime.stream().unwrap());
    let weights = GpuRef::from(slice(&runtime, &[1, 2, 3], &own));
    // A message between actors may carry the reference with what it is.
    println!(
        "{} items of generation {} on {} (device {})",
        weights.len(),
        weights.generation(),
        weights.device_id(),
        weights.ordinal()
    );
    assert_eq!(weights.generation(), runtime.generation());
    assert_eq!(weights.device_id(), runtime.uuid());
    // The library takes no closure, so its write is recorded after the submission.
    foreign.wait_for(&weights.last_write())?;
    let token = weights.begin_write(Instant::now(), LASTS)?;
    foreign_library(weights.access()?, &foreign);
    weights.record_write(&token, &foreign)?;
    weights.commit(token, Instant::now())?;
    // A reader in any stream is ordered behind it.
    weights.read_in(&reader, |_address| {})?;
    assert_eq!(reader.is_idle(), Ok(false));
    assert_eq!(weights.last_write(), foreign);
    // The host waits for the write.
    let mut items = [0; 3];
    weights.copy_to_host(&mut items)?;
    assert_eq!((items, foreign.is_idle()), ([1, 2, 3], Ok(true)));
    Ok(())
}

#[test]
fn reference_tells_its_generation_and_records_foreign_work() {
    run_in_subprocess(ONE_GPU, |_| example().unwrap());
}

#[test]
fn recorded_write_counts_even_if_the_token_is_refused() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (own, foreign) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let memory = GpuRef::from(slice(&runtime, &[1], &own));
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        memory.fence_writer();
        spin(&foreign);
        let refused = memory.record_write(&token, &foreign);
        assert_eq!(refused, Err(WriteError::Refused(WriteRefused::Fenced)));
        assert_eq!(memory.last_write(), foreign);
        memory.read_in(&own, |_| {}).unwrap();
        assert_eq!(own.is_idle(), Ok(false));
    });
}

#[test]
fn later_write_follows_a_recorded_read_and_its_predecessors() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let [own, busy, reader] = [(); 3].map(|()| runtime.stream().unwrap());
        let memory = GpuRef::from(slice(&runtime, &[1], &own));
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        memory.read_in(&busy, |_| spin(&busy)).unwrap();
        memory.record_write(&token, &reader).unwrap();
        // The recorded stream follows the earlier read, so who follows it follows both.
        assert_eq!(reader.is_idle(), Ok(false));
        memory.record_read(&busy).unwrap();
        memory.write_in(&token, &own, |_| {}).unwrap();
        assert_eq!(own.is_idle(), Ok(false));
    });
}

#[test]
fn free_waits_for_recorded_work() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let runtime = runtime.with_resource(|_| StreamOrdered::new(runtime.context()));
        let (own, foreign) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let memory = GpuRef::from(slice(&runtime, &[1], &own));
        spin(&foreign);
        memory.record_read(&foreign).unwrap();
        drop(memory);
        assert_eq!(runtime.resource().bytes_outstanding().retired, 4);
    });
}

#[test]
fn recorded_use_is_refused_when_untracked_or_stale() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let direct = runtime.with_resource(|_| Direct::new(runtime.context()));
        let (own, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let memory = GpuRef::from(slice(&direct, &[1], &own));
        let misuse = ResourceError::StreamMisuse { resource: "direct" };
        assert_eq!(memory.record_read(&other), Err(MemoryError::from(misuse)));
        runtime.shut_down();
        let stale = MemoryError::from(StaleReason::ShutDown);
        assert_eq!(memory.record_read(&own), Err(stale));
    });
}
