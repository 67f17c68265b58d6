//! Tests managed memory.

use std::sync::Arc;
use std::time::Instant;

use bursar_runtime::driver::{Advice, Attach, Grid, Location, Residency, Stream};
use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::memory::launch::LaunchError;
use bursar_runtime::memory::managed_ref::HostOnly;
use bursar_runtime::memory::submission::SubmitError;
use bursar_runtime::{
    Budget, CudaError, DeviceMemoryResource as _, DeviceRuntime, Launch, Managed, ManagedRef,
    ResourceError, StaleReason, Tag,
};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::{LONGEST_DELAY, SPIN_TIME, copy_kernel, fault, fill_kernel, runtime, spin, spin_for};

/// Creates a runtime of managed memory with a quota of 1 MiB.
fn managed_runtime(ordinal: u32) -> DeviceRuntime {
    let runtime = runtime(ordinal);
    let source = Managed::with_allocator(runtime.context(), Attach::Global);
    runtime.with_resource(|_| Budget::new(source, 1 << 20))
}

fn memory(runtime: &DeviceRuntime, len: usize, attach: Attach) -> ManagedRef<u32> {
    let stream = runtime.stream().unwrap();
    ManagedRef::allocate(runtime, len, attach, &stream, Tag::default()).unwrap()
}

#[test]
fn host_and_kernels_see_the_same_bytes() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let (mut from, mut to) = (
            memory(&runtime, 4, Attach::Global),
            memory(&runtime, 4, Attach::Global),
        );
        from.write().unwrap().copy_from_slice(&[1, 2, 3, 4]);
        let stream = runtime.stream().unwrap();
        Launch::new(&copy_kernel(runtime.context()), &stream, Grid::linear(1, 1))
            .arg(to.arg_mut().unwrap())
            .arg(from.arg().unwrap())
            .arg(16u64)
            .submit()
            .unwrap();
        assert_eq!(to.read().unwrap(), [1, 2, 3, 4]);
    });
}

#[test]
fn host_access_waits_for_conflicting_kernels() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let (mut from, mut to) = (
            memory(&runtime, 4, Attach::Global),
            memory(&runtime, 4, Attach::Global),
        );
        let stream = runtime.stream().unwrap();
        let kernel = copy_kernel(runtime.context());
        let start = Instant::now();
        spin_for(&stream, LONGEST_DELAY);
        Launch::new(&kernel, &stream, Grid::linear(1, 1))
            .arg(to.arg_mut().unwrap())
            .arg(from.arg().unwrap())
            .arg(16u64)
            .submit()
            .unwrap();
        from.read().unwrap();
        assert!(start.elapsed() < LONGEST_DELAY, "two may read at once");
        from.write().unwrap();
        assert!(start.elapsed() >= LONGEST_DELAY, "the kernel still reads");
        let start = Instant::now();
        spin(&stream);
        Launch::new(&fill_kernel(runtime.context()), &stream, Grid::linear(1, 1))
            .arg(to.arg_mut().unwrap())
            .arg(1u8)
            .arg(16u64)
            .submit()
            .unwrap();
        to.read().unwrap();
        assert!(start.elapsed() >= SPIN_TIME, "the kernel still writes");
    });
}

#[test]
fn host_wait_does_not_block_submissions() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let (mut memory, mut other) = (
            memory(&runtime, 4, Attach::Global),
            memory(&runtime, 4, Attach::Global),
        );
        let [writing, reading] = [(); 2].map(|()| runtime.stream().unwrap());
        let start = Instant::now();
        spin_for(&writing, LONGEST_DELAY);
        Launch::new(
            &fill_kernel(runtime.context()),
            &writing,
            Grid::linear(1, 1),
        )
        .arg(memory.arg_mut().unwrap())
        .arg(1u8)
        .arg(16u64)
        .submit()
        .unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| memory.read().map(<[u32]>::len));
            std::thread::sleep(SPIN_TIME / 4);
            Launch::new(
                &copy_kernel(runtime.context()),
                &reading,
                Grid::linear(1, 1),
            )
            .arg(other.arg_mut().unwrap())
            .arg(memory.arg().unwrap())
            .arg(16u64)
            .submit()
            .unwrap();
            assert!(
                start.elapsed() < LONGEST_DELAY,
                "the launch waited for the reader"
            );
            assert_eq!(waiting.join().unwrap(), Ok(4));
        });
        assert!(start.elapsed() >= LONGEST_DELAY);
    });
}

