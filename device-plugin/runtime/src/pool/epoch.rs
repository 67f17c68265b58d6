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
pub(super) const SLOT_COUNT: usize = 64;

/// The streams that may still use a free block, by lane, and when it was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamDeps {
    /// A bit for each lane.
    pub(super) slots: u64,
    /// The clock's value at the latest of the frees.
    pub(super) stamp: u64,
}

impl StreamDeps {
    /// Nothing may use it.
    pub(super) const NONE: StreamDeps = StreamDeps { slots: 0, stamp: 0 };

    /// What must be waited for by who takes a block made of two.
    #[inline]
    pub(super) fn union(self, second: StreamDeps) -> StreamDeps {
        StreamDeps {
            slots: self.slots | second.slots,
            stamp: self.stamp.max(second.stamp),
        }
    }
}

/// A stream's number among those of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamSlot(u8);

impl StreamSlot {
    /// The one that a number comes to where it is counted round.
    #[inline]
    pub(super) fn wrapping(number: u64) -> StreamSlot {
        StreamSlot((number % SLOT_COUNT as u64) as u8)
    }

    /// The `number`th, below [`STREAMS`].
    pub(super) fn new(number: usize) -> Option<StreamSlot> {
        (number < SLOT_COUNT).then_some(StreamSlot(number as u8))
    }

    /// Its number.
    #[inline]
    pub(super) fn index(self) -> usize {
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
pub(super) struct EventClock {
    clock: AtomicU64,
    /// `waited[waiter][of]`: the waiter's work comes after all that was freed on the other up to this tick.
    waited_until: Box<[[AtomicU64; SLOT_COUNT]]>,
}

impl EventClock {
    /// Nothing was freed.
    pub(super) fn new() -> EventClock {
        let zeroes = || [const { AtomicU64::new(0) }; SLOT_COUNT];
        EventClock {
            // 0 is the stamp of memory that was never used.
            clock: AtomicU64::new(1),
            waited_until: std::iter::repeat_with(zeroes).take(SLOT_COUNT).collect(),
        }
    }

    /// What to remember of a block that is freed now, used on `lanes`.
    #[inline]
    pub(super) fn stamp_free(&self, slots: u64) -> StreamDeps {
        StreamDeps {
            slots,
            stamp: self.clock.load(Ordering::Relaxed),
        }
    }

    /// The lanes that `lane` must wait for before it uses a block.
    #[inline]
    pub(super) fn unmet(&self, slot: StreamSlot, deps: StreamDeps) -> u64 {
        let others = deps.slots & !slot.bit();
        if others == 0 || deps.stamp == 0 {
            return 0;
        }
        self.unmet_slow(slot, others, deps.stamp)
    }

    /// What of a block's users is still to be waited for by who waits for what `lane` has queued by now: not those that
    /// `lane` was put behind itself.
    #[inline]
    pub(super) fn remaining_after_wait(&self, slot: StreamSlot, deps: StreamDeps) -> StreamDeps {
        if deps.slots & !slot.bit() == 0 {
            return deps;
        }
        let slots = self.unmet(slot, deps) | deps.slots & slot.bit();
        // The clock is read again, after what was waited for: an event of `lane` that was recorded before `lane` was put
        // behind the others has an earlier tick, and must not be taken for covering them.
        self.stamp_free(slots)
            .union(StreamDeps { slots: 0, ..deps })
    }

    #[cold]
    fn unmet_slow(&self, slot: StreamSlot, others: u64, stamp: u64) -> u64 {
        slots_in(others)
            .filter(|&of| {
                stamp > self.waited_until[slot.index()][of.index()].load(Ordering::Acquire)
            })
            .fold(0, |bits, of| bits | of.bit())
    }

    /// The tick of an event that is about to be recorded.
    pub(super) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// `waiter` waits for the event of that tick on `of`.
    pub(super) fn record_wait(&self, waiter: StreamSlot, of: StreamSlot, tick: u64) {
        self.waited_until[waiter.index()][of.index()].fetch_max(tick, Ordering::Release);
    }
}

/// The lanes of a set of bits.
pub(super) fn slots_in(mut bits: u64) -> impl Iterator<Item = StreamSlot> {
    std::iter::from_fn(move || {
        let slot = StreamSlot::new(bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(slot)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: usize) -> StreamSlot {
        StreamSlot::new(number).expect("there are as many")
    }

    #[test]
    fn event_covers_only_frees_before_its_tick() {
        let (order, [first, second]) = (EventClock::new(), [0, 1].map(slot));
        let before = order.stamp_free(first.bit());
        let tick = order.tick();
        let later = order.stamp_free(first.bit());
        order.record_wait(second, first, tick);
        assert_eq!(order.unmet(second, before), 0);
        assert_eq!(order.unmet(second, later), first.bit());
        assert_eq!(order.unmet(slot(2), before), first.bit());
    }

    #[test]
    fn stream_has_no_unmet_deps_on_itself_or_unused_memory() {
        let order = EventClock::new();
        let own = order.stamp_free(slot(7).bit());
        assert_eq!(order.unmet(slot(7), own), 0);
        assert_eq!(order.unmet(slot(7), StreamDeps::NONE), 0);
    }

    #[test]
    fn waiting_for_a_stream_covers_what_that_stream_waited_for() {
        let (order, [first, second]) = (EventClock::new(), [0, 1].map(slot));
        let block = order.stamp_free(first.bit());
        assert_eq!(order.remaining_after_wait(second, block), block);
        order.record_wait(second, first, order.tick());
        assert_eq!(order.remaining_after_wait(second, block).slots, 0);
        let both = block.union(order.stamp_free(second.bit()));
        assert_eq!(
            order.remaining_after_wait(second, both).slots,
            first.bit() | second.bit()
        );
    }
}
