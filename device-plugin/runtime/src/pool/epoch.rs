//! Records for which streams a free block must wait, by a clock that ticks with each recorded
//! event.
//!
//! A free records no event. The free stamps the block with the streams that used it and with the
//! clock's value. The pool records an event only when *another* stream takes the block. The event
//! ticks the clock and covers every free of that stream with a stamp up to that tick. So one event
//! serves all blocks that were free by then.
//!
//! A relaxed load of the clock suffices at a free, because the driver serializes calls on one
//! stream. If the event was recorded before some work was submitted, its tick happened before that
//! work. The tick then also happened before the free of the memory that the work uses. The stamp is
//! then later than the tick, and the event does not cover that free.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of streams that a pool distinguishes at a time, one for each bit of a word.
pub(super) const SLOT_COUNT: usize = 64;

/// Streams that may still use a free block, and the time of the free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamDeps {
    /// One bit for each stream slot.
    pub(super) slots: u64,
    /// Clock value at the latest free.
    pub(super) stamp: u64,
}

impl StreamDeps {
    /// No stream uses the block.
    pub(super) const NONE: StreamDeps = StreamDeps { slots: 0, stamp: 0 };

    /// Returns the deps of a block that was merged from two.
    #[inline]
    pub(super) fn union(self, second: StreamDeps) -> StreamDeps {
        StreamDeps {
            slots: self.slots | second.slots,
            stamp: self.stamp.max(second.stamp),
        }
    }
}

/// Number of a stream within its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamSlot(u8);

impl StreamSlot {
    /// Returns the slot of a number modulo [`SLOT_COUNT`].
    #[inline]
    pub(super) fn wrapping(number: u64) -> StreamSlot {
        StreamSlot((number % SLOT_COUNT as u64) as u8)
    }

    /// Returns the slot with this index, if it is below [`SLOT_COUNT`].
    pub(super) fn new(number: usize) -> Option<StreamSlot> {
        (number < SLOT_COUNT).then_some(StreamSlot(number as u8))
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    #[inline]
    pub(super) fn bit(self) -> u64 {
        1 << self.0
    }
}

/// Clock, with the ticks up to which each stream has waited for each other stream.
#[derive(Debug)]
pub(super) struct EventClock {
    clock: AtomicU64,
    /// `waited_until[waiter][of]`: the waiter's work follows all frees of the other stream up to
    /// this tick.
    waited_until: Box<[[AtomicU64; SLOT_COUNT]]>,
}

impl EventClock {
    pub(super) fn new() -> EventClock {
        let zeroes = || [const { AtomicU64::new(0) }; SLOT_COUNT];
        EventClock {
            // 0 is the stamp of memory that was never used.
            clock: AtomicU64::new(1),
            waited_until: std::iter::repeat_with(zeroes).take(SLOT_COUNT).collect(),
        }
    }

    /// Returns the deps of a block that is freed now after use by `slots`.
    #[inline]
    pub(super) fn stamp_free(&self, slots: u64) -> StreamDeps {
        StreamDeps {
            slots,
            stamp: self.clock.load(Ordering::Relaxed),
        }
    }

    /// Returns the slots for which `slot` must wait before it uses a block.
    #[inline]
    pub(super) fn unmet(&self, slot: StreamSlot, deps: StreamDeps) -> u64 {
        let others = deps.slots & !slot.bit();
        if others == 0 || deps.stamp == 0 {
            return 0;
        }
        self.unmet_slow(slot, others, deps.stamp)
    }

    /// Returns the deps that remain for a stream that waits for all present work of `slot`.
    ///
    /// The streams for which `slot` itself has waited are not among them.
    #[inline]
    pub(super) fn remaining_after_wait(&self, slot: StreamSlot, deps: StreamDeps) -> StreamDeps {
        if deps.slots & !slot.bit() == 0 {
            return deps;
        }
        let slots = self.unmet(slot, deps) | deps.slots & slot.bit();
        // The clock is read again after the waits. An event of `slot` that was recorded before
        // `slot` waited for the others has an earlier tick and must not cover them.
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

    /// Returns the tick of an event that the caller is about to record.
    pub(super) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// Records that `waiter` waits for the event of that tick on `of`.
    pub(super) fn record_wait(&self, waiter: StreamSlot, of: StreamSlot, tick: u64) {
        self.waited_until[waiter.index()][of.index()].fetch_max(tick, Ordering::Release);
    }
}

/// Iterates over the slots in a set of bits.
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
