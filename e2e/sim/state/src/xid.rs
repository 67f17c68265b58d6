//! Broadcasts XID events to all readers and writes them to the simulated kernel log.

use crate::sim::Sim;
use std::io::Write as _;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// An XID event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// The unit that reports the error.
    pub unit: usize,
    /// The code in NVIDIA's XID catalogue, such as 31, 43 or 79.
    pub code: u32,
    /// The process that the event names, by its pid in its own namespace; 0 for none.
    pub pid: u32,
}

impl Sim {
    /// The number of events so far, from which a new reader starts.
    pub fn xid_count(&self) -> u32 {
        self.table.raw().xid_count.load(Acquire)
    }

    /// Broadcasts an event to every reader.
    pub fn raise_xid(&self, xid: Xid) {
        self.log_xid(xid);
        let table = self.table.lock();
        let raw = table.raw();
        let number = raw.xid_count.load(Relaxed);
        let place = &raw.xids[Sim::xid_slot(number)];
        place.unit.store(xid.unit as u32, Relaxed);
        place.code.store(xid.code, Relaxed);
        place.pid.store(xid.pid, Relaxed);
        raw.xid_count.store(number.wrapping_add(1), Release);
        // SAFETY: the futex word is in a mapping that lives as long as `self`.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                raw.xid_count.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            )
        };
    }

    /// Appends the event to the simulated kernel log, in the format of the driver and `/dev/kmsg`.
    ///
    /// A process outside the host's pid namespace does not know its pid on the host, so the record
    /// says `<unknown>`.
    fn log_xid(&self, xid: Xid) {
        let home = std::fs::read_to_string(self.folder.pid_namespace());
        let is_known = xid.pid != 0 && home.is_ok_and(|home| home == self.namespace.to_string());
        let process = match is_known {
            true => format!("pid={}, name=simulated", xid.pid),
            false => "pid='<unknown>', name=<unknown>".to_owned(),
        };
        let position = self.units[xid.unit].gpu;
        // `00000000:3B:00.0`: the driver prints four digits of the domain and omits the function.
        let address = self.config.gpu[position].bus_id(position).to_lowercase();
        let address = address.trim_end_matches(".0").get(4..).unwrap_or_default();
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel knows this clock and writes all of `now`.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
        let (micros, number) = (
            now.tv_sec * 1_000_000 + now.tv_nsec / 1_000,
            self.xid_count(),
        );
        let line = format!(
            "4,{number},{micros},-;NVRM: Xid (PCI:{address}): {}, {process}\n",
            xid.code
        );
        let log = std::fs::OpenOptions::new()
            .append(true)
            .open(self.folder.kernel_log());
        // A failed write is ignored: a container without write access logs no line.
        let _ = log.and_then(|mut log| log.write_all(line.as_bytes()));
    }

    /// Waits for the first event after the first `read_count` ones and increments it; `None` after
    /// `timeout`.
    ///
    /// A reader that is more than [`crate::table::MAX_XIDS`] events behind misses the oldest.
    pub fn wait_xid(&self, read_count: &mut u32, timeout: Duration) -> Option<Xid> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(xid) = self.next_xid(read_count) {
                return Some(xid);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let wait = libc::timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let word = self.table.raw().xid_count.as_ptr();
            // SAFETY: the futex word is in a mapping that lives as long as `self`; the kernel reads
            // `wait` before it returns.
            unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, *read_count, &wait) };
        }
    }

    fn next_xid(&self, read_count: &mut u32) -> Option<Xid> {
        let table = self.table.lock();
        let now = table.raw().xid_count.load(Relaxed);
        if now == *read_count {
            return None;
        }
        let oldest = now.wrapping_sub(crate::table::MAX_XIDS as u32);
        if now.wrapping_sub(*read_count) > crate::table::MAX_XIDS as u32 {
            *read_count = oldest;
        }
        let place = &table.raw().xids[Sim::xid_slot(*read_count)];
        *read_count = read_count.wrapping_add(1);
        Some(Xid {
            unit: place.unit.load(Relaxed) as usize,
            code: place.code.load(Relaxed),
            pid: place.pid.load(Relaxed),
        })
    }

    /// The last events, at most `most`, oldest first.
    pub fn recent_xids(&self, most: u32) -> Vec<Xid> {
        let now = self.xid_count();
        let mut read_count = now.wrapping_sub(most.min(now));
        std::iter::from_fn(|| self.next_xid(&mut read_count)).collect()
    }
}
