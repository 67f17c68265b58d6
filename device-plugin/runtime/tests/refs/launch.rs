//! What launches refuse, and what kernels are given.

use bursar_runtime::driver::{Access, Grid, Parameter};
use bursar_runtime::memory::launch::LaunchError;
use bursar_runtime::{Launch, Stale};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, inside};

use crate::{copy, fault, fill, runtime, slice};

const ONE: Grid = Grid::line(1, 1);

#[test]
fn kernels_get_numbers_and_memory_in_their_places() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let (mut from, mut to) = (
            slice(&runtime, &[0; 4], &stream),
            slice(&runtime, &[0; 4], &stream),
        );
        Launch::new(&fill(runtime.context()), &stream, ONE)
            .arg(from.arg_mut())
            .arg(0xabu8)
            .arg(8u64)
            .submit()
            .unwrap();
        Launch::new(&copy(runtime.context()), &stream, ONE)
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
fn too_few_and_other_arguments_are_refused() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let kernel = fill(runtime.context());
        let mut slice = slice(&runtime, &[0], &stream);
        let launch = || Launch::new(&kernel, &stream, ONE);
        let few = launch().arg(slice.arg_mut()).arg(1u8).submit();
        assert_eq!(few, Err(LaunchError::Count { takes: 3, given: 2 }));
        let wide = launch().arg(slice.arg_mut()).arg(1u32).arg(4u64).submit();
        let takes = Parameter::Value(1);
        assert_eq!(wide, Err(LaunchError::Argument { place: 1, takes }));
        let number = launch().arg(slice.address()).arg(1u8).arg(4u64).submit();
        let takes = Parameter::Memory(Access::ReadWrite);
        assert_eq!(number, Err(LaunchError::Argument { place: 0, takes }));
    });
}

#[test]
fn memory_that_is_lent_to_be_read_is_written_by_no_kernel() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let slice = slice(&runtime, &[5], &stream);
        let refused = Launch::new(&fill(runtime.context()), &stream, ONE)
            .arg(slice.arg())
            .arg(1u8)
            .arg(4u64)
            .submit();
        assert!(matches!(
            refused,
            Err(LaunchError::Argument { place: 0, .. })
        ));
        let mut back = [0];
        slice.copy_to_host(&mut back).unwrap();
        assert_eq!(back, [5]);
    });
}

#[test]
fn an_owners_memory_is_used_in_its_own_stream_only() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (home, other) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let mut slice = slice(&runtime, &[5], &home);
        let kernel = fill(runtime.context());
        let refused = Launch::new(&kernel, &other, ONE)
            .arg(slice.arg_mut())
            .arg(1u8)
            .arg(4u64)
            .submit();
        assert_eq!(refused, Err(LaunchError::OtherStream { place: 0 }));
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
fn another_devices_stream_is_refused() {
    inside(TWO_GPUS, |_| {
        let (here, there) = (runtime(0), runtime(1));
        let kernel = fill(here.context());
        let refused = Launch::new(&kernel, &there.stream().unwrap(), ONE).submit();
        assert_eq!(
            refused,
            Err(LaunchError::OtherContext {
                stream: 1,
                kernel: 0
            })
        );
    });
}

#[test]
fn stale_memory_reaches_no_kernel() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let kernel = fill(runtime.context());
        let mut slice = slice(&runtime, &[5], &stream);
        let mut submit = || {
            Launch::new(&kernel, &stream, ONE)
                .arg(slice.arg_mut())
                .arg(1u8)
                .arg(4u64)
                .submit()
        };
        runtime.state().drain();
        assert_eq!(submit(), Err(LaunchError::Stale(Stale::Draining)));
        fault(runtime.context());
        assert_eq!(submit(), Err(LaunchError::Stale(Stale::Poisoned(700))));
    });
}
