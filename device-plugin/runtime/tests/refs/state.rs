//! Tests that every fault poisons the process image, and only that image.

use bursar_runtime::checksum::ChecksumError;
use bursar_runtime::driver::Driver;
use bursar_runtime::{DeviceChecksum, ErrorMonitor, StaleReason};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, peer_command, peer_role, run_in_subprocess};

use crate::{fault, runtime};

#[test]
fn fault_makes_all_states_stale_and_later_ones() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (faulty, other) = (runtime(0), runtime(1));
        assert_eq!(faulty.state().check(), Ok(()));
        let mut checksum = DeviceChecksum::new(faulty.context()).unwrap();
        let answer = checksum.of(1 << 50, 16, &faulty.context().default_stream());
        assert!(matches!(answer, Err(ChecksumError::Cuda(error)) if error.code == 700));
        let poisoned = Err(StaleReason::Poisoned(700));
        assert_eq!(faulty.state().check(), poisoned);
        assert_eq!(other.state().check(), poisoned);
        assert_eq!(ErrorMonitor::global().new_state().check(), poisoned);
    });
}

#[test]
fn retaining_a_poisoned_context_does_not_recover_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = runtime(0).context().clone();
        fault(&context);
        let again = Driver::get().unwrap().device(0).unwrap().primary_context();
        if let Ok(context) = again {
            context.synchronize().unwrap_err();
        }
        assert_eq!(runtime(0).state().check(), Err(StaleReason::Poisoned(700)));
    });
}

#[test]
fn unlisted_code_poisons_when_a_probe_repeats_it() {
    run_in_subprocess(ONE_GPU, |machine| {
        let runtime = runtime(0);
        runtime.context().synchronize().unwrap();
        assert!(machine.inject_error(std::process::id(), 4321));
        runtime.context().synchronize().unwrap_err();
        assert_eq!(runtime.state().check(), Err(StaleReason::Poisoned(4321)));
    });
}

/// Runs the test again on the same simulated machine, in a child process.
fn run_in_child(role: &str) {
    assert!(peer_command(role).status().unwrap().success());
}

#[test]
fn fault_affects_neither_neighbours_nor_the_next_image() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let good = |runtime: &bursar_runtime::DeviceRuntime| {
            runtime.context().synchronize().unwrap();
            runtime.state().check()
        };
        match peer_role().as_deref() {
            Some("neighbour") => {
                fault(runtime.context());
                assert_eq!(runtime.state().check(), Err(StaleReason::Poisoned(700)));
            }
            Some(_) => assert_eq!(good(&runtime), Ok(())),
            None => {
                run_in_child("neighbour");
                assert_eq!(good(&runtime), Ok(()));
                fault(runtime.context());
                run_in_child("next image");
                assert_eq!(runtime.state().check(), Err(StaleReason::Poisoned(700)));
            }
        }
    });
}
