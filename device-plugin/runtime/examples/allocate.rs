//! Allocates device memory from the GPU's default stack: a pool within the container's quota.

use std::alloc::Layout;
use std::error::Error;

use bursar_runtime::{DeviceMemoryResource as _, DeviceRuntime, Tag};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // All callers of the process share the runtime of a GPU.
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let memory = runtime.resource();
    let stream = runtime.streams().next()?;
    let layout = Layout::array::<f32>(1 << 20)?;
    let weights = memory.allocate(layout, &stream, Tag("weights"))?;
    println!("{} bytes at {:#x}", weights.bytes(), weights.address());
    let budget = runtime.budget();
    println!("{} of {} bytes are in use", budget.used, budget.limit);
    // The block is free behind the work that is in the stream by now. The host does not wait.
    memory.deallocate(weights, &stream)?;
    // The pool has the memory, so this takes no call of the driver.
    let activations = memory.allocate(layout, &stream, Tag("activations"))?;
    memory.deallocate(activations, &stream)?;
    println!("{:?}", runtime.statistics());
    assert_eq!(runtime.budget().used, 0);
    Ok(())
}
