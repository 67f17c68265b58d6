//! Records when the work of each stream and each event completes.

use crate::abi::Code;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// A stream of a context. Each context also has a default stream, with the handles 0, 1 and 2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// `None` if the stream has no work.
    pub(crate) busy_until: Option<Instant>,
    /// The stream has no work once the context's channel group has done this much; 0 without a
    /// kernel module.
    pub(crate) work: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) context: u64,
    pub(crate) flags: u32,
    /// When its work completes; `None` until the event is recorded.
    pub(crate) completes_at: Option<Instant>,
    /// The work that the channel group must have done, too.
    pub(crate) work: u64,
    /// The stream in which the event was last recorded.
    pub(crate) stream: u64,
}

/// All streams and events of this image. The key of a context's default stream is the context's
/// handle.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: BTreeMap<u64, Event>,
    handle_count: u64,
}

impl Streams {
    pub(crate) fn next_handle(&mut self) -> u64 {
        self.handle_count += 1;
        0x5157_0000_0000 + self.handle_count * 0x10
    }

    /// Removes the streams and events of a context, and returns the streams.
    pub(crate) fn remove_context(&mut self, context: u64) -> BTreeSet<u64> {
        self.events.retain(|_, event| event.context != context);
        let of_context = |_: &u64, stream: &mut Stream| stream.context == context;
        let streams = self.streams.extract_if(.., of_context);
        streams.map(|(handle, _)| handle).collect()
    }

    pub(crate) fn find(&mut self, context: u64, handle: u64) -> Result<&mut Stream, Code> {
        let idle = Stream {
            context,
            flags: 0,
            priority: 0,
            busy_until: None,
            work: 0,
        };
        match handle {
            0..=2 => Ok(self.streams.entry(context).or_insert(idle)),
            _ => self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE),
        }
    }

    /// The work that a context's channel group must have done for all streams.
    pub(crate) fn work(&self, context: u64) -> u64 {
        let streams = self.streams.values();
        let own = streams.filter(|stream| stream.context == context);
        own.map(|stream| stream.work).max().unwrap_or(0)
    }

    pub(crate) fn busy_until(&self, context: u64) -> Option<Instant> {
        self.streams
            .values()
            .filter(|stream| stream.context == context)
            .filter_map(|stream| stream.busy_until)
            .max()
    }
}
