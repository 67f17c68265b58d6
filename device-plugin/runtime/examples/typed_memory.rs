//! Copies items to device memory, shares it between streams, and copies it back.

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::{DeviceRuntime, GpuRef, Tag, TrackedSlice};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let [loading, serving, reading] = [runtime.stream()?, runtime.stream()?, runtime.stream()?];
    // A slice has one owner, which uses it in one stream at a time.
    let mut weights = TrackedSlice::<f32>::allocate(&runtime, 3, &loading, Tag("weights"))?;
    weights.copy_from_host(&[1.0, 2.0, 3.0])?;
    // A reference has any number of owners, in any stream of the device.
    let weights = GpuRef::from(weights);
    let reader = weights.clone();
    // One writer at a time has the token.
    let token = weights.begin_write(Instant::now(), Duration::from_secs(5))?;
    weights.write_in(&token, &serving, |_address| {
        // Submit work that writes here, of any library, to `serving`.
    })?;
    weights.commit(token, Instant::now())?;
    reader.read_in(&reading, |_address| {
        // Work in `reading` follows the last write, in whatever stream that was.
    })?;
    // So does a copy to the host, which waits for the write.
    let mut items = [0.0; 3];
    reader.copy_to_host(&mut items)?;
    assert_eq!(items, [1.0, 2.0, 3.0]);
    // The memory of an older generation is stale: `access` says why.
    assert_eq!(reader.generation(), runtime.generation());
    println!("{} items at {:#x}", reader.len(), reader.access()?);
    Ok(())
}
