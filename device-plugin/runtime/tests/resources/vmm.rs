//! Tests exportable memory and guard pages.

use std::alloc::Layout;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Access, Context, Stream};
use bursar_runtime::{Budget, DeviceMemoryResource as _, Exportable, Physical, Tag, source::vmm};
use bursar_sim_lab::{ONE_GPU, peer_command, peer_role, run_in_subprocess};

use crate::raw::Raw as _;
use crate::{MIB, SPIN_TIME, bytes, context, spin};

fn exportable() -> (Context, Exportable, Stream) {
    let context = context(0);
    let (memory, stream) = (Exportable::new(&context), context.stream());
    (context, memory.unwrap(), stream.unwrap())
}

#[test]
fn exported_block_outlives_its_free_in_the_importer() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (context, memory, stream) = exportable();
        let before = machine.used(0);
        let block = memory
            .allocate(bytes(3 * MIB), &stream, Tag::default())
            .unwrap();
        context.copy_to_device(block.address(), b"bursar").unwrap();
        let freed = block.as_ref();
        let descriptor = memory.export(freed).unwrap();
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().total(), 0);
        assert_eq!(memory.export(freed).unwrap_err().reason(), "Stale");
        let mapping = vmm::import(&context, descriptor.as_fd(), 4 << 20, Access::Read).unwrap();
        drop(descriptor);
        let mut back = [0; 6];
        context
            .copy_from_device(&mut back, mapping.address())
            .unwrap();
        assert_eq!(&back, b"bursar");
        assert_eq!(machine.used(0), before + (4 << 20));
        drop(mapping);
        assert_eq!(machine.used(0), before);
    });
}

/// Runs the importer: reads, responds, and holds the memory until it is killed.
fn importer() {
    let descriptor = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let context = context(0);
    let mapping = vmm::import(&context, descriptor.as_fd(), 2 << 20, Access::ReadWrite).unwrap();
    drop(descriptor);
    let mut found = [0; 6];
    context
        .copy_from_device(&mut found, mapping.address())
        .unwrap();
    context
        .copy_to_device(mapping.address(), b"answer")
        .unwrap();
    println!("found {}", std::str::from_utf8(&found).unwrap());
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn shared_block_survives_the_exit_of_either_process() {
    run_in_subprocess(ONE_GPU, |machine| {
        if peer_role().is_some() {
            return importer();
        }
        let (context, memory, stream) = exportable();
        let before = machine.used(0);
        let block = memory
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        context.copy_to_device(block.address(), b"bursar").unwrap();
        let descriptor = memory.export(block.as_ref()).unwrap();
        let mut importer = peer_command("importer")
            .stdin(descriptor)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(importer.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("found bursar")));
        let mut answer = [0; 6];
        context
            .copy_from_device(&mut answer, block.address())
            .unwrap();
        assert_eq!(&answer, b"answer");
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().total(), 0);
        // The importer's context and mapping; `before` includes the context of this process.
        assert_eq!(machine.used(0), before + (518 << 20) + (2 << 20));
        importer.kill().unwrap();
        importer.wait().unwrap();
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn freed_block_stays_mapped_until_its_stream_is_done() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (_, memory, stream) = exportable();
        let block = memory
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        let used = machine.used(0);
        spin(&stream, SPIN_TIME);
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().retired, 1 << 20);
        assert_eq!(machine.used(0), used);
        stream.synchronize().unwrap();
        assert_eq!(memory.reap_pending().unwrap().freed, 1 << 20);
        assert_eq!(machine.used(0), used - (2 << 20));
    });
}

#[test]
fn dropped_resource_waits_for_the_work_before_a_free() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let (memory, stream) = (
            Exportable::new(&context).unwrap(),
            context.stream().unwrap(),
        );
        let [freed, live] = [(); 2].map(|()| {
            memory
                .allocate(bytes(MIB), &stream, Tag::default())
                .unwrap()
        });
        let used = machine.used(0);
        let start = Instant::now();
        spin(&stream, Duration::from_millis(300));
        memory.deallocate(freed, &stream).unwrap();
        let address = live.as_ref().address;
        drop(memory);
        assert!(start.elapsed() >= Duration::from_millis(300));
        assert_eq!(machine.used(0), used - (2 << 20));
        // Live blocks are still mapped.
        context.fill(address, 1, 1 << 20).unwrap();
    });
}

#[test]
fn guarded_block_faults_past_its_end_and_after_its_free() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let memory = Exportable::guarded(&context, 2).unwrap();
        let stream = context.default_stream();
        for (size, align) in [(1, 1), (1000, 8), (2 * MIB, 256), (5 * MIB + 3, 1)] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let block = memory.allocate(layout, &stream, Tag::default()).unwrap();
            let (start, end) = (block.address(), block.address() + block.bytes());
            assert!(start.is_multiple_of(align as u64));
            context.fill(start, 1, size).unwrap();
            let edge = end.next_multiple_of(align as u64);
            assert!(
                context.fill(end, 1, (edge - end + 1) as usize).is_err(),
                "{size} bytes"
            );
            let page = start & !((2 << 20) - 1);
            assert!(context.fill(page - 1, 1, 1).is_err());
            memory.deallocate(block, &stream).unwrap();
            assert!(context.fill(start, 1, 1).is_err(), "it was freed");
        }
    });
}

#[test]
fn quarantined_addresses_are_not_reused() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (memory, stream) = (
            Exportable::guarded(&context, 8).unwrap(),
            context.default_stream(),
        );
        let mut addresses = Vec::new();
        for _ in 0..8 {
            let block = memory
                .allocate(bytes(MIB), &stream, Tag::default())
                .unwrap();
            assert!(!addresses.contains(&block.address()));
            addresses.push(block.address());
            memory.deallocate(block, &stream).unwrap();
        }
    });
}

#[test]
fn budget_under_the_mappings_counts_whole_granules() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (context, before) = (context(0), machine.used(0));
        let physical = Physical::new(context.device()).unwrap();
        let budget = Budget::new(physical, 4 << 20);
        let account = Arc::clone(budget.account());
        let (memory, stream) = (Exportable::over(&context, budget), context.default_stream());
        let block = memory.allocate(bytes(1), &stream, Tag("one")).unwrap();
        assert_eq!(account.snapshot().used, 2 << 20);
        let error = memory
            .allocate(bytes(2 * MIB + 1), &stream, Tag("much"))
            .unwrap_err();
        assert_eq!(error.reason(), "OverBudget");
        context.copy_to_device(block.address(), b"x").unwrap();
        memory.deallocate(block, &stream).unwrap();
        stream.synchronize().unwrap();
        memory.reap_pending().unwrap();
        assert_eq!(account.snapshot().used, 0);
        assert_eq!(machine.used(0), before);
    });
}
