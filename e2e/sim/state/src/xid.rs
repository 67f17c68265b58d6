//! XID events: told once, seen by every reader.

use crate::sim::Sim;
use std::io::Write as _;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// One XID event. The codes are NVIDIA's XID catalogue's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// The unit that it happened on.
    pub unit: usize,
    /// As 31 (illegal address), 43 (application), 79 (fell off the bus).
    pub code: u32,
    /// The process that it names, 0 for none. A container's own process names itself as it knows itself.
    pub pid: u32,
}

impl Sim {
    /// How many events there were so far: where a new reader starts.
    pub fn xid_count(&self) -> u32 {
        self.table.raw().xid_count.load(Acquire)
    }

    /// Tells an event to every reader.
    pub fn raise_xid(&self, xid: Xid) {
        self.log_xid(xid);
        let books = self.table.lock();
        let raw = books.raw();
        let number = raw.xid_count.load(Relaxed);
        let place = &raw.xids[Sim::xid_slot(number)];
        place.unit.store(xid.unit as u32, Relaxed);
        place.code.store(xid.code, Relaxed);
        place.pid.store(xid.pid, Relaxed);
        raw.xid_count.store(number.wrapping_add(1), Release);
        // SAFETY: a futex word in a mapping that lives as long as `self`.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                raw.xid_count.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            )
        };
    }

    /// A record of the kernel's log, as the driver writes it and `/dev/kmsg` shows it. A process of another pid namespace does not know what the
    /// machine calls it, and so is unknown there too.
    fn log_xid(&self, xid: Xid) {
        let home = std::fs::read_to_string(self.folder.pid_namespace());
        let is_known = xid.pid != 0 && home.is_ok_and(|home| home == self.namespace.to_string());
        let process = match is_known {
            true => format!("pid={}, name=simulated", xid.pid),
            false => "pid='<unknown>', name=<unknown>".to_owned(),
        };
        let position = self.units[xid.unit].gpu;
        // `00000000:3B:00.0`: the driver has four digits of the domain, and leaves out the function.
        let address = self.config.gpu[position].bus_id(position).to_lowercase();
        let address = address.trim_end_matches(".0").get(4..).unwrap_or_default();
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes the whole of `now`, and knows this clock.
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
        // A container that may not write there has no line, as one whose kernel drops it.
        let _ = log.and_then(|mut log| log.write_all(line.as_bytes()));
    }

    /// The next event after the first `seen`, which it counts up; none after `timeout`. A reader that is
    /// more than [`crate::table::MAX_XIDS`] behind misses the oldest.
    pub fn wait_xid(&self, seen: &mut u32, timeout: Duration) -> Option<Xid> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(xid) = self.next_xid(seen) {
                return Some(xid);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let wait = libc::timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let word = self.table.raw().xid_count.as_ptr();
            // SAFETY: as above; the kernel reads `wait` before it returns.
            unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, *seen, &wait) };
        }
    }

    fn next_xid(&self, seen: &mut u32) -> Option<Xid> {
        let books = self.table.lock();
        let now = books.raw().xid_count.load(Relaxed);
        if now == *seen {
            return None;
        }
        let oldest = now.wrapping_sub(crate::table::MAX_XIDS as u32);
        if now.wrapping_sub(*seen) > crate::table::MAX_XIDS as u32 {
            *seen = oldest;
        }
        let place = &books.raw().xids[Sim::xid_slot(*seen)];
        *seen = seen.wrapping_add(1);
        Some(Xid {
            unit: place.unit.load(Relaxed) as usize,
            code: place.code.load(Relaxed),
            pid: place.pid.load(Relaxed),
        })
    }

    /// The last events, oldest first.
    pub fn recent_xids(&self, most: u32) -> Vec<Xid> {
        let now = self.xid_count();
        let mut seen = now.wrapping_sub(most.min(now));
        std::iter::from_fn(|| self.next_xid(&mut seen)).collect()
    }
}
