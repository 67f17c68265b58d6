//! Memory that the node keeps for the next image of this program, through the runtime as programs use it.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::ensure;
use bursar_runtime::driver::Driver;
use bursar_runtime::retained::{Key, LeaseClient, LeaseState, RetainedLease};
use serde::Serialize;

/// For the node to look at its GPU first, which it does once.
const PATIENCE: Duration = Duration::from_secs(60);

/// What this program keeps.
const NAME: &str = "probe";
const KEY: Key = [1; 32];

/// What is written at a time.
const PIECE: u64 = 1 << 20;

/// What was found or made.
#[derive(Debug, Serialize)]
pub(crate) struct Told {
    found: bool,
    lease: u64,
    generation: u64,
    checksum: u64,
}

/// Keeps so much, or finds what an image before kept. Every byte is as it was written.
pub(crate) fn keep(bytes: u64) -> anyhow::Result<(RetainedLease, Told)> {
    let context = Driver::get()?.device(0)?.primary_context()?;
    let (found, kept) = match LeaseClient::new(&context).open(NAME, &KEY, bytes, PATIENCE)? {
        LeaseState::Ready(kept) => (true, kept),
        LeaseState::Writing(writing) => {
            for at in pieces(writing.bytes()) {
                writing.write(at, &piece(at))?;
            }
            (false, writing.commit()?)
        }
    };
    let mut read = vec![0; PIECE as usize];
    for at in pieces(kept.bytes()) {
        kept.read(at, &mut read)?;
        ensure!(
            read == piece(at),
            "what was kept at {at} is not what was written"
        );
    }
    let told = Told {
        found,
        lease: kept.lease(),
        generation: kept.generation(),
        checksum: kept.checksum()?,
    };
    Ok((kept, told))
}

/// Where pieces begin: leases are multiples of 2 MiB.
fn pieces(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes).step_by(PIECE as usize)
}

/// Each is another, so that one in the place of another shows.
fn piece(at: u64) -> Vec<u8> {
    (at / PIECE)
        .to_le_bytes()
        .repeat(PIECE as usize / size_of::<u64>())
}
