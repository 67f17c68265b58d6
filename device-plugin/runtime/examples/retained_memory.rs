//! Opens memory that outlives the process, or fills it. Run it twice in a container of Bursar.

use std::error::Error;
use std::time::Duration;

use bursar_runtime::DeviceRuntime;
use bursar_runtime::retained::{Key, LeaseClient, LeaseState, RetainedLease};

/// A digest of all that determines the content: model, revision, versions.
const KEY: Key = [7; 32];
const BYTES: u64 = 2 << 20;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let weights = open(&LeaseClient::new(runtime.context()))?;
    println!("{} bytes at {:#x}", weights.bytes(), weights.address());
    Ok(())
}

pub(crate) fn open(client: &LeaseClient) -> Result<RetainedLease, Box<dyn Error>> {
    match client.open("weights", &KEY, BYTES, Duration::from_secs(60))? {
        // An earlier process has committed it. It is verified and read-only.
        LeaseState::Ready(weights) => Ok(weights),
        // The memory is new and zeroed, and belongs to this process alone.
        LeaseState::Writing(writer) => {
            writer.write(0, b"loaded")?;
            // Without a commit the lease is discarded, so no process finds a part of it.
            Ok(writer.commit()?)
        }
    }
}
