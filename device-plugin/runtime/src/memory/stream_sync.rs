//! Computes which streams an access must wait for: reads after a write, and writes after all
//! accesses.
//!
//! No event is recorded when a stream uses memory. Only an access in *another* stream has to wait.
//! The event for that is recorded at that time, after all work of the first stream so far. The wait
//! is thus a little longer than necessary, and memory that stays in one stream costs nothing.
#![forbid(unsafe_code)]

use crate::driver::Access;

/// Number of readers above which completed ones are pruned.
const PRUNE_THRESHOLD: usize = 32;

/// Streams of the last write and of the reads since.
#[derive(Debug)]
pub(crate) struct StreamSync<S> {
    last_write: S,
    /// Streams of the reads since the last write; each of them already waits for that write.
    reads: Vec<S>,
}

impl<S: Clone + PartialEq> StreamSync<S> {
    pub(crate) fn new(wrote: S) -> StreamSync<S> {
        StreamSync {
            last_write: wrote,
            reads: Vec::new(),
        }
    }

    /// Returns the streams for which the host must wait before an access.
    pub(crate) fn streams_before_host(&self, access: Access) -> Vec<S> {
        let reads = self.reads.iter().filter(|_| access.writes());
        std::iter::once(&self.last_write)
            .chain(reads)
            .cloned()
            .collect()
    }

    /// Returns the streams for which `stream` must wait before an access.
    pub(crate) fn streams_before(&self, stream: &S, access: Access) -> Vec<S> {
        if access == Access::Read && self.reads.contains(stream) {
            return Vec::new();
        }
        let mut others = self.streams_before_host(access);
        others.retain(|other| other != stream);
        others
    }

    /// Records an access that was submitted behind the result of
    /// [`streams_before`](Self::streams_before).
    pub(crate) fn record(&mut self, stream: &S, access: Access) {
        match access {
            Access::Write | Access::ReadWrite => *self = StreamSync::new(stream.clone()),
            Access::Read if self.reads.contains(stream) => {}
            Access::Read => self.reads.push(stream.clone()),
        }
    }

    /// Removes completed reads above the threshold. Memory that ever new streams read would fill
    /// the list otherwise.
    pub(crate) fn prune_reads(&mut self, done: impl Fn(&S) -> bool) {
        if self.reads.len() > PRUNE_THRESHOLD {
            self.reads.retain(|stream| !done(stream));
        }
    }

    /// Returns the streams whose work may still use the memory.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &S> {
        std::iter::once(&self.last_write).chain(&self.reads)
    }

    pub(crate) fn last_write(&self) -> &S {
        &self.last_write
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stream_never_waits_for_itself() {
        let mut order = StreamSync::new(1);
        for access in [Access::Read, Access::ReadWrite, Access::Read] {
            assert!(order.streams_before(&1, access).is_empty());
            order.record(&1, access);
        }
    }

    #[test]
    fn second_read_in_a_stream_waits_for_nothing() {
        let mut order = StreamSync::new(1);
        assert_eq!(order.streams_before(&2, Access::Read), [1]);
        order.record(&2, Access::Read);
        assert!(order.streams_before(&2, Access::Read).is_empty());
    }

    #[test]
    fn write_waits_for_reads_in_other_streams() {
        let mut order = StreamSync::new(1);
        order.record(&2, Access::Read);
        order.record(&3, Access::Read);
        assert_eq!(order.streams_before(&3, Access::ReadWrite), [1, 2]);
    }

    #[test]
    fn completed_reads_are_pruned_above_the_threshold() {
        let mut order = StreamSync::new(0);
        for stream in 1..10_000 {
            order.record(&stream, Access::Read);
            // Every hundredth stream stays busy.
            order.prune_reads(|stream| stream % 100 != 0);
            assert!(
                order.reads.len() <= PRUNE_THRESHOLD + stream / 100 + 1,
                "{stream}"
            );
        }
        let waits = order.streams_before(&0, Access::ReadWrite);
        assert!((1..100).all(|slow| waits.contains(&(slow * 100))));
    }

    #[test]
    fn host_read_waits_for_the_write_and_host_write_for_all() {
        let mut order = StreamSync::new(1);
        order.record(&2, Access::Read);
        assert_eq!(order.streams_before_host(Access::Read), [1]);
        assert_eq!(order.streams_before_host(Access::ReadWrite), [1, 2]);
    }

    const STREAMS: usize = 4;

    proptest! {
        /// Vector clocks: each stream knows how much work of every other stream completes before
        /// its next work.
        #[test]
        fn conflicting_uses_are_always_ordered(uses in prop::collection::vec((0..STREAMS, any::<bool>()), 1..60)) {
            let mut order = StreamSync::new(0);
            let mut clocks = [[0usize; STREAMS]; STREAMS];
            clocks[0][0] = 1;
            let mut past = vec![(0, 1, Access::ReadWrite)];
            for (stream, writes) in uses {
                let access = if writes { Access::ReadWrite } else { Access::Read };
                for other in order.streams_before(&stream, access) {
                    let theirs = clocks[other];
                    for (mine, theirs) in clocks[stream].iter_mut().zip(theirs) {
                        *mine = (*mine).max(theirs);
                    }
                }
                for &(other, number, before) in &past {
                    if access == Access::ReadWrite || before == Access::ReadWrite {
                        prop_assert!(clocks[stream][other] >= number, "{other}'s {number} and {stream}");
                    }
                }
                order.record(&stream, access);
                clocks[stream][stream] += 1;
                past.push((stream, clocks[stream][stream], access));
            }
        }
    }
}
