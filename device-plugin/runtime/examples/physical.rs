//! Creates physical memory without a context, and maps it as a process that receives it does.

use std::error::Error;
use std::os::fd::AsFd as _;

use bursar_runtime::driver::{Access, Driver};
use bursar_runtime::source::vmm;
use bursar_runtime::{DeviceRuntime, NoContextRuntime, PhysicalMemoryResource as _, Tag};

const MIB: u64 = 1 << 20;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let gpu = Driver::get()?.device(0)?.uuid()?;
    // NVML does not list a process that has no context.
    let creator = NoContextRuntime::start(gpu)?;
    creator.set_limit(8 * MIB);
    let memory = creator.physical();
    let bytes = memory.round_up(5 * MIB)?; // a multiple of the granularity
    let block = memory.create(bytes, Tag("weights"))?;
    let refused = memory.create(4 * MIB, Tag("more"));
    println!("{}", refused.expect_err("10 of 8 MiB"));
    // Send the descriptor to another process here. It keeps the memory.
    let descriptor = block.export()?;
    memory.release(block)?;
    // The importer has a context, and maps the memory.
    let importer = DeviceRuntime::for_gpu(gpu)?;
    let context = importer.context();
    let mapping = vmm::import(context, descriptor.as_fd(), bytes, Access::ReadWrite)?;
    mapping.fill(context, 0, 7, 4096)?;
    let mut content = [0; 4096];
    mapping.read(context, 0, &mut content)?;
    assert_eq!(content, [7; 4096]);
    Ok(())
}
