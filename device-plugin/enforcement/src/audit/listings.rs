//! Remembers since when the driver lists each process: pure.
//!
//! The driver lists memory by the pid that made its client, and keeps that pid while anybody has
//! the client's files. So a listed pid may belong to an ended process, and the kernel may give it
//! to another one. A process that started after the driver first listed its pid is not the listed
//! one.

use std::collections::BTreeMap;

use super::compare::LiveProcess;

/// For how long, in clock ticks, a listed pid has no process before the audit counts its memory as
/// left by an ended process. The driver frees most memory of a process within two seconds of its
/// end.
const GONE_AFTER: u64 = 500;

/// The driver lists no process that started while an answer took less than this, in clock ticks,
/// because `cuInit` takes 0.2 s.
const PROMPT_ANSWER: u64 = 20;

/// The pids that the driver lists on one GPU without a gap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listings(BTreeMap<u32, Listing>);

#[derive(Clone, Copy, Debug)]
struct Listing {
    /// When the driver first listed the pid. A process that started later is not the listed one.
    first_at: u64,
    /// The time since which no process has had the pid; none while one has it.
    gone_since: Option<u64>,
}

/// An answer of the driver: the times of its request and its receipt, in clock ticks since boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerTimes {
    pub(crate) asked_at: u64,
    pub(crate) answered_at: u64,
}

impl Listings {
    /// Adds a pid of the driver's answer; `before` has those of the answer before. `find` returns
    /// the process that has the pid now, if the process started before a time. Returns the listed
    /// process, and whether it is long gone.
    pub(crate) fn add(
        &mut self,
        before: &Listings,
        pid: u32,
        times: AnswerTimes,
        find: impl FnOnce(u64) -> Option<LiveProcess>,
    ) -> (Option<LiveProcess>, bool) {
        let AnswerTimes {
            asked_at,
            answered_at,
        } = times;
        let is_prompt = answered_at.saturating_sub(asked_at) < PROMPT_ANSWER;
        let first_at = if is_prompt { asked_at } else { answered_at };
        let mut listing = before.0.get(&pid).copied().unwrap_or(Listing {
            first_at,
            gone_since: None,
        });
        let live = find(listing.first_at.min(asked_at));
        listing.gone_since = match live {
            Some(_) => None,
            None => listing.gone_since.or(Some(asked_at)),
        };
        self.0.insert(pid, listing);
        let gone_for = |since| asked_at.saturating_sub(since);
        let is_gone = listing.gone_since.map(gone_for) >= Some(GONE_AFTER);
        (live, is_gone)
    }
}

#[cfg(test)]
mod tests {
    use bursar_host::procfs::ProcessOwner;

    use super::*;

    /// The process that the listing names where a process with this start has the pid.
    fn audit(listings: &mut Listings, asked_at: u64, start: Option<u64>) -> (Option<u64>, bool) {
        let times = AnswerTimes {
            asked_at,
            answered_at: asked_at + 1,
        };
        audit_at(listings, times, start)
    }

    fn audit_at(
        listings: &mut Listings,
        times: AnswerTimes,
        start: Option<u64>,
    ) -> (Option<u64>, bool) {
        let before = std::mem::take(listings);
        let owner = ProcessOwner::Host;
        let find = |before| {
            let start = start.filter(|start| *start < before)?;
            Some(LiveProcess { start, owner })
        };
        let (live, is_gone) = listings.add(&before, 7, times, find);
        (live.map(|live| live.start), is_gone)
    }

    #[test]
    fn process_that_started_after_the_first_listing_is_not_the_listed_one() {
        let mut listings = Listings::default();
        assert_eq!(audit(&mut listings, 100, None), (None, false));
        assert_eq!(audit(&mut listings, 200, Some(150)), (None, false));
        assert_eq!(audit(&mut listings, 599, Some(150)), (None, false));
        assert_eq!(audit(&mut listings, 600, Some(150)), (None, true));
        // The pid was not listed for one audit.
        listings = Listings::default();
        assert_eq!(audit(&mut listings, 800, Some(150)), (Some(150), false));
        assert_eq!(audit(&mut listings, 900, Some(150)), (Some(150), false));
        assert_eq!(audit(&mut listings, 1000, None), (None, false));
    }

    #[test]
    fn process_is_listed_when_it_started_during_a_slow_answer() {
        let slow = AnswerTimes {
            asked_at: 100,
            answered_at: 300,
        };
        let mut listings = Listings::default();
        assert_eq!(audit_at(&mut listings, slow, Some(150)), (None, false));
        assert_eq!(audit(&mut listings, 400, Some(150)), (Some(150), false));
    }
}
