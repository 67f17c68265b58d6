//! Shares managed memory between threads: a writer with the write token, and readers.

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Advice, Attach, Location};
use bursar_runtime::{DeviceRuntime, ManagedRef, SharedManagedRef, Tag};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let (managed, stream) = (runtime.managed(), runtime.streams().next()?);
    let mut table: ManagedRef<u32> = managed.allocate(4, Attach::Global, &stream, Tag("table"))?;
    table.write()?.fill(1);
    let device = Location::Device(runtime.ordinal());
    table.advise(0..4, Advice::SetPreferredLocation, device)?;
    table.prefetch(0..4, device, &stream)?;
    assert_eq!(table.residency(0..4)?.prefetched, Some(device));
    // Each thread has a clone. The token is the right to write, a lock orders single uses.
    let table = SharedManagedRef::from(table);
    let writer = table.clone();
    let token = writer.begin_write(Instant::now(), Duration::from_secs(5))?;
    writer.lock_mut(&token)?.write()?.fill(2);
    // A second writer gets no token until the first has committed, or its token has expired.
    let second = table.begin_write(Instant::now(), Duration::from_secs(5));
    println!("{}", second.expect_err("the first writer has the token"));
    assert_eq!(writer.commit(token, Instant::now())?, 1);
    // The host waits for kernels that write the memory.
    assert_eq!(table.lock()?.read()?, [2; 4]);
    assert_eq!(managed.statistics().bytes.current, 16);
    drop((writer, table));
    assert_eq!(managed.statistics().bytes.current, 0);
    Ok(())
}
