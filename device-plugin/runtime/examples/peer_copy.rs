//! Copies shared memory from one GPU to another, behind the last write and before later ones.

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::memory::peer_copy::copy_shared;
use bursar_runtime::{DeviceRuntime, GpuRef, Tag, TrackedSlice};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let local = DeviceRuntime::for_ordinal(0)?;
    let peer = DeviceRuntime::for_ordinal(1)?;
    let (own, copying) = (local.stream()?, peer.stream()?);
    let mut activations = TrackedSlice::<u32>::allocate(&local, 3, &own, Tag("activations"))?;
    activations.copy_from_host(&[1, 2, 3])?;
    let received = TrackedSlice::<u32>::allocate(&peer, 3, &copying, Tag("received"))?;
    let (activations, received) = (GpuRef::from(activations), GpuRef::from(received));
    // The copy writes the target, so it needs the target's token, and a stream of its device.
    let token = received.begin_write(Instant::now(), Duration::from_secs(5))?;
    copy_shared(&activations, &received, &token, &copying)?;
    received.commit(token, Instant::now())?;
    // The memory is freed behind the copy.
    drop(activations);
    let mut items = [0; 3];
    received.copy_to_host(&mut items)?;
    assert_eq!(items, [1, 2, 3]);
    Ok(())
}
