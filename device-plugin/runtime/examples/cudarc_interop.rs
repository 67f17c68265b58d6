//! Passes contexts, streams and memory between cudarc and the runtime, without addresses. Needs the
//! feature `cudarc-interop`.

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::{DeviceRuntime, GpuRef, Tag, TrackedSlice};
use cudarc::driver::{CudaContext, CudaSlice};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // A program over cudarc, with its own context, stream and memory.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let weights: CudaSlice<u32> = stream.clone_htod(&[1, 2, 3])?;
    // The runtime of the same context adopts the memory: shared, checked, and freed once.
    let runtime = DeviceRuntime::for_cudarc(&context)?;
    let weights = GpuRef::from(TrackedSlice::from_cudarc(&runtime, weights)?);
    let other = context.new_stream()?;
    // cudarc gets it back as a view, ordered behind the last write in whatever stream.
    let token = weights.begin_write(Instant::now(), Duration::from_secs(5))?;
    weights.write_in_cudarc(&token, &stream, |mut view| {
        stream.memset_zeros(&mut view.slice_mut(0..1))
    })??;
    weights.commit(token, Instant::now())?;
    let copied = weights.read_in_cudarc(&other, |view| other.clone_dtod(&view))??;
    assert_eq!(other.clone_dtoh(&copied)?, [0, 2, 3]);
    // Memory of the runtime's pool, by the same views, in a stream of the runtime.
    let pool_stream = runtime.streams().next()?;
    let mut pooled = TrackedSlice::allocate(&runtime, 2, &pool_stream, Tag("pooled"))?;
    pooled.copy_from_host(&[7_u32, 8])?;
    let pool_stream = pool_stream.to_cudarc(&context)?;
    let copied = GpuRef::from(pooled)
        .read_in_cudarc(&pool_stream, |view| pool_stream.clone_dtod(&view))??;
    assert_eq!(pool_stream.clone_dtoh(&copied)?, [7, 8]);
    Ok(())
}
