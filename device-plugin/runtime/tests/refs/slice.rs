//! Tests memory with one owner.

use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::{
    DeviceMemoryResource as _, Direct, FreeError, ResourceError, StaleReason, Tag, TrackedSlice,
};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};

use crate::{fault, runtime, slice, spin, untracked};

#[test]
fn slice_returns_what_was_copied_in() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let slice = slice(&runtime, &[1, 2, 3], &runtime.stream().unwrap());
        let mut back = [0; 3];
        slice.copy_to_host(&mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
    });
}

#[test]
fn slice_refuses_empty_huge_and_mismatched_lengths() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let allocate = |len| TrackedSlice::<u32>::allocate(&runtime, len, &stream, Tag::default());
        let zero = ResourceError::ZeroBytes { ordinal: 0 };
        assert_eq!(allocate(0).unwrap_err(), zero.into());
        let (len, size) = (usize::MAX / 2, 4);
        assert_eq!(
            allocate(len).unwrap_err(),
            MemoryError::TooLarge { len, size }
        );
        let mut slice = slice(&runtime, &[1, 2, 3], &stream);
        let wrong = MemoryError::Length { len: 3, given: 2 };
        assert_eq!(slice.copy_from_host(&[4, 5]), Err(wrong.clone()));
        assert_eq!(slice.copy_to_host(&mut [0; 2]), Err(wrong));
    });
}

#[test]
fn slice_is_freed_once_when_dropped_or_freed() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = untracked();
        let stream = runtime.stream().unwrap();
        let live = || runtime.resource().bytes_outstanding().live;
        let (one, other) = (
            slice(&runtime, &[1], &stream),
            slice(&runtime, &[2], &stream),
        );
        assert_eq!(live(), 8);
        drop(one);
        assert_eq!(live(), 4);
        other.free().unwrap();
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}

#[test]
fn failed_free_stays_charged() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = untracked();
        let stream = runtime.stream().unwrap();
        let (dropped, freed) = (
            slice(&runtime, &[1], &stream),
            slice(&runtime, &[2, 3], &stream),
        );
        fault(runtime.context());
        drop(dropped);
        assert!(
            matches!(freed.free(), Err(FreeError::Retired { bytes: 8, source }) if source.code == 700)
        );
        let outstanding = runtime.resource().bytes_outstanding();
        assert_eq!((outstanding.live, outstanding.retired), (0, 12));
        runtime.resource().reap_pending().unwrap_err();
        assert_eq!(runtime.resource().bytes_outstanding().retired, 12);
    });
}

#[test]
fn slice_is_inert_when_drained_shut_down_or_poisoned() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let stream = runtime.stream().unwrap();
        let mut slice = slice(&runtime, &[1], &stream);
        for (end, stale) in [
            (Some(false), StaleReason::Draining),
            (Some(true), StaleReason::ShutDown),
        ] {
            match end {
                Some(true) => runtime.shut_down(),
                _ => runtime.state().drain(),
            }
            assert_eq!(slice.copy_from_host(&[2]), Err(stale.into()));
            assert_eq!(slice.move_to(&stream), Err(stale.into()));
            let another = TrackedSlice::<u32>::allocate(&runtime, 1, &stream, Tag::default());
            assert_eq!(another.unwrap_err(), stale.into());
        }
        // The next runtime is another one, and the memory stays with the runtime that was shut
        // down.
        let next = crate::runtime(0);
        assert_eq!(next.state().check(), Ok(()));
        assert_eq!(slice.check(), Err(StaleReason::ShutDown));
        slice.free().unwrap();
    });
}

#[test]
fn moved_slice_waits_for_its_first_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let (first, second) = (runtime.stream().unwrap(), runtime.stream().unwrap());
        let mut slice = slice(&runtime, &[1], &first);
        spin(&first);
        slice.move_to(&second).unwrap();
        assert_eq!(second.is_idle(), Ok(false));
        second.synchronize().unwrap();
        assert_eq!(first.is_idle(), Ok(true));
        assert_eq!(slice.stream(), &second);
    });
}

#[test]
fn another_devices_stream_is_refused() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (local, peer) = (runtime(0), runtime(1));
        let wrong = ResourceError::WrongOrdinal {
            ordinal: 0,
            found: 1,
        };
        let stream = peer.stream().unwrap();
        let refused = TrackedSlice::<u32>::allocate(&local, 1, &stream, Tag::default());
        assert_eq!(refused.unwrap_err(), wrong.clone().into());
        let mut slice = slice(&local, &[1], &local.stream().unwrap());
        assert_eq!(slice.move_to(&stream), Err(wrong.into()));
    });
}

#[test]
fn eight_threads_with_64_slices_each_leak_nothing() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let resource = runtime.with_resource(|_| Direct::new(runtime.context()));
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                let resource = &resource;
                scope.spawn(move || {
                    let stream = resource.stream().unwrap();
                    for round in 0..64 {
                        let items: Vec<u32> = (0..=round).map(|item| item ^ thread).collect();
                        let slice = slice(resource, &items, &stream);
                        let mut back = vec![0; items.len()];
                        slice.copy_to_host(&mut back).unwrap();
                        assert_eq!(back, items);
                    }
                });
            }
        });
        assert_eq!(resource.resource().bytes_outstanding().total(), 0);
    });
}
