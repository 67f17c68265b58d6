//! Tests a runtime without a context: physical memory that other processes map.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::Result;
use bursar_runtime::adaptor::logging::{Action, MemorySink};
use bursar_runtime::driver::{Access, GpuUuid};
use bursar_runtime::{
    BudgetSnapshot, DeviceRuntime, ErrorClass, Logging, NoContextRuntime,
    PhysicalMemoryResource as _, ResourceError, StaleReason, Tag, source::vmm,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

const MIB: u64 = 1 << 20;

fn uuid() -> GpuUuid {
    "GPU-00000000-0000-0000-0000-000000000001".parse().unwrap()
}

fn example() -> Result<()> {
    let runtime = NoContextRuntime::start(uuid())?;
    // The limit is the GPU's memory unless the program sets a lower one.
    runtime.set_limit(8 * MIB);
    let log = Arc::new(MemorySink::default());
    let memory = Logging::new(Arc::clone(runtime.physical()), Arc::clone(&log));
    // The driver creates memory in multiples of 2 MiB.
    let block = memory.create(memory.round_up(5 * MIB)?, Tag("weights"))?;
    let refused = memory.create(4 * MIB, Tag("more")).unwrap_err();
    println!("{refused}");
    assert_eq!(refused.class(), ErrorClass::OutOfMemory);
    // The descriptor keeps the memory, in this process or in another one that receives it.
    let descriptor = block.export()?;
    memory.release(block)?;
    drop(descriptor);
    for record in log.records() {
        let (action, bytes, tag) = (record.action, record.bytes, record.tag.0);
        println!("{action:?} {bytes} bytes for {tag}");
    }
    let actions: Vec<_> = log.records().iter().map(|record| record.action).collect();
    assert_eq!(
        actions,
        [Action::Allocate, Action::AllocateFailure, Action::Free]
    );
    assert_eq!(runtime.budget().used, 0);
    Ok(())
}

#[test]
fn runtime_without_a_context_makes_no_context_call() {
    run_in_subprocess(ONE_GPU, |machine| {
        example().unwrap();
        let runtime = NoContextRuntime::start(uuid()).unwrap();
        assert_eq!(runtime.total_memory().unwrap(), 16 << 30);
        assert!(runtime.driver_version().unwrap() > 0);
        let memory = runtime.physical();
        let block = memory.create(2 * MIB, Tag("test")).unwrap();
        assert!(machine.usage(0).processes.is_empty(), "NVML lists it");
        memory.release(block).unwrap();
        drop(runtime);
        assert_eq!(machine.context_calls(), 0);
        drop(DeviceRuntime::for_gpu(uuid()).unwrap());
        assert!(machine.context_calls() > 0, "the calls are not counted");
    });
}

#[test]
fn physical_memory_is_mapped_by_its_importer() {
    run_in_subprocess(ONE_GPU, |machine| {
        let runtime = NoContextRuntime::start(uuid()).unwrap();
        let memory = runtime.physical();
        let block = memory.create(2 * MIB, Tag("test")).unwrap();
        let descriptor = block.export().unwrap();
        memory.release(block).unwrap();
        assert_eq!(memory.bytes_outstanding(), 0);
        let importer = DeviceRuntime::for_gpu(uuid()).unwrap();
        let context = importer.context();
        let before = machine.used(0);
        let access = Access::ReadWrite;
        let mapping = vmm::import(context, descriptor.as_fd(), 2 * MIB, access).unwrap();
        drop(descriptor);
        mapping.fill(context, 0, 7, 4096).unwrap();
        let mut bytes = [0; 4096];
        mapping.read(context, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
        drop(mapping);
        assert_eq!(machine.used(0), before - 2 * MIB);
    });
}

#[test]
fn runtime_without_a_context_creates_nothing_once_stale() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = NoContextRuntime::start(uuid()).unwrap();
        let memory = runtime.physical();
        let block = memory.create(2 * MIB, Tag("test")).unwrap();
        runtime.state().shut_down();
        let refused = memory.create(2 * MIB, Tag("test")).unwrap_err();
        assert_eq!(refused, ResourceError::Ended(StaleReason::ShutDown));
        memory.release(block).unwrap();
        let (limit, used) = (16 << 30, 0);
        assert_eq!(runtime.budget(), BudgetSnapshot { limit, used });
    });
}
