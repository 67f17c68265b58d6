//! Decides which XIDs of the kernel's log NVML confirms: pure, with time as an argument.
//!
//! The log names the process of an XID, but tenants can get text into the log. NVML reports an XID
//! of a GPU without its process. A record is confirmed once NVML has reported the same XID of the
//! same GPU at about the same time; either may arrive first.

use std::collections::VecDeque;
use std::time::Duration;

use bursar_gpu::xid::RecentXids;
use bursar_ledger::BootTime;

use super::kmsg::XidLine;

/// The longest time between a record and NVML's event. NVML's process may report an event late
/// while another GPU fails.
pub const WINDOW: Duration = Duration::from_secs(5);

/// The most records that wait for NVML; the oldest is dropped first.
const MAX_PENDING: usize = 256;

/// Whether NVML reported this XID of this GPU at about that time.
pub(crate) fn is_confirmed(line: &XidLine, at: BootTime, recent: &RecentXids) -> bool {
    let then = recent.last_reported(line.gpu, line.xid.into());
    then.is_some_and(|then| then.since(at).max(at.since(then)) <= WINDOW)
}

/// Records that NVML has not confirmed, each with its process as of the time when it was read.
#[derive(Debug)]
pub(crate) struct PendingXids<T>(VecDeque<(XidLine, BootTime, T)>);

impl<T> Default for PendingXids<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> PendingXids<T> {
    /// Adds a record of about that time.
    pub(crate) fn push(&mut self, line: XidLine, at: BootTime, target: T) {
        if self.0.len() >= MAX_PENDING {
            self.0.pop_front();
        }
        self.0.push_back((line, at, target));
    }

    /// Removes and returns confirmed records; drops those that NVML has not confirmed in time.
    pub(crate) fn take_confirmed(
        &mut self,
        recent: &RecentXids,
        now: BootTime,
    ) -> Vec<(XidLine, T)> {
        let all = std::mem::take(&mut self.0).into_iter();
        let (confirmed, rest) =
            all.partition::<VecDeque<_>, _>(|(line, at, _)| is_confirmed(line, *at, recent));
        self.0 = rest;
        self.0.retain(|(_, at, _)| now.since(*at) <= WINDOW);
        let confirmed = confirmed.into_iter();
        confirmed.map(|(line, _, target)| (line, target)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn xid_line(gpu: &str, xid: u32) -> XidLine {
        XidLine {
            gpu: gpu.parse().unwrap(),
            xid,
            pid: 4711,
        }
    }

    const GPU: &str = "0000:3b:00";

    fn recent_xids(gpu: &str, xid: u64, at: u64) -> RecentXids {
        let mut recent = RecentXids::default();
        recent.record(gpu.parse().unwrap(), xid, BootTime(at));
        recent
    }

    #[test]
    fn record_is_confirmed_once_when_nvml_reports_later() {
        let mut waiting = PendingXids::default();
        waiting.push(xid_line(GPU, 31), BootTime(1_000), "whom");
        assert_eq!(
            waiting.take_confirmed(&RecentXids::default(), BootTime(1_000)),
            []
        );
        let recent = recent_xids(GPU, 31, 1_200);
        let now = BootTime(1_300);
        assert_eq!(
            waiting.take_confirmed(&recent, now),
            [(xid_line(GPU, 31), "whom")]
        );
        assert_eq!(waiting.take_confirmed(&recent, now), []);
    }

    #[test]
    fn record_is_confirmed_when_nvml_reported_before() {
        let mut waiting = PendingXids::default();
        waiting.push(xid_line(GPU, 31), BootTime(1_400), ());
        let confirmed = waiting.take_confirmed(&recent_xids(GPU, 31, 1_000), BootTime(1_400));
        assert_eq!(confirmed.len(), 1);
    }

    #[test]
    fn record_is_dropped_when_nvml_does_not_confirm_it() {
        let mut waiting = PendingXids::default();
        waiting.push(xid_line(GPU, 31), BootTime(1_000), ());
        for other in [
            recent_xids("0000:3c:00", 31, 1_000),
            recent_xids(GPU, 43, 1_000),
            recent_xids(GPU, 31, 6_001),
        ] {
            assert_eq!(waiting.take_confirmed(&other, BootTime(1_000)), []);
        }
        assert_eq!(
            waiting.take_confirmed(&RecentXids::default(), BootTime(6_001)),
            []
        );
        assert_eq!(
            waiting.take_confirmed(&recent_xids(GPU, 31, 1_000), BootTime(6_001)),
            []
        );
    }

    #[test]
    fn newest_records_stay_pending_when_they_flood() {
        let mut waiting = PendingXids::default();
        for number in 0..=MAX_PENDING {
            waiting.push(xid_line(GPU, 31), BootTime(1_000), number);
        }
        let confirmed = waiting.take_confirmed(&recent_xids(GPU, 31, 1_000), BootTime(1_000));
        assert_eq!(confirmed.len(), MAX_PENDING);
        assert_eq!(
            confirmed.last().map(|(_, number)| *number),
            Some(MAX_PENDING)
        );
    }

    proptest! {
        /// In any order: each confirmed record has an event of its GPU and code within the window.
        #[test]
        fn confirmation_needs_an_event_of_that_gpu_and_code(
            steps in prop::collection::vec((0..2u8, 0..2usize, 0..2usize, 0..3_000u64), 0..60),
        ) {
            let (gpus, codes) = (["0000:3b:00", "0000:3c:00"], [31, 43]);
            let (mut recent, mut waiting, mut now) = (RecentXids::default(), PendingXids::default(), 100_000);
            let (mut events, mut confirmed) = (Vec::new(), Vec::new());
            for (kind, gpu, code, later) in steps {
                now += later;
                let (gpu, code) = (gpus[gpu], codes[code]);
                match kind {
                    0 => {
                        recent.record(gpu.parse().unwrap(), code.into(), BootTime(now));
                        events.push((xid_line(gpu, code), now));
                    }
                    _ => waiting.push(xid_line(gpu, code), BootTime(now), now),
                }
                confirmed.extend(waiting.take_confirmed(&recent, BootTime(now)));
            }
            for (line, at) in confirmed {
                let close = |(event, then): &(XidLine, u64)| {
                    *event == line && then.abs_diff(at) <= WINDOW.as_millis() as u64
                };
                prop_assert!(events.iter().any(close));
            }
        }
    }
}
