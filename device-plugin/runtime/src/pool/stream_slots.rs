//! Assigns stream slots, and orders one stream behind others.
//!
//! A pool has 64 slots, and a lookup by the stream's key takes no lock. A slot whose stream has no
//! other handle goes to the next stream, which is first ordered behind the old one. Waiting for the
//! new stream then covers the old stream's work. When 64 streams live, a further stream has no
//! slot, and the host waits for it at each free.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::epoch::{EventClock, SLOT_COUNT, StreamSlot, slots_in};
use crate::driver::{Event, Stream};
use crate::error::CudaError;

/// The slot was never used: a probe ends here.
const EMPTY: u64 = 0;
/// The slot's stream was forgotten: a probe continues.
const TOMBSTONE: u64 = u64::MAX;

/// Streams of a pool.
#[derive(Debug)]
pub(super) struct StreamSlots {
    /// Open-addressing table of each stream's key plus 1.
    keys: [AtomicU64; SLOT_COUNT],
    streams: Mutex<Vec<Option<Stream>>>,
    events: Mutex<Vec<Event>>,
    /// The pool's own stream.
    internal: (Stream, StreamSlot),
}

impl StreamSlots {
    /// Creates the table with a slot for the pool's own stream.
    pub(super) fn new(internal: Stream) -> StreamSlots {
        let key = key(&internal);
        let slot = probe_slot(key, 0);
        let slots = StreamSlots {
            keys: [const { AtomicU64::new(EMPTY) }; SLOT_COUNT],
            streams: Mutex::new(vec![None; SLOT_COUNT]),
            events: Mutex::default(),
            internal: (internal.clone(), slot),
        };
        slots.streams()[slot.index()] = Some(internal);
        slots.keys[slot.index()].store(key, Ordering::Release);
        slots
    }

    /// Returns the pool's own stream and its slot.
    pub(super) fn internal_stream(&self) -> (&Stream, StreamSlot) {
        (&self.internal.0, self.internal.1)
    }

    /// Returns a stream's slot, and assigns one if necessary; `None` if all slots are taken.
    #[inline]
    pub(super) fn slot_for(&self, stream: &Stream) -> Result<Option<StreamSlot>, CudaError> {
        match self.find(stream) {
            Some(slot) => Ok(Some(slot)),
            None => self.assign(stream),
        }
    }

    /// Returns the slot that a stream has.
    #[inline]
    fn find(&self, stream: &Stream) -> Option<StreamSlot> {
        let key = key(stream);
        let first = probe_slot(key, 0);
        if self.keys[first.index()].load(Ordering::Acquire) == key {
            return Some(first);
        }
        self.find_probing(key)
    }

    #[cold]
    fn find_probing(&self, key: u64) -> Option<StreamSlot> {
        for slot in probe_sequence(key) {
            match self.keys[slot.index()].load(Ordering::Acquire) {
                found if found == key => return Some(slot),
                EMPTY => return None,
                _ => {}
            }
        }
        None
    }

    /// Removes a stream, so that its owner can destroy it.
    pub(super) fn forget(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut streams = self.streams();
        let Some(slot) = self.find(stream) else {
            return Ok(());
        };
        let (internal, own) = self.internal_stream();
        if slot != own {
            self.order_after(internal, stream)?;
            streams[slot.index()] = Some(internal.clone());
            self.keys[slot.index()].store(TOMBSTONE, Ordering::Release);
        }
        Ok(())
    }

    /// Orders later work of a stream behind the present work of others.
    pub(super) fn wait(
        &self,
        order: &EventClock,
        stream: &Stream,
        slot: Option<StreamSlot>,
        others: u64,
    ) -> Result<(), CudaError> {
        for of in slots_in(others) {
            // The lock is held until the event is recorded, because a forgotten stream may be
            // destroyed.
            let streams = self.streams();
            let Some(other) = &streams[of.index()] else {
                continue;
            };
            let tick = order.tick();
            self.order_after(stream, other)?;
            if let Some(slot) = slot {
                order.record_wait(slot, of, tick);
            }
        }
        Ok(())
    }

    #[cold]
    fn assign(&self, stream: &Stream) -> Result<Option<StreamSlot>, CudaError> {
        let key = key(stream);
        let mut streams = self.streams();
        if let Some(slot) = self.find(stream) {
            return Ok(Some(slot));
        }
        let vacant = |slot: &StreamSlot| {
            matches!(
                self.keys[slot.index()].load(Ordering::Acquire),
                EMPTY | TOMBSTONE
            )
        };
        let reusable = |slot: &StreamSlot| {
            streams[slot.index()]
                .as_ref()
                .is_some_and(Stream::is_sole_handle)
        };
        let Some(slot) = probe_sequence(key)
            .find(vacant)
            .or_else(|| probe_sequence(key).find(reusable))
        else {
            return Ok(None);
        };
        if let Some(before) = &streams[slot.index()] {
            self.order_after(stream, before)?;
        }
        streams[slot.index()] = Some(stream.clone());
        self.keys[slot.index()].store(key, Ordering::Release);
        Ok(Some(slot))
    }

    /// Orders a stream behind another. A wait captures the event's state, so the event can be
    /// reused at once.
    fn order_after(&self, stream: &Stream, other: &Stream) -> Result<(), CudaError> {
        let spare = self.events().pop();
        let event = match spare {
            Some(event) => event,
            None => other.context().event()?,
        };
        event.record(other)?;
        stream.wait(&event)?;
        self.events().push(event);
        Ok(())
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Option<Stream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[inline]
fn key(stream: &Stream) -> u64 {
    stream.key().number().wrapping_add(1)
}

/// Returns the slot at a step of the key's probe sequence.
#[inline]
fn probe_slot(key: u64, step: usize) -> StreamSlot {
    StreamSlot::wrapping(key.wrapping_add(step as u64))
}

/// Iterates over all slots in the key's probe order.
fn probe_sequence(key: u64) -> impl Iterator<Item = StreamSlot> {
    (0..SLOT_COUNT).map(move |step| probe_slot(key, step))
}
