//! Tests memory with several owners.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Grid, Stream};
use bursar_runtime::memory::gpu_ref::WriteError;
use bursar_runtime::memory::launch::LaunchError;
use bursar_runtime::memory::submission::SubmitError;
use bursar_runtime::memory::write_token::WriteRefused;
use bursar_runtime::{
    DeviceMemoryResource as _, DeviceRuntime, GpuRef, Launch, ResourceError, StaleReason,
    StreamOrdered, WriteToken,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{copy_kernel, fault, fill_kernel, runtime, slice, spin, untracked};

const LASTS: Duration = Duration::from_secs(60);

fn reference(runtime: &DeviceRuntime, items: &[u32], stream: &Stream) -> GpuRef<u32> {
    GpuRef::from(slice(runtime, items, stream))
}

fn token(reference: &GpuRef<u32>) -> WriteToken {
    reference.begin_write(Instant::now(), LASTS).unwrap()
}

/// Overwrites the memory with a byte value.
fn write(reference: &GpuRef<u32>, token: &WriteToken, stream: &Stream) -> Result<(), LaunchError> {
    let kernel = fill_kernel(stream.context());
    Launch::new(&kernel, stream, Grid::linear(1, 1))
        .arg(reference.arg_mut(token).unwrap())
        .arg(7u8)
        .arg(4 * reference.len() as u64)
        .submit()
}

fn read(reference: &GpuRef<u32>, stream: &Stream) -> Result<(), SubmitError> {
    reference.read_in(stream, |address| assert_eq!(address, reference.as_raw()))
}

#[test]
fn access_returns_the_address_until_the_image_is_poisoned() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let reference = reference(&runtime, &[1], &runtime.stream().unwrap());
        assert_eq!(reference.access(), Ok(reference.as_raw()));
        fault(runtime.context());
        assert_eq!(reference.access(), Err(StaleReason::Poisoned(700)));
        assert_eq!(reference.clone().access(), Err(StaleReason::Poisoned(700)));
        let refused = reference.begin_write(Instant::now(), LASTS).map(|_| ());
        assert_eq!(refused, Err(WriteError::Stale(StaleReason::Poisoned(700))));
    });
}

#[test]
fn memory_is_stale_when_wrapped_after_a_poison() {
    run_in_subprocess(ONE_GPU, |_| {
        let first = runtime(0);
        let old = slice(&first, &[1], &first.stream().unwrap());
        first.shut_down();
        let second = runtime(0);
        let wrapped = GpuRef::from(old);
        assert_eq!(second.state().check(), Ok(()));
        assert_eq!(wrapped.access(), Err(StaleReason::ShutDown));
    });
}

#[test]
fn read_in_another_stream_waits_for_the_last_write() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let [alloc_stream, writing, reading] = [(); 3].map(|()| runtime.stream().unwrap());
        let reference = reference(&runtime, &[1], &alloc_stream);
        let token = token(&reference);
        spin(&writing);
        write(&reference, &token, &writing).unwrap();
        assert_eq!(reference.last_write(), writing);
        read(&reference, &reading).unwrap();
        assert_eq!(reading.is_idle(), Ok(false));
        reading.synchronize().unwrap();
        assert_eq!(writing.is_idle(), Ok(true));
    });
}

#[test]
fn write_in_another_stream_waits_for_reads() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (alloc_stream, reading, writing) = (
            runtime.stream().unwrap(),
            runtime.stream().unwrap(),
            runtime.stream().unwrap(),
        );
        let reference = reference(&runtime, &[1], &alloc_stream);
        reference.read_in(&reading, |_| spin(&reading)).unwrap();
        write(&reference, &token(&reference), &writing).unwrap();
        assert_eq!(writing.is_idle(), Ok(false));
        assert_eq!(reference.last_write(), writing);
    });
}

#[test]
fn reads_do_not_wait_for_each_other() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let reference = reference(&runtime, &[1], &alloc_stream);
        reference.read_in(&other, |_| spin(&other)).unwrap();
        read(&reference, &alloc_stream).unwrap();
        assert_eq!(alloc_stream.is_idle(), Ok(true));
    });
}

#[test]
fn free_waits_for_the_streams_that_used_the_memory() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let runtime = runtime.with_resource(|_| StreamOrdered::new(runtime.context()));
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let reference = reference(&runtime, &[1], &alloc_stream);
        reference.read_in(&other, |_| spin(&other)).unwrap();
        drop(reference);
        let outstanding = runtime.resource().bytes_outstanding();
        assert_eq!((outstanding.live, outstanding.retired), (0, 4));
        runtime.context().synchronize().unwrap();
        runtime.resource().reap_pending().unwrap();
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}

