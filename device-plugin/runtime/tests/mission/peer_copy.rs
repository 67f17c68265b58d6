//! Tests copies of shared memory between devices, ordered by the last writes.

use std::time::Instant;

use anyhow::Result;
use bursar_runtime::memory::gpu_ref::WriteError;
use bursar_runtime::memory::peer_copy::copy_shared;
use bursar_runtime::memory::write_token::WriteRefused;
use bursar_runtime::{DeviceMemoryResource as _, DeviceRuntime, GpuRef, StreamOrdered};
use bursar_sim_lab::{TWO_GPUS, run_in_subprocess};

use crate::{LASTS, items, slice, spin};

fn example() -> Result<()> {
    let (local, peer) = (
        DeviceRuntime::for_ordinal(0)?,
        DeviceRuntime::for_ordinal(1)?,
    );
    let (writing, copying) = (local.stream()?, peer.stream()?);
    let activations = GpuRef::from(slice(&local, &[1, 2, 3], &local.stream()?));
    let received = GpuRef::from(slice(&peer, &[0; 3], &peer.stream()?));
    // The last write of the source is still running, in a stream that the copy never names.
    let token = activations.begin_write(Instant::now(), LASTS)?;
    activations.write_in(&token, &writing, |_address| spin(&writing))?;
    activations.commit(token, Instant::now())?;
    // The target is written, so the copy needs its token, and a stream of its device.
    let token = received.begin_write(Instant::now(), LASTS)?;
    copy_shared(&activations, &received, &token, &copying)?;
    received.commit(token, Instant::now())?;
    assert_eq!(copying.is_idle(), Ok(false));
    assert_eq!(items(&received), [1, 2, 3]);
    assert_eq!(writing.is_idle(), Ok(true));
    Ok(())
}

#[test]
fn peer_copy_follows_the_last_writes() {
    run_in_subprocess(TWO_GPUS, |_| example().unwrap());
}

#[test]
fn later_writes_and_the_free_follow_the_copy() {
    run_in_subprocess(TWO_GPUS, |_| {
        let [local, peer] = [0, 1].map(|ordinal| DeviceRuntime::for_ordinal(ordinal).unwrap());
        let local = local.with_resource(|_| StreamOrdered::new(local.context()));
        let (own, copying) = (local.stream().unwrap(), peer.stream().unwrap());
        let from = GpuRef::from(slice(&local, &[1], &own));
        let to = GpuRef::from(slice(&peer, &[0], &peer.stream().unwrap()));
        let (to_token, from_token) = (
            to.begin_write(Instant::now(), LASTS).unwrap(),
            from.begin_write(Instant::now(), LASTS).unwrap(),
        );
        spin(&copying);
        copy_shared(&from, &to, &to_token, &copying).unwrap();
        // A read of the source goes on beside the copy, a write does not.
        let (reader, writer) = (local.stream().unwrap(), local.stream().unwrap());
        from.read_in(&reader, |_| {}).unwrap();
        assert_eq!(reader.is_idle(), Ok(true));
        from.write_in(&from_token, &writer, |_| {}).unwrap();
        assert_eq!(writer.is_idle(), Ok(false));
        // The free of memory that only the copy reads waits for the copy as well.
        let other = GpuRef::from(slice(&local, &[2], &own));
        spin(&copying);
        copy_shared(&other, &to, &to_token, &copying).unwrap();
        drop(other);
        assert_eq!(own.is_idle(), Ok(false));
        assert_eq!(local.resource().bytes_outstanding().retired, 4);
        assert_eq!(items(&to), [2]);
    });
}

#[test]
fn peer_copy_is_refused_with_its_reason() {
    run_in_subprocess(TWO_GPUS, |_| {
        let [local, peer] = [0, 1].map(|ordinal| DeviceRuntime::for_ordinal(ordinal).unwrap());
        let (own, copying) = (local.stream().unwrap(), peer.stream().unwrap());
        let from = GpuRef::from(slice(&local, &[1], &own));
        let to = GpuRef::from(slice(&peer, &[0], &copying));
        let token = to.begin_write(Instant::now(), LASTS).unwrap();
        let wrong = copy_shared(&from, &to, &token, &own).unwrap_err();
        assert!(matches!(wrong, WriteError::Memory(_)), "{wrong}");
        let short = GpuRef::from(slice(&local, &[1, 2], &own));
        let length = copy_shared(&short, &to, &token, &copying).unwrap_err();
        assert!(length.to_string().contains("2 items"), "{length}");
        let foreign = copy_shared(&to, &from, &token, &own).unwrap_err();
        assert_eq!(foreign, WriteError::Refused(WriteRefused::Foreign));
        // A copy to itself and two copies in opposite order do not deadlock.
        copy_shared(&to, &to, &token, &copying).unwrap();
        let back = from.begin_write(Instant::now(), LASTS).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..64 {
                    copy_shared(&from, &to, &token, &copying).unwrap();
                }
            });
            for _ in 0..64 {
                copy_shared(&to, &from, &back, &own).unwrap();
            }
        });
        peer.shut_down();
        assert!(matches!(
            copy_shared(&from, &to, &token, &copying),
            Err(WriteError::Memory(_))
        ));
    });
}
