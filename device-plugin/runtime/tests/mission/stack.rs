//! Tests what a runtime owns: its streams, its budget that follows a quota, and its log.

use std::alloc::Layout;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bursar_runtime::adaptor::default_stack::{DefaultStack, QuotaFn};
use bursar_runtime::{
    DeviceMemoryResource, DeviceRuntime, ErrorClass, ResourceError, StaleReason, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::examples::budgets;

const MIB: u64 = 1 << 20;

#[test]
fn runtime_owns_its_streams_budget_and_log() {
    run_in_subprocess(ONE_GPU, |_| {
        budgets::main().unwrap();
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        runtime.set_limit(None);
        assert_eq!(runtime.budget().limit, 16 << 30);
        let keys: BTreeSet<_> = (0..32)
            .map(|_| runtime.streams().next().unwrap().key())
            .collect();
        assert_eq!(keys.len(), 8);
        assert_eq!(runtime.statistics().blocks, 0);
    });
}

fn stack(runtime: &DeviceRuntime, quota: u64) -> (Arc<DefaultStack>, Arc<AtomicU64>) {
    let quota = Arc::new(AtomicU64::new(quota));
    let shared = Arc::clone(&quota);
    let quota_fn: QuotaFn =
        Arc::new(move || Some(shared.load(Ordering::Relaxed)).filter(|&q| q > 0));
    let stack =
        DefaultStack::new(runtime.context(), Arc::clone(runtime.state()), quota_fn).unwrap();
    (Arc::new(stack), quota)
}

fn take(
    memory: &DefaultStack,
    bytes: u64,
    runtime: &DeviceRuntime,
) -> Result<bursar_runtime::Block, ResourceError> {
    let layout = Layout::from_size_align(usize::try_from(bytes).unwrap(), 1).unwrap();
    memory.allocate(layout, &runtime.streams().next().unwrap(), Tag("test"))
}

#[test]
fn raised_quota_counts_at_the_next_allocation() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (memory, quota) = stack(&runtime, 4 * MIB);
        let _block = take(&memory, 4 * MIB, &runtime).unwrap();
        let full = take(&memory, 1, &runtime).unwrap_err();
        assert_eq!(
            (full.reason(), full.class()),
            ("OverBudget", ErrorClass::OutOfMemory)
        );
        quota.store(8 * MIB, Ordering::Relaxed);
        let _more = take(&memory, 4 * MIB, &runtime).unwrap();
        assert_eq!(memory.budget().limit, 8 * MIB);
        // The program's own limit is below the quota.
        memory.set_limit(Some(6 * MIB));
        assert_eq!(memory.budget().limit, 6 * MIB);
        // A quota that cannot be read leaves the last one in force.
        quota.store(0, Ordering::Relaxed);
        memory.set_limit(None);
        assert_eq!(memory.budget().limit, 6 * MIB);
    });
}

#[test]
fn raised_quota_counts_for_two_threads_at_the_limit() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let reads = AtomicU64::new(0);
        let quota_fn: QuotaFn = Arc::new(move || match reads.fetch_add(1, Ordering::Relaxed) {
            0 => Some(MIB),
            1 => {
                // Meanwhile the other thread fails under the old limit.
                std::thread::sleep(Duration::from_millis(300));
                Some(3 * MIB)
            }
            _ => Some(3 * MIB),
        });
        let state = Arc::clone(runtime.state());
        let memory = DefaultStack::new(runtime.context(), state, quota_fn).unwrap();
        let _block = take(&memory, MIB, &runtime).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| take(&memory, MIB, &runtime).unwrap());
            }
        });
    });
}

#[test]
fn lowered_quota_is_followed_without_a_call() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (memory, quota) = stack(&runtime, 8 * MIB);
        memory.follow_quota();
        let block = take(&memory, 4 * MIB, &runtime).unwrap();
        quota.store(2 * MIB, Ordering::Relaxed);
        let start = Instant::now();
        while memory.budget().limit != 2 * MIB {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "the quota is not followed"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        // Live blocks stay, and new ones wait until enough is freed.
        take(&memory, 1, &runtime).unwrap_err();
        let stream = runtime.streams().next().unwrap();
        memory.deallocate(block, &stream).unwrap();
        let small = take(&memory, 2 * MIB, &runtime).unwrap();
        memory.deallocate(small, &stream).unwrap();
    });
}

#[test]
fn stale_stack_refuses_allocations_and_logs_them() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let (memory, _quota) = stack(&runtime, 8 * MIB);
        let block = take(&memory, 1, &runtime).unwrap();
        let stream = runtime.streams().next().unwrap();
        runtime.shut_down();
        let refused = take_in(&memory, &stream).unwrap_err();
        assert_eq!(refused, ResourceError::Ended(StaleReason::ShutDown));
        memory.deallocate(block, &stream).unwrap();
        assert_eq!(memory.bytes_outstanding().total(), 0);
    });
}

fn take_in(
    memory: &DefaultStack,
    stream: &bursar_runtime::driver::Stream,
) -> Result<(), ResourceError> {
    memory
        .allocate(Layout::new::<u8>(), stream, Tag("test"))
        .map(drop)
}
