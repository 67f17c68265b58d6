//! One runtime for each GPU.

use std::sync::{Arc, Barrier};

use bursar_runtime::driver::DriverError;
use bursar_runtime::{Budget, DeviceMemoryResource as _, DeviceRuntime, ResourceError, Stale, Tag};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, inside};

use crate::{bytes, fault};

const FIRST: &str = "GPU-00000000-0000-0000-0000-000000000001";

#[test]
fn everybody_gets_the_same_runtime_of_a_gpu() {
    inside(TWO_GPUS, |_| {
        let first = DeviceRuntime::of(FIRST.parse().unwrap()).unwrap();
        assert!(Arc::ptr_eq(&first, &DeviceRuntime::of_ordinal(0).unwrap()));
        assert!(Arc::ptr_eq(
            &first,
            &DeviceRuntime::of(first.uuid()).unwrap()
        ));
        let second = DeviceRuntime::of_ordinal(1).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!(second.ordinal(), 1);
    });
}

#[test]
fn eight_threads_that_are_first_at_once_get_one_runtime() {
    inside(ONE_GPU, |machine| {
        let together = Barrier::new(8);
        let runtimes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        together.wait();
                        let runtime = DeviceRuntime::of(FIRST.parse().unwrap()).unwrap();
                        let stream = runtime.stream().unwrap();
                        for _ in 0..64 {
                            let block = runtime
                                .resource()
                                .allocate(bytes(1000), &stream, Tag::default())
                                .unwrap();
                            runtime.resource().deallocate(block, &stream).unwrap();
                        }
                        runtime
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(
            runtimes
                .iter()
                .all(|runtime| Arc::ptr_eq(runtime, &runtimes[0]))
        );
        // One context, and one slab.
        assert_eq!(machine.used(0), (518 << 20) + (256 << 20));
    });
}

#[test]
fn there_is_no_runtime_of_what_is_not_there() {
    inside(ONE_GPU, |_| {
        let missing = DeviceRuntime::of_ordinal(1).unwrap_err();
        assert_eq!(
            missing,
            DriverError::NoSuchDevice {
                ordinal: 1,
                count: 1
            }
        );
        let uuid = "GPU-00000000-0000-0000-0000-000000000009".parse().unwrap();
        assert_eq!(
            DeviceRuntime::of(uuid).unwrap_err(),
            DriverError::NoSuchGpu(uuid)
        );
    });
}

#[test]
fn a_start_that_failed_is_tried_again() {
    inside(ONE_GPU, |machine| {
        machine.set_lost(0, true);
        let Err(DriverError::Cuda(error)) = DeviceRuntime::of_ordinal(0) else {
            panic!("it started");
        };
        assert!(error.retryable(), "{error}");
        machine.set_lost(0, false);
        DeviceRuntime::of_ordinal(0).unwrap();
    });
}

#[test]
fn a_composed_runtime_leaves_the_one_that_it_came_from() {
    inside(ONE_GPU, |_| {
        let runtime = DeviceRuntime::of_ordinal(0).unwrap();
        let small = runtime.with_resource(|resource| Budget::new(resource, 1000));
        let stream = small.stream().unwrap();
        assert!(
            small
                .resource()
                .allocate(bytes(1001), &stream, Tag::default())
                .is_err()
        );
        let block = runtime
            .resource()
            .allocate(bytes(1001), &stream, Tag::default())
            .unwrap();
        runtime.resource().deallocate(block, &stream).unwrap();
        assert_eq!(small.resource().budget_snapshot().unwrap().limit, 1000);
        assert!(runtime.resource().budget_snapshot().is_none());
        assert!(Arc::ptr_eq(
            &runtime,
            &DeviceRuntime::of_ordinal(0).unwrap()
        ));
    });
}

#[test]
fn what_comes_after_a_shutdown_is_another_runtime() {
    inside(ONE_GPU, |_| {
        let first = DeviceRuntime::of_ordinal(0).unwrap();
        let stream = first.stream().unwrap();
        let block = first
            .resource()
            .allocate(bytes(1000), &stream, Tag::default())
            .unwrap();
        first.shut_down();
        let second = DeviceRuntime::of_ordinal(0).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!(first.state().check(), Err(Stale::ShutDown));
        assert_eq!(second.state().check(), Ok(()));
        let refused = first.resource().allocate(bytes(1), &stream, Tag::default());
        assert_eq!(refused, Err(ResourceError::Ended(Stale::ShutDown)));
        first.resource().deallocate(block, &stream).unwrap();
    });
}

#[test]
fn a_poisoned_runtime_is_not_rebuilt_in_the_same_process() {
    inside(ONE_GPU, |_| {
        let runtime = DeviceRuntime::of_ordinal(0).unwrap();
        let stream = runtime.stream().unwrap();
        fault(&stream);
        stream.synchronize().unwrap_err();
        assert_eq!(runtime.state().check(), Err(Stale::Poisoned(700)));
        let again = DeviceRuntime::of(runtime.uuid()).unwrap();
        assert!(Arc::ptr_eq(&runtime, &again));
        let refused = again.resource().allocate(bytes(1), &stream, Tag::default());
        assert_eq!(refused, Err(ResourceError::Ended(Stale::Poisoned(700))));
    });
}
