//! The node's clock: milliseconds since the boot, also while no agent runs.

use std::path::Path;

use rustix::time::{ClockId, clock_gettime};

use crate::ledger::Moment;

/// Now, by `CLOCK_BOOTTIME`.
pub fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    // Neither part is negative for this clock.
    Moment(time.tv_sec.unsigned_abs() * 1_000 + time.tv_nsec.unsigned_abs() / 1_000_000)
}

/// Seconds of the wall clock since 1970.
pub fn seconds() -> u64 {
    clock_gettime(ClockId::Realtime).tv_sec.unsigned_abs()
}

/// Which boot this is; empty where the kernel does not say, which equals itself.
pub fn boot_id() -> String {
    let id = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    id.unwrap_or_default().trim().to_owned()
}