#[test]
fn free_waits_for_work_whose_submission_panicked() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let runtime = runtime.with_resource(|_| StreamOrdered::new(runtime.context()));
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let reference = reference(&runtime, &[1], &alloc_stream);
        let submit = |_| {
            spin(&other);
            panic!("no luck");
        };
        let read = AssertUnwindSafe(|| reference.read_in(&other, submit));
        let panicked = catch_unwind(read).unwrap_err();
        assert_eq!(panicked.downcast_ref(), Some(&"no luck"));
        drop(reference);
        let outstanding = runtime.resource().bytes_outstanding();
        assert_eq!((outstanding.live, outstanding.retired), (0, 4));
        runtime.context().synchronize().unwrap();
        runtime.resource().reap_pending().unwrap();
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}

#[test]
fn use_in_another_stream_is_refused_without_tracking() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = untracked();
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let reference = reference(&runtime, &[1], &alloc_stream);
        let misuse = ResourceError::StreamMisuse { resource: "direct" };
        let misuse = SubmitError::Memory(misuse.into());
        let refused = reference.read_in(&other, |_| unreachable!("it is refused"));
        assert_eq!(refused, Err(misuse.clone()));
        let token = token(&reference);
        let refused = write(&reference, &token, &other);
        assert_eq!(refused, Err(LaunchError::Submit(misuse)));
        write(&reference, &token, &alloc_stream).unwrap();
    });
}

#[test]
fn fenced_writer_gets_no_argument_and_no_commit() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let (reference, other) = (
            reference(&runtime, &[1], &stream),
            reference(&runtime, &[2], &stream),
        );
        let token = token(&reference);
        assert_eq!(
            other.arg_mut(&token).map(|_| ()),
            Err(WriteRefused::Foreign)
        );
        let clone = reference.clone();
        let held = clone.begin_write(Instant::now(), LASTS).map(|_| ());
        assert!(matches!(
            held,
            Err(WriteError::Refused(WriteRefused::Busy(_)))
        ));
        let argument = reference.arg_mut(&token).unwrap();
        clone.fence_writer();
        let fenced = WriteRefused::Fenced;
        let kernel = fill_kernel(runtime.context());
        let launch = Launch::new(&kernel, &stream, Grid::linear(1, 1));
        let late = launch.arg(argument).arg(7_u8).arg(4_u64).submit();
        assert_eq!(
            late,
            Err(LaunchError::Submit(fenced.into())),
            "a launch looks again"
        );
        assert_eq!(reference.arg_mut(&token).map(|_| ()), Err(fenced));
        let write = reference.write_in(&token, &stream, |_| unreachable!("it is fenced"));
        assert_eq!(write, Err(fenced.into()));
        assert_eq!(reference.commit(token, Instant::now()), Err(fenced.into()));
        assert_eq!(reference.commits(), 0);
    });
}

#[test]
fn expired_writer_writes_but_does_not_commit() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let reference = reference(&runtime, &[1], &stream);
        let start = Instant::now();
        let token = reference.begin_write(start, Duration::ZERO).unwrap();
        write(&reference, &token, &stream).unwrap();
        let late = reference.commit(token, start);
        assert!(matches!(
            late,
            Err(WriteError::Refused(WriteRefused::Expired(_)))
        ));
        let token = reference.begin_write(start, LASTS).unwrap();
        assert_eq!(reference.commit(token, start), Ok(1));
    });
}

#[test]
fn launches_with_memory_in_opposite_order_do_not_deadlock() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let alloc_stream = runtime.stream().unwrap();
        let (one, other) = (
            reference(&runtime, &[1; 64], &alloc_stream),
            reference(&runtime, &[1; 64], &alloc_stream),
        );
        let (to_one, to_other) = (token(&one), token(&other));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (runtime, one, other) = (&runtime, one.clone(), other.clone());
                let (to_one, to_other) = (&to_one, &to_other);
                scope.spawn(move || {
                    let stream = runtime.stream().unwrap();
                    let kernel = copy_kernel(runtime.context());
                    for _ in 0..64 {
                        let (to, from) = match thread % 2 {
                            0 => (one.arg_mut(to_one).unwrap(), other.arg()),
                            _ => (other.arg_mut(to_other).unwrap(), one.arg()),
                        };
                        Launch::new(&kernel, &stream, Grid::linear(1, 1))
                            .arg(to)
                            .arg(from)
                            .arg(256u64)
                            .submit()
                            .unwrap();
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        drop((to_one, to_other, one, other));
        runtime.context().synchronize().unwrap();
        runtime.resource().reap_pending().unwrap();
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}

#[test]
fn memory_passed_twice_to_a_launch_is_locked_once() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let reference = reference(&runtime, &[1, 2], &alloc_stream);
        let token = token(&reference);
        Launch::new(&copy_kernel(runtime.context()), &other, Grid::linear(1, 1))
            .arg(reference.arg_mut(&token).unwrap())
            .arg(reference.arg())
            .arg(8u64)
            .submit()
            .unwrap();
        assert_eq!(reference.last_write(), other);
    });
}
