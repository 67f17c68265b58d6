//! Tests managed memory with several owners, and the statistics of its allocator.

use std::time::Instant;

use bursar_runtime::driver::{Attach, Grid};
use bursar_runtime::memory::gpu_ref::WriteError;
use bursar_runtime::memory::write_token::WriteRefused;
use bursar_runtime::{DeviceRuntime, Launch, SharedManagedRef, StaleReason, Tag};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::examples::managed_memory;
use crate::{LASTS, SPIN_TIME, fill_kernel, spin};

#[test]
fn managed_memory_is_shared_and_counted() {
    run_in_subprocess(ONE_GPU, |_| managed_memory::main().unwrap());
}

#[test]
fn reader_waits_for_a_kernel_that_a_writer_launched() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (memory, stream) = (shared(&runtime, 4), runtime.stream().unwrap());
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        let mut writer = memory.lock_mut(&token).unwrap();
        spin(&stream);
        Launch::new(&fill_kernel(runtime.context()), &stream, Grid::linear(1, 1))
            .arg(writer.arg_mut().unwrap())
            .arg(2_u8)
            .arg(4_u64)
            .submit()
            .unwrap();
        drop(writer);
        memory.commit(token, Instant::now()).unwrap();
        assert_eq!(stream.is_idle(), Ok(false));
        assert_eq!(
            memory.lock().unwrap().read().unwrap(),
            [0x0202_0202, 0, 0, 0]
        );
        assert_eq!(stream.is_idle(), Ok(true));
    });
}

fn shared(runtime: &DeviceRuntime, len: usize) -> SharedManagedRef<u32> {
    let stream = runtime.stream().unwrap();
    let managed = runtime.managed();
    let memory = managed.allocate(len, Attach::Global, &stream, Tag("test"));
    SharedManagedRef::from(memory.unwrap())
}

#[test]
fn second_writer_gets_neither_token_nor_lock() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (memory, other) = (shared(&runtime, 4), shared(&runtime, 4));
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        let busy = memory
            .clone()
            .begin_write(Instant::now(), LASTS)
            .unwrap_err();
        assert!(matches!(busy, WriteError::Refused(WriteRefused::Busy(_))));
        let foreign = other.lock_mut(&token).map(|_| ()).unwrap_err();
        assert_eq!(foreign, WriteError::Refused(WriteRefused::Foreign));
        memory.fence_writer();
        let fenced = WriteError::Refused(WriteRefused::Fenced);
        assert_eq!(memory.lock_mut(&token).map(|_| ()).unwrap_err(), fenced);
        assert_eq!(memory.commit(token, Instant::now()), Err(fenced));
        assert_eq!(memory.commits(), 0);
    });
}

#[test]
fn writer_waits_for_the_readers_locks() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let memory = shared(&runtime, 4);
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        let (first, second) = (memory.lock().unwrap(), memory.lock().unwrap());
        assert_eq!(first.read().unwrap(), second.read().unwrap());
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| memory.lock_mut(&token).unwrap().write().unwrap().fill(3));
            std::thread::sleep(SPIN_TIME);
            assert_eq!(first.read().unwrap(), [0; 4]);
            drop((first, second));
        });
        assert!(start.elapsed() >= SPIN_TIME);
        assert_eq!(memory.lock().unwrap().read().unwrap(), [3; 4]);
    });
}

#[test]
fn memory_is_freed_with_the_last_clone_after_its_work() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let memory = shared(&runtime, 4);
        let clone = memory.clone();
        let refused = memory.try_into_owner().unwrap_err();
        assert_eq!(runtime.managed().statistics().blocks.current, 1);
        drop(clone);
        let stream = runtime.stream().unwrap();
        let mut owner = refused.try_into_owner().unwrap();
        spin(&stream);
        let start = Instant::now();
        Launch::new(&fill_kernel(runtime.context()), &stream, Grid::linear(1, 1))
            .arg(owner.arg_mut().unwrap())
            .arg(1_u8)
            .arg(16_u64)
            .submit()
            .unwrap();
        drop(SharedManagedRef::from(owner));
        assert!(start.elapsed() >= SPIN_TIME / 2, "the kernel still wrote");
        assert_eq!(runtime.managed().statistics().blocks.current, 0);
    });
}

#[test]
fn shared_managed_memory_is_inert_after_a_shutdown() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let memory = shared(&runtime, 4);
        assert_eq!(memory.generation(), runtime.generation());
        let token = memory.begin_write(Instant::now(), LASTS).unwrap();
        runtime.shut_down();
        let stale = StaleReason::ShutDown;
        assert_eq!(memory.lock().map(|_| ()).unwrap_err(), stale);
        let refused = memory.lock_mut(&token).map(|_| ()).unwrap_err();
        assert_eq!(refused, WriteError::Stale(stale));
        assert_eq!(memory.commit(token, Instant::now()), Err(stale.into()));
    });
}
