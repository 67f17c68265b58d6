//! Allocates, copies and frees in tasks of Tokio. No worker waits for the driver.

use std::error::Error;

use bursar_runtime::{AsyncRuntime, DeviceRuntime, Tag};

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let runtime = AsyncRuntime::from(DeviceRuntime::for_ordinal(0)?);
    let stream = runtime.runtime().streams().next()?;
    let memory = runtime
        .allocate_async::<u32>(3, &stream, Tag("request"))
        .await?;
    let memory = runtime.copy_from_host_async(memory, vec![1, 2, 3]).await?;
    // Launch kernels in the stream here; a launch does not block.
    runtime.synchronize_async(&stream).await?;
    let (memory, items) = runtime.copy_to_host_async(memory).await?;
    assert_eq!(items, [1, 2, 3]);
    runtime.free_async(memory).await?;
    // Any other operation that may block.
    let (free, total) = runtime
        .run(|runtime| runtime.context().memory_info())
        .await??;
    println!("{free} of {total} bytes are free");
    Ok(())
}