#[test]
fn managed_memory_is_freed_once_after_its_work() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let mut memory = memory(&runtime, 4, Attach::Global);
        let stream = runtime.stream().unwrap();
        let start = Instant::now();
        spin(&stream);
        Launch::new(&fill_kernel(runtime.context()), &stream, Grid::linear(1, 1))
            .arg(memory.arg_mut().unwrap())
            .arg(1u8)
            .arg(16u64)
            .submit()
            .unwrap();
        memory.free().unwrap();
        assert!(start.elapsed() >= SPIN_TIME, "the kernel still wrote");
        drop(self::memory(&runtime, 4, Attach::Global));
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}

#[test]
fn managed_quota_is_enforced() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let all = memory(&runtime, 1 << 18, Attach::Global);
        let stream = runtime.stream().unwrap();
        let more = ManagedRef::<u8>::allocate(&runtime, 1, Attach::Global, &stream, Tag::default());
        assert!(matches!(
            more,
            Err(MemoryError::Resource(ResourceError::OverBudget { .. }))
        ));
        drop(all);
        memory(&runtime, 1 << 18, Attach::Global).free().unwrap();
    });
}

#[test]
fn unmanaged_memory_is_refused_and_freed() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let refused =
            ManagedRef::<u32>::allocate(&runtime, 4, Attach::Global, &stream, Tag::default());
        assert!(matches!(refused, Err(MemoryError::Cuda(error)) if error.code == 1));
        assert_eq!(runtime.resource().bytes_outstanding().live, 0);
    });
}

#[test]
fn memory_attached_elsewhere_is_refused_by_a_launch() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let (own, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let kernel = fill_kernel(runtime.context());
        let mut memory = memory(&runtime, 4, Attach::Host);
        assert_eq!(memory.arg_mut().map(|_| ()), Err(HostOnly));
        assert_eq!(memory.read().unwrap(), [0; 4]);
        memory.attach(Attach::Single, &own).unwrap();
        let mut submit = |stream| {
            Launch::new(&kernel, stream, Grid::linear(1, 1))
                .arg(memory.arg_mut().unwrap())
                .arg(1u8)
                .arg(16u64)
                .submit()
        };
        let refused = SubmitError::WrongStream { index: 0 };
        assert_eq!(submit(&other), Err(LaunchError::Submit(refused)));
        submit(&own).unwrap();
        memory.attach(Attach::Global, &other).unwrap();
        Launch::new(&kernel, &other, Grid::linear(1, 1))
            .arg(memory.arg_mut().unwrap())
            .arg(2u8)
            .arg(4u64)
            .submit()
            .unwrap();
        assert_eq!(
            memory.read().unwrap(),
            [0x0202_0202, 0x0101_0101, 0x0101_0101, 0x0101_0101]
        );
    });
}

#[test]
fn managed_memory_is_inert_after_shutdown_and_freed_once() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let mut memory = memory(&runtime, 4, Attach::Global);
        let resource = Arc::clone(runtime.resource());
        let stream = runtime.stream().unwrap();
        runtime.shut_down();
        drop(runtime);
        let stale = StaleReason::ShutDown;
        assert_eq!(memory.read().map(|_| ()), Err(stale.into()));
        assert_eq!(memory.write().map(|_| ()), Err(stale.into()));
        assert_eq!(memory.attach(Attach::Host, &stream), Err(stale.into()));
        let prefetch = memory.prefetch(0..4, Location::Host, &stream);
        assert_eq!(prefetch, Err(stale.into()));
        assert_eq!(resource.bytes_outstanding().live, 16);
        drop(memory);
        assert_eq!(resource.bytes_outstanding().total(), 0);
    });
}

