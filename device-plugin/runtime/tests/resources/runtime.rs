//! Tests the runtime of a GPU.

use std::sync::{Arc, Barrier};

use bursar_runtime::driver::DriverError;
use bursar_runtime::{
    Budget, DeviceMemoryResource as _, DeviceRuntime, ResourceError, StaleReason, Tag,
};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::{bytes, fault};

const FIRST_GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";

#[test]
fn runtime_of_a_gpu_is_shared() {
    run_in_subprocess(TWO_GPUS, |_| {
        let first = DeviceRuntime::for_gpu(FIRST_GPU.parse().unwrap()).unwrap();
        assert!(Arc::ptr_eq(&first, &DeviceRuntime::for_ordinal(0).unwrap()));
        assert!(Arc::ptr_eq(
            &first,
            &DeviceRuntime::for_gpu(first.uuid()).unwrap()
        ));
        let second = DeviceRuntime::for_ordinal(1).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!(second.ordinal(), 1);
    });
}

#[test]
fn eight_concurrent_first_users_get_one_runtime() {
    run_in_subprocess(ONE_GPU, |machine| {
        let together = Barrier::new(8);
        let runtimes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        together.wait();
                        let runtime = DeviceRuntime::for_gpu(FIRST_GPU.parse().unwrap()).unwrap();
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
        // One context and one slab.
        assert_eq!(machine.used(0), (518 << 20) + (256 << 20));
    });
}

#[test]
fn runtime_of_a_missing_gpu_is_an_error() {
    run_in_subprocess(ONE_GPU, |_| {
        let missing = DeviceRuntime::for_ordinal(1).unwrap_err();
        assert_eq!(
            missing,
            DriverError::NoSuchDevice {
                ordinal: 1,
                count: 1
            }
        );
        let uuid = "GPU-00000000-0000-0000-0000-000000000009".parse().unwrap();
        assert_eq!(
            DeviceRuntime::for_gpu(uuid).unwrap_err(),
            DriverError::NoSuchGpu(uuid)
        );
    });
}

#[test]
fn failed_start_is_retried() {
    run_in_subprocess(ONE_GPU, |machine| {
        machine.set_lost(0, true);
        let Err(DriverError::Cuda(error)) = DeviceRuntime::for_ordinal(0) else {
            panic!("it started");
        };
        assert!(error.retryable(), "{error}");
        machine.set_lost(0, false);
        DeviceRuntime::for_ordinal(0).unwrap();
    });
}

#[test]
fn with_resource_leaves_the_original_runtime() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
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
        assert_eq!(runtime.budget().limit, 16 << 30);
        assert!(Arc::ptr_eq(
            &runtime,
            &DeviceRuntime::for_ordinal(0).unwrap()
        ));
    });
}

#[test]
fn runtime_after_a_shutdown_is_a_new_one() {
    run_in_subprocess(ONE_GPU, |_| {
        let first = DeviceRuntime::for_ordinal(0).unwrap();
        let stream = first.stream().unwrap();
        let block = first
            .resource()
            .allocate(bytes(1000), &stream, Tag::default())
            .unwrap();
        first.shut_down();
        let second = DeviceRuntime::for_ordinal(0).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!(first.state().check(), Err(StaleReason::ShutDown));
        assert_eq!(second.state().check(), Ok(()));
        let refused = first.resource().allocate(bytes(1), &stream, Tag::default());
        assert_eq!(refused, Err(ResourceError::Ended(StaleReason::ShutDown)));
        first.resource().deallocate(block, &stream).unwrap();
    });
}

#[test]
fn poisoned_runtime_is_not_rebuilt_in_the_process() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let stream = runtime.stream().unwrap();
        fault(&stream);
        stream.synchronize().unwrap_err();
        assert_eq!(runtime.state().check(), Err(StaleReason::Poisoned(700)));
        let again = DeviceRuntime::for_gpu(runtime.uuid()).unwrap();
        assert!(Arc::ptr_eq(&runtime, &again));
        let refused = again.resource().allocate(bytes(1), &stream, Tag::default());
        assert_eq!(
            refused,
            Err(ResourceError::Ended(StaleReason::Poisoned(700)))
        );
    });
}
