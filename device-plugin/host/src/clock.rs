//! Reads the node's clocks: milliseconds since boot, which also count while no agent runs, and wall
//! time.

use std::path::Path;

use bursar_ledger::BootTime;
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// The current time by `CLOCK_BOOTTIME`.
pub fn now() -> BootTime {
    let time = clock_gettime(ClockId::Boottime);
    // Neither field is negative for this clock.
    BootTime(time.tv_sec.unsigned_abs() * 1_000 + time.tv_nsec.unsigned_abs() / 1_000_000)
}

/// One instant by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// Boot time, for decisions: nothing sets this clock.
    pub moment: BootTime,
    /// Wall time, for events and status. An administrator or NTP may set this clock back.
    pub wall: Timestamp,
}

/// Reads both clocks.
pub fn read_clocks() -> ClockReading {
    ClockReading {
        moment: now(),
        wall: Timestamp::now(),
    }
}

/// The kernel's boot id; empty where the kernel does not publish one.
pub fn boot_id() -> String {
    let id = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    id.unwrap_or_default().trim().to_owned()
}