#[test]
fn poisoned_managed_memory_is_hidden_and_stays_charged() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let memory = memory(&runtime, 4, Attach::Global);
        fault(runtime.context());
        assert_eq!(
            memory.read().map(|_| ()),
            Err(StaleReason::Poisoned(700).into())
        );
        memory.free().unwrap_err();
        assert_eq!(runtime.resource().bytes_outstanding().retired, 16);
    });
}

#[test]
fn prefetch_and_advice_reach_the_named_device() {
    run_in_subprocess(TWO_GPUS, |_| {
        let runtime = managed_runtime(0);
        let memory = memory(&runtime, 4096, Attach::Global);
        let stream = runtime.stream().unwrap();
        prefetch_and_advise(&memory, &stream);
        let node = memory.prefetch(0..2048, Location::HostNuma(0), &stream);
        assert_eq!(node, Ok(()));
    });
}

#[test]
fn prefetch_and_advice_work_before_cuda_12_2() {
    run_in_subprocess(&format!("cuda-version = \"12.1\"\n{TWO_GPUS}"), |_| {
        let runtime = managed_runtime(0);
        let memory = memory(&runtime, 4096, Attach::Global);
        let stream = runtime.stream().unwrap();
        prefetch_and_advise(&memory, &stream);
        let not_known = |call| Err(CudaError { call, code: 801 }.into());
        let node = Location::HostNuma(0);
        let prefetch = memory.prefetch(0..2048, node, &stream);
        assert_eq!(prefetch, not_known("cuMemPrefetchAsync"));
        let advice = memory.advise(0..2048, Advice::SetAccessedBy, node);
        assert_eq!(advice, not_known("cuMemAdvise"));
    });
}

fn prefetch_and_advise(memory: &ManagedRef<u32>, stream: &Stream) {
    let device = Location::Device(1);
    let advise = |advice| memory.advise(0..2048, advice, device).unwrap();
    let residency = || memory.residency(0..2048).unwrap();
    assert_eq!(residency(), Residency::default());
    memory.prefetch(0..2048, device, stream).unwrap();
    advise(Advice::SetPreferredLocation);
    advise(Advice::SetAccessedBy);
    advise(Advice::SetReadMostly);
    let all = Residency {
        read_mostly: true,
        preferred: Some(device),
        accessed_by: vec![device],
        prefetched: Some(device),
    };
    assert_eq!(residency(), all);
    assert_eq!(memory.residency(2048..4096), Ok(Residency::default()));
    advise(Advice::UnsetPreferredLocation);
    advise(Advice::UnsetAccessedBy);
    advise(Advice::UnsetReadMostly);
    memory.prefetch(0..2048, Location::Host, stream).unwrap();
    let prefetched = Some(Location::Host);
    let expected = Residency {
        prefetched,
        ..Residency::default()
    };
    assert_eq!(residency(), expected);
}

#[test]
fn prefetch_is_refused_for_bad_ranges_and_devices() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = managed_runtime(0);
        let memory = memory(&runtime, 4, Attach::Global);
        let stream = runtime.stream().unwrap();
        for (start, end) in [(0, 5), (4, 4), (3, 2), (5, 6), (0, usize::MAX)] {
            let refused = MemoryError::Range { start, end, len: 4 };
            let prefetch = memory.prefetch(start..end, Location::Host, &stream);
            assert_eq!(prefetch, Err(refused.clone()));
            let advice = memory.advise(start..end, Advice::SetReadMostly, Location::Host);
            assert_eq!(advice, Err(refused));
        }
        let missing = memory.prefetch(0..4, Location::Device(1), &stream);
        assert!(matches!(missing, Err(MemoryError::Cuda(error)) if error.code == 101));
    });
}
