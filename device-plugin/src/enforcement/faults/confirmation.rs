//! Decides which XIDs of the kernel's log are believed: pure, time included.
//!
//! The log says which process an XID is of, and other text than the driver's gets into it. NVML says that there was an
//! XID, not whose. A record is believed once NVML has told of the same XID of the same GPU at about the same time;
//! either may be heard of first.

use std::collections::VecDeque;
use std::time::Duration;

use super::kmsg::Named;
use crate::gpu::xid::Told;
use crate::ledger::Moment;

/// How far apart the log's record and NVML's event may be. NVML's thread hears an event late where another GPU is sick.
pub const WINDOW: Duration = Duration::from_secs(5);

/// So many records wait for NVML at most. The oldest makes room.
const MOST_WAITING: usize = 256;

/// Whether NVML told of the same, at about the same time.
pub fn is_confirmed(named: &Named, at: Moment, told: &Told) -> bool {
    let then = told.last(named.gpu, named.xid.into());
    then.is_some_and(|then| then.since(at).max(at.since(then)) <= WINDOW)
}

/// Records that NVML has not confirmed yet, each with whom it named when it was read.
#[derive(Debug)]
pub struct Waiting<T>(VecDeque<(Named, Moment, T)>);

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Waiting<T> {
    /// One more, of about that moment.
    pub fn push(&mut self, named: Named, at: Moment, whom: T) {
        if self.0.len() >= MOST_WAITING {
            self.0.pop_front();
        }
        self.0.push_back((named, at, whom));
    }

    /// Those that NVML has confirmed; those that it has not confirmed in time are dropped.
    pub fn confirmed(&mut self, told: &Told, now: Moment) -> Vec<(Named, T)> {
        let all = std::mem::take(&mut self.0).into_iter();
        let (confirmed, rest) =
            all.partition::<VecDeque<_>, _>(|(named, at, _)| is_confirmed(named, *at, told));
        self.0 = rest;
        self.0.retain(|(_, at, _)| now.since(*at) <= WINDOW);
        let confirmed = confirmed.into_iter();
        confirmed.map(|(named, _, whom)| (named, whom)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(gpu: &str, xid: u32) -> Named {
        Named {
            gpu: gpu.parse().unwrap(),
            xid,
            pid: 4711,
        }
    }

    const GPU: &str = "0000:3b:00";

    fn told(gpu: &str, xid: u64, at: u64) -> Told {
        let mut told = Told::default();
        told.hear(gpu.parse().unwrap(), xid, Moment(at));
        told
    }

    #[test]
    fn record_waits_for_nvml_and_is_believed_once() {
        let mut waiting = Waiting::default();
        waiting.push(named(GPU, 31), Moment(1_000), "whom");
        assert_eq!(waiting.confirmed(&Told::default(), Moment(1_000)), []);
        let told = told(GPU, 31, 1_200);
        let now = Moment(1_300);
        assert_eq!(waiting.confirmed(&told, now), [(named(GPU, 31), "whom")]);
        assert_eq!(waiting.confirmed(&told, now), []);
    }

    #[test]
    fn record_is_believed_when_nvml_told_before_it() {
        let mut waiting = Waiting::default();
        waiting.push(named(GPU, 31), Moment(1_400), ());
        let believed = waiting.confirmed(&told(GPU, 31, 1_000), Moment(1_400));
        assert_eq!(believed.len(), 1);
    }

    #[test]
    fn record_that_nvml_does_not_confirm_is_dropped() {
        let mut waiting = Waiting::default();
        waiting.push(named(GPU, 31), Moment(1_000), ());
        for other in [
            told("0000:3c:00", 31, 1_000),
            told(GPU, 43, 1_000),
            told(GPU, 31, 6_001),
        ] {
            assert_eq!(waiting.confirmed(&other, Moment(1_000)), []);
        }
        assert_eq!(waiting.confirmed(&Told::default(), Moment(6_001)), []);
        assert_eq!(waiting.confirmed(&told(GPU, 31, 1_000), Moment(6_001)), []);
    }

    #[test]
    fn flood_of_records_keeps_the_newest_waiting() {
        let mut waiting = Waiting::default();
        for number in 0..=MOST_WAITING {
            waiting.push(named(GPU, 31), Moment(1_000), number);
        }
        let believed = waiting.confirmed(&told(GPU, 31, 1_000), Moment(1_000));
        assert_eq!(believed.len(), MOST_WAITING);
        assert_eq!(
            believed.last().map(|(_, number)| *number),
            Some(MOST_WAITING)
        );
    }

    proptest! {
        /// Whatever is heard in whatever order: what is believed has an event of its GPU and code within the window.
        #[test]
        fn belief_needs_an_event_of_that_gpu_and_code(
            steps in prop::collection::vec((0..2u8, 0..2usize, 0..2usize, 0..3_000u64), 0..60),
        ) {
            let (gpus, codes) = (["0000:3b:00", "0000:3c:00"], [31, 43]);
            let (mut told, mut waiting, mut now) = (Told::default(), Waiting::default(), 100_000);
            let (mut events, mut believed) = (Vec::new(), Vec::new());
            for (kind, gpu, code, later) in steps {
                now += later;
                let (gpu, code) = (gpus[gpu], codes[code]);
                match kind {
                    0 => {
                        told.hear(gpu.parse().unwrap(), code.into(), Moment(now));
                        events.push((named(gpu, code), now));
                    }
                    _ => waiting.push(named(gpu, code), Moment(now), now),
                }
                believed.extend(waiting.confirmed(&told, Moment(now)));
            }
            for (named, at) in believed {
                let close = |(event, then): &(Named, u64)| {
                    *event == named && then.abs_diff(at) <= WINDOW.as_millis() as u64
                };
                prop_assert!(events.iter().any(close));
            }
        }
    }
}
