//! Orders the work of a library that knows neither the runtime nor its memory.

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::driver::Stream;
use bursar_runtime::{DeviceRuntime, GpuRef, Tag, TrackedSlice};

/// Stands for a library that submits work with an address to a stream.
fn submit_in_library(address: u64, stream: &Stream) {
    println!("{address:#x} in {stream:?}");
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let [own, foreign] = [runtime.stream()?, runtime.stream()?];
    let mut weights = TrackedSlice::<u32>::allocate(&runtime, 3, &own, Tag("weights"))?;
    weights.copy_from_host(&[1, 2, 3])?;
    let weights = GpuRef::from(weights);
    // The library takes no closure, so the program orders its write by hand, and records it after
    // the submission. No other use may come between.
    let token = weights.begin_write(Instant::now(), Duration::from_secs(5))?;
    foreign.wait_for(&weights.last_write())?;
    submit_in_library(weights.access()?, &foreign);
    weights.record_write(&token, &foreign)?;
    weights.commit(token, Instant::now())?;
    assert_eq!(weights.last_write(), foreign);
    // So is a read. A later write and the free wait for it.
    foreign.wait_for(&weights.last_write())?;
    submit_in_library(weights.access()?, &foreign);
    weights.record_read(&foreign)?;
    // The host waits for the recorded write.
    let mut items = [0; 3];
    weights.copy_to_host(&mut items)?;
    assert_eq!(items, [1, 2, 3]);
    Ok(())
}
