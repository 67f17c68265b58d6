//! Which streams a free block still waits for, as numbers: a clock that ticks when an event is recorded.
//!
//! A free costs no event. It stamps the block with the streams that used it and the clock's present value. Only
//! when *another* stream takes the block is an event recorded, which ticks the clock: it covers every free of that
//! stream with a stamp up to that tick, so one event serves all blocks that were free by then.
//!
//! Why a load of the clock is enough at a free: the driver serialises calls on one stream. Where an event was
//! recorded before some work was queued, its tick happened before that work, and so before the free of what the
//! work uses: the stamp is later than the tick, and the event is not taken for covering it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Streams that a pool tells apart at a time: the bits of a word.
pub(super) const STREAMS: usize = 64;

/// The streams that may still use a free block, by lane, and when it was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct After {
    /// A bit for each lane.
    pub(super) lanes: u64,
    /// The clock's value at the latest of the frees.
    pub(super) stamp: u64,
}

impl After {
    /// Nothing may use it.
    pub(super) const NOTHING: After = After { lanes: 0, stamp: 0 };

    /// What must be waited for by who takes a block made of two.
    #[inline]
    pub(super) fn and(self, other: After) -> After {
        After {
            lanes: self.lanes | other.lanes,
            stamp: self.stamp.max(other.stamp),
        }
    }
}

/// A stream's number among those of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lane(u8);

impl Lane {
    /// The one that a number comes to where it is counted round.
    #[inline]
    pub(super) fn of(number: u64) -> Lane {
        Lane((number % STREAMS as u64) as u8)
    }

    /// The `number`th, below [`STREAMS`].
    pub(super) fn new(number: usize) -> Option<Lane> {
        (number < STREAMS).then_some(Lane(number as u8))
    }

    /// Its number.
    #[inline]
    pub(super) fn number(self) -> usize {
        usize::from(self.0)
    }

    /// Its bit.
    #[inline]
    pub(super) fn bit(self) -> u64 {
        1 << self.0
    }
}

/// The clock, and which stream has waited for which, up to what tick.
#[derive(Debug)]
pub(super) struct Order {
    clock: AtomicU64,
    /// `waited[waiter][of]`: the waiter's work comes after all that was freed on the other up to this tick.
    waited: Box<[[AtomicU64; STREAMS]]>,
}

impl Order {
    /// Nothing was freed.
    pub(super) fn new() -> Order {
        let zeroes = || [const { AtomicU64::new(0) }; STREAMS];
        Order {
            // 0 is the stamp of memory that was never used.
            clock: AtomicU64::new(1),
            waited: std::iter::repeat_with(zeroes).take(STREAMS).collect(),
        }
    }

    /// What to remember of a block that is freed now, used on `lanes`.
    #[inline]
    pub(super) fn freed(&self, lanes: u64) -> After {
        After {
            lanes,
            stamp: self.clock.load(Ordering::Relaxed),
        }
    }

    /// The lanes that `lane` must wait for before it uses a block.
    #[inline]
    pub(super) fn missing(&self, lane: Lane, after: After) -> u64 {
        let others = after.lanes & !lane.bit();
        if others == 0 || after.stamp == 0 {
            return 0;
        }
        self.missing_of(lane, others, after.stamp)
    }

    /// What of a block's users is still to be waited for by who waits for what `lane` has queued by now: not those that
    /// `lane` was put behind itself.
    #[inline]
    pub(super) fn left(&self, lane: Lane, after: After) -> After {
        if after.lanes & !lane.bit() == 0 {
            return after;
        }
        let lanes = self.missing(lane, after) | after.lanes & lane.bit();
        // The clock is read again, after what was waited for: an event of `lane` that was recorded before `lane` was put
        // behind the others has an earlier tick, and must not be taken for covering them.
        self.freed(lanes).and(After { lanes: 0, ..after })
    }

    #[cold]
    fn missing_of(&self, lane: Lane, others: u64, stamp: u64) -> u64 {
        lanes(others)
            .filter(|&of| stamp > self.waited[lane.number()][of.number()].load(Ordering::Acquire))
            .fold(0, |bits, of| bits | of.bit())
    }

    /// The tick of an event that is about to be recorded.
    pub(super) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// `waiter` waits for the event of that tick on `of`.
    pub(super) fn waits(&self, waiter: Lane, of: Lane, tick: u64) {
        self.waited[waiter.number()][of.number()].fetch_max(tick, Ordering::Release);
    }
}

/// The lanes of a set of bits.
pub(super) fn lanes(mut bits: u64) -> impl Iterator<Item = Lane> {
    std::iter::from_fn(move || {
        let lane = Lane::new(bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(lane)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(number: usize) -> Lane {
        Lane::new(number).expect("there are as many")
    }

    #[test]
    fn an_event_serves_what_was_freed_before_it_and_nothing_later() {
        let (order, [one, other]) = (Order::new(), [0, 1].map(lane));
        let before = order.freed(one.bit());
        let tick = order.tick();
        let later = order.freed(one.bit());
        order.waits(other, one, tick);
        assert_eq!(order.missing(other, before), 0);
        assert_eq!(order.missing(other, later), one.bit());
        assert_eq!(order.missing(lane(2), before), one.bit());
    }

    #[test]
    fn a_stream_never_waits_for_itself_nor_for_memory_that_nobody_used() {
        let order = Order::new();
        let own = order.freed(lane(7).bit());
        assert_eq!(order.missing(lane(7), own), 0);
        assert_eq!(order.missing(lane(7), After::NOTHING), 0);
    }

    #[test]
    fn who_waits_for_a_stream_waits_for_what_that_was_put_behind() {
        let (order, [one, other]) = (Order::new(), [0, 1].map(lane));
        let block = order.freed(one.bit());
        assert_eq!(order.left(other, block), block);
        order.waits(other, one, order.tick());
        assert_eq!(order.left(other, block).lanes, 0);
        let both = block.and(order.freed(other.bit()));
        assert_eq!(order.left(other, both).lanes, one.bit() | other.bit());
    }
}
