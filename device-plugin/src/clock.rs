//! The node's clock: milliseconds since the boot, also while no agent runs.

use std::path::Path;

use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::ledger::BootTime;

/// Now, by `CLOCK_BOOTTIME`.
pub fn now() -> BootTime {
    let time = clock_gettime(ClockId::Boottime);
    // Neither part is negative for this clock.
    BootTime(time.tv_sec.unsigned_abs() * 1_000 + time.tv_nsec.unsigned_abs() / 1_000_000)
}

/// The present by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// What every decision goes by: this clock is never set.
    pub moment: BootTime,
    /// What people are told. This clock may be set at any time, back or forth.
    pub wall: Timestamp,
}

/// The present.
pub fn read_clocks() -> ClockReading {
    ClockReading {
        moment: now(),
        wall: Timestamp::now(),
    }
}

/// Which boot this is; empty where the kernel does not say, which equals itself.
pub fn boot_id() -> String {
    let id = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    id.unwrap_or_default().trim().to_owned()
}
