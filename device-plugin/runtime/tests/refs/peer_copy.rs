//! Tests copies between devices.

use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::{StaleReason, memory::peer_copy};
use bursar_sim_lab::{TWO_GPUS, run_in_subprocess};

use crate::{runtime, slice, spin};

#[test]
fn peer_copy_works_across_devices_and_on_one() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (local, peer) = (runtime(0), runtime(1));
        let from = slice(&local, &[1, 2, 3], &local.stream().unwrap());
        for target in [&peer, &local] {
            let mut to = slice(target, &[0; 3], &target.stream().unwrap());
            peer_copy::copy(&from, &mut to).unwrap();
            let mut back = [0; 3];
            to.copy_to_host(&mut back).unwrap();
            assert_eq!(back, [1, 2, 3]);
        }
    });
}

#[test]
fn peer_copy_is_ordered_in_both_streams() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (local, peer) = (runtime(0), runtime(1));
        for late in ["source", "target"] {
            let (source, target) = (local.stream().unwrap(), peer.stream().unwrap());
            let from = slice(&local, &[1], &source);
            let mut to = slice(&peer, &[0], &target);
            spin(if late == "source" { &source } else { &target });
            peer_copy::copy(&from, &mut to).unwrap();
            assert_eq!(target.is_idle(), Ok(false), "{late}");
            assert_eq!(source.is_idle(), Ok(false), "{late}");
            source.synchronize().unwrap();
            assert_eq!(target.is_idle(), Ok(true), "{late}");
        }
    });
}

#[test]
fn peer_copy_is_refused_for_other_lengths_or_stale_memory() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (local, peer) = (runtime(0), runtime(1));
        let from = slice(&local, &[1, 2], &local.stream().unwrap());
        let mut short = slice(&peer, &[0], &peer.stream().unwrap());
        let refused = peer_copy::copy(&from, &mut short);
        assert_eq!(refused, Err(MemoryError::Length { len: 1, given: 2 }));
        let mut to = slice(&peer, &[0, 0], &peer.stream().unwrap());
        local.shut_down();
        assert_eq!(
            peer_copy::copy(&from, &mut to),
            Err(StaleReason::ShutDown.into())
        );
    });
}
