//! Tests the checks of launches and the arguments that kernels get.

use bursar_runtime::driver::{Access, Grid, Parameter};
use bursar_runtime::memory::launch::LaunchError;
use bursar_runtime::memory::submission::SubmitError;
use bursar_runtime::{Launch, StaleReason};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::{copy_kernel, fault, fill_kernel, runtime, slice};

const ONE: Grid = Grid::linear(1, 1);

#[test]
fn kernel_gets_numbers_and_memory_in_order() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let (mut from, mut to) = (
            slice(&runtime, &[0; 4], &stream),
            slice(&runtime, &[0; 4], &stream),
        );
        Launch::new(&fill_kernel(runtime.context()), &stream, ONE)
            .arg(from.arg_mut())
            .arg(0xabu8)
            .arg(8u64)
            .submit()
            .unwrap();
        Launch::new(&copy_kernel(runtime.context()), &stream, ONE)
            .arg(to.arg_mut())
            .arg(from.arg())
            .arg(16u64)
            .submit()
            .unwrap();
        let mut back = [0; 4];
        to.copy_to_host(&mut back).unwrap();
        assert_eq!(back, [0xabab_abab, 0xabab_abab, 0, 0]);
    });
}

#[test]
fn launch_is_refused_when_arguments_do_not_match() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let kernel = fill_kernel(runtime.context());
        let mut slice = slice(&runtime, &[0], &stream);
        let launch = || Launch::new(&kernel, &stream, ONE);
        let few = launch().arg(slice.arg_mut()).arg(1u8).submit();
        assert_eq!(
            few,
            Err(LaunchError::ArgumentCount {
                expected: 3,
                given: 2
            })
        );
        let wide = launch().arg(slice.arg_mut()).arg(1u32).arg(4u64).submit();
        let expected = Parameter::Value(1);
        assert_eq!(wide, Err(LaunchError::ArgumentType { index: 1, expected }));
        let number = launch().arg(slice.address()).arg(1u8).arg(4u64).submit();
        let expected = Parameter::Memory(Access::ReadWrite);
        assert_eq!(
            number,
            Err(LaunchError::ArgumentType { index: 0, expected })
        );
    });
}

#[test]
fn read_only_argument_is_refused_for_a_writing_kernel() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let slice = slice(&runtime, &[5], &stream);
        let refused = Launch::new(&fill_kernel(runtime.context()), &stream, ONE)
            .arg(slice.arg())
            .arg(1u8)
            .arg(4u64)
            .submit();
        assert!(matches!(
            refused,
            Err(LaunchError::ArgumentType { index: 0, .. })
        ));
        let mut back = [0];
        slice.copy_to_host(&mut back).unwrap();
        assert_eq!(back, [5]);
    });
}

#[test]
fn tracked_slice_is_refused_in_another_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (alloc_stream, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let mut slice = slice(&runtime, &[5], &alloc_stream);
        let kernel = fill_kernel(runtime.context());
        let refused = Launch::new(&kernel, &other, ONE)
            .arg(slice.arg_mut())
            .arg(1u8)
            .arg(4u64)
            .submit();
        let expected = SubmitError::WrongStream { index: 0 };
        assert_eq!(refused, Err(LaunchError::Submit(expected)));
        slice.move_to(&other).unwrap();
        Launch::new(&kernel, &other, ONE)
            .arg(slice.arg_mut())
            .arg(1u8)
            .arg(4u64)
            .submit()
            .unwrap();
    });
}

#[test]
fn launch_is_refused_on_another_devices_stream() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (local, peer) = (runtime(0), runtime(1));
        let kernel = fill_kernel(local.context());
        let refused = Launch::new(&kernel, &peer.stream().unwrap(), ONE).submit();
        assert_eq!(
            refused,
            Err(LaunchError::WrongContext {
                stream: 1,
                kernel: 0
            })
        );
    });
}

#[test]
fn stale_memory_is_refused_by_a_launch() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let kernel = fill_kernel(runtime.context());
        let mut slice = slice(&runtime, &[5], &stream);
        let mut submit = || {
            Launch::new(&kernel, &stream, ONE)
                .arg(slice.arg_mut())
                .arg(1u8)
                .arg(4u64)
                .submit()
        };
        runtime.state().drain();
        let refused = |reason: StaleReason| Err(LaunchError::Submit(reason.into()));
        assert_eq!(submit(), refused(StaleReason::Draining));
        fault(runtime.context());
        assert_eq!(submit(), refused(StaleReason::Poisoned(700)));
    });
}
