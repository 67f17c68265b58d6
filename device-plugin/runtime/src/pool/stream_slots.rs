//! Which lane a stream has, and how one stream is put behind others.
//!
//! A lane is found by the stream's key without a lock. A pool has 64; a lane whose stream nobody else holds any more
//! is given to the next one, which is put behind it first: so whatever waits for the new stream waits for the old
//! one's work too. Where all 64 streams live, the next has no lane, and what it frees is waited for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::epoch::{Lane, Order, STREAMS, lanes};
use crate::driver::{Event, Stream};
use crate::error::CudaError;

/// No stream had the lane yet: a search ends here.
const EMPTY: u64 = 0;
/// The lane's stream was taken from it: a search goes on.
const VACANT: u64 = u64::MAX;

/// The streams of a pool.
#[derive(Debug)]
pub(super) struct Lanes {
    /// A stream's key plus 1, at the first place from the key's that was not another's.
    keys: [AtomicU64; STREAMS],
    streams: Mutex<Vec<Option<Stream>>>,
    events: Mutex<Vec<Event>>,
    /// The pool's own.
    keeper: (Stream, Lane),
}

impl Lanes {
    /// With a lane for the pool's own stream.
    pub(super) fn new(keeper: Stream) -> Lanes {
        let key = key(&keeper);
        let lane = place(key, 0);
        let lanes = Lanes {
            keys: [const { AtomicU64::new(EMPTY) }; STREAMS],
            streams: Mutex::new(vec![None; STREAMS]),
            events: Mutex::default(),
            keeper: (keeper.clone(), lane),
        };
        lanes.streams()[lane.number()] = Some(keeper);
        lanes.keys[lane.number()].store(key, Ordering::Release);
        lanes
    }

    /// The pool's own stream.
    pub(super) fn keeper(&self) -> (&Stream, Lane) {
        (&self.keeper.0, self.keeper.1)
    }

    /// A stream's lane; `None` where all are taken.
    #[inline]
    pub(super) fn of(&self, stream: &Stream) -> Result<Option<Lane>, CudaError> {
        match self.find(stream) {
            Some(lane) => Ok(Some(lane)),
            None => self.claim(stream),
        }
    }

    /// The lane that a stream has already.
    #[inline]
    fn find(&self, stream: &Stream) -> Option<Lane> {
        let key = key(stream);
        let first = place(key, 0);
        if self.keys[first.number()].load(Ordering::Acquire) == key {
            return Some(first);
        }
        self.find_further(key)
    }

    #[cold]
    fn find_further(&self, key: u64) -> Option<Lane> {
        for lane in places(key) {
            match self.keys[lane.number()].load(Ordering::Acquire) {
                found if found == key => return Some(lane),
                EMPTY => return None,
                _ => {}
            }
        }
        None
    }

    /// Takes the lane of a stream away, so that the stream can be destroyed by who made it.
    pub(super) fn forget(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut streams = self.streams();
        let Some(lane) = self.find(stream) else {
            return Ok(());
        };
        let (keeper, own) = self.keeper();
        if lane != own {
            self.put_behind(keeper, stream)?;
            streams[lane.number()] = Some(keeper.clone());
            self.keys[lane.number()].store(VACANT, Ordering::Release);
        }
        Ok(())
    }

    /// Puts what will be submitted to a stream behind what is in others now.
    pub(super) fn wait(
        &self,
        order: &Order,
        stream: &Stream,
        lane: Option<Lane>,
        others: u64,
    ) -> Result<(), CudaError> {
        for of in lanes(others) {
            // Held until the event is recorded: once the other is forgotten it may be destroyed.
            let streams = self.streams();
            let Some(other) = &streams[of.number()] else {
                continue;
            };
            let tick = order.tick();
            self.put_behind(stream, other)?;
            if let Some(lane) = lane {
                order.waits(lane, of, tick);
            }
        }
        Ok(())
    }

    #[cold]
    fn claim(&self, stream: &Stream) -> Result<Option<Lane>, CudaError> {
        let key = key(stream);
        let mut streams = self.streams();
        if let Some(lane) = self.find(stream) {
            return Ok(Some(lane));
        }
        let open = |lane: &Lane| {
            matches!(
                self.keys[lane.number()].load(Ordering::Acquire),
                EMPTY | VACANT
            )
        };
        let left = |lane: &Lane| streams[lane.number()].as_ref().is_some_and(Stream::is_last);
        let Some(lane) = places(key).find(open).or_else(|| places(key).find(left)) else {
            return Ok(None);
        };
        if let Some(before) = &streams[lane.number()] {
            self.put_behind(stream, before)?;
        }
        streams[lane.number()] = Some(stream.clone());
        self.keys[lane.number()].store(key, Ordering::Release);
        Ok(Some(lane))
    }

    /// A wait means the event as it is then, so the event can be recorded anew at once.
    fn put_behind(&self, stream: &Stream, other: &Stream) -> Result<(), CudaError> {
        let kept = self.events().pop();
        let event = match kept {
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

/// Where a key looks for its lane at a step.
#[inline]
fn place(key: u64, step: usize) -> Lane {
    Lane::of(key.wrapping_add(step as u64))
}

/// All lanes, in the order in which a key looks for its own.
fn places(key: u64) -> impl Iterator<Item = Lane> {
    (0..STREAMS).map(move |step| place(key, step))
}
