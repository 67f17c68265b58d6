//! Writes retained memory, or reads what an earlier process image wrote, through the runtime.

use std::time::Duration;

use anyhow::ensure;
use bursar_runtime::driver::Driver;
use bursar_runtime::retained::{Key, LeaseClient, LeaseState, RetainedLease};
use serde::Serialize;

/// Includes the time of the agent's scrub check, which runs once per GPU.
const LEASE_TIMEOUT: Duration = Duration::from_secs(60);

const LEASE_NAME: &str = "probe";
const LEASE_KEY: Key = [1; 32];

/// Bytes per write.
const CHUNK: u64 = 1 << 20;

/// The lease in the `retained` event.
#[derive(Debug, Serialize)]
pub(crate) struct LeaseReport {
    found: bool,
    lease: u64,
    generation: u64,
    checksum: u64,
}

/// Opens the lease, or creates it with `bytes` bytes, and verifies its contents.
pub(crate) fn open_or_write_lease(bytes: u64) -> anyhow::Result<(RetainedLease, LeaseReport)> {
    let context = Driver::get()?.device(0)?.primary_context()?;
    let (found, lease) =
        match LeaseClient::new(&context).open(LEASE_NAME, &LEASE_KEY, bytes, LEASE_TIMEOUT)? {
            LeaseState::Ready(lease) => (true, lease),
            LeaseState::Writing(writing) => {
                for at in chunk_offsets(writing.bytes()) {
                    writing.write(at, &chunk_contents(at))?;
                }
                (false, writing.commit()?)
            }
        };
    let mut read = vec![0; CHUNK as usize];
    for at in chunk_offsets(lease.bytes()) {
        lease.read(at, &mut read)?;
        ensure!(
            read == chunk_contents(at),
            "retained memory at offset {at} differs from what was written"
        );
    }
    let report = LeaseReport {
        found,
        lease: lease.lease(),
        generation: lease.generation(),
        checksum: lease.checksum()?,
    };
    Ok((lease, report))
}

/// Offsets of the chunks; the size of a lease is a multiple of 2 MiB.
fn chunk_offsets(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes).step_by(CHUNK as usize)
}

/// The contents of the chunk at an offset. Chunks differ, so that a misplaced chunk is noticed.
fn chunk_contents(at: u64) -> Vec<u8> {
    (at / CHUNK)
        .to_le_bytes()
        .repeat(CHUNK as usize / size_of::<u64>())
}
