//! Uses blocks and fresh memory in several streams, in an order that follows the access of each
//! use.

use std::alloc::Layout;
use std::error::Error;

use bursar_runtime::driver::Access;
use bursar_runtime::{
    DeviceMemoryResource as _, DeviceRuntime, Direct, ResourceError, Tag, TrackedSlice,
};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let memory = runtime.resource();
    let [own, writing, reading] = [runtime.stream()?, runtime.stream()?, runtime.stream()?];
    // A resource that does not track uses keeps each block in its own stream.
    assert!(memory.supports_block_use_tracking());
    let layout = Layout::array::<f32>(1024)?;
    let block = memory.allocate(layout, &own, Tag("activations"))?;
    // The stream follows the allocation.
    let written = memory.prepare_block_use(block.as_ref(), &writing, Access::Write)?;
    // Submit work that writes the block to `writing` here.
    memory.finish_block_use(written, &writing)?;
    // A read follows the write in the other stream. The host does not wait.
    let read = memory.prepare_block_use(block.as_ref(), &reading, Access::Read)?;
    memory.finish_block_use(read, &reading)?;
    // Work that was submitted without a prepared use.
    memory.record_block_use(block.as_ref(), &reading, Access::Read)?;
    memory.deallocate(block, &own)?; // follows all uses
    // The first use of fresh memory is an upload in another stream.
    let mut weights = TrackedSlice::<f32>::allocate(&runtime, 1024, &own, Tag("weights"))?;
    let upload = weights.prepare_first_use(&writing)?;
    println!("copy {} bytes to {:#x}", upload.bytes(), upload.address());
    upload.finish()?; // `own` goes on behind it
    weights.free()?;
    // A defective driver may return an address that a live block has.
    let direct = Direct::new(runtime.context());
    match direct.allocate(layout, &own, Tag("checked")) {
        Err(error @ ResourceError::PointerCollision { .. }) => println!("{error}"),
        other => direct.deallocate(other?, &own)?,
    }
    Ok(())
}
