//! Supervision over the simulated driver: what poisons the image is seen wherever it comes up.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_runtime::checksum::ChecksumError;
use bursar_runtime::driver::{Context, Driver};
use bursar_runtime::{Checksum, Stale, Supervisor};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, inside};

fn context(ordinal: u32) -> Context {
    let device = Driver::get().unwrap().device(ordinal).unwrap();
    device.primary_context().unwrap()
}

#[test]
fn a_fault_makes_every_device_of_the_image_stale_and_a_new_context_too() {
    inside(TWO_GPUS, |_| {
        let (faulty, other) = (context(0), context(1));
        assert_eq!(faulty.state().check(), Ok(()));
        // A kernel that reads where nothing is.
        let mut checksum = Checksum::new(&faulty).unwrap();
        let answer = checksum.of(1 << 50, 16, &faulty.default_stream());
        assert!(matches!(answer, Err(ChecksumError::Cuda(error)) if error.code == 700));
        let poisoned = Err(Stale::Poisoned(700));
        assert_eq!(faulty.state().check(), poisoned);
        assert_eq!(other.state().check(), poisoned);
        assert_eq!(Supervisor::of_this_image().watch().check(), poisoned);
    });
}

#[test]
fn retaining_the_context_again_heals_nothing() {
    inside(ONE_GPU, |_| {
        let context = context(0);
        let mut checksum = Checksum::new(&context).unwrap();
        checksum
            .of(1 << 50, 16, &context.default_stream())
            .unwrap_err();
        drop((checksum, context));
        let again = Driver::get().unwrap().device(0).unwrap().primary_context();
        let state = again.map(|context| context.state().check());
        assert_ne!(state, Ok(Ok(())));
        assert_eq!(Supervisor::of_this_image().poison(), Some(700));
    });
}
