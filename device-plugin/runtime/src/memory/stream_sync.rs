//! Which streams work has to wait for, so that what it reads is written and what it overwrites was read.
//!
//! Nothing is recorded in a stream when memory is used there. Only work in *another* stream needs to wait, and the event
//! for that is made then, at the end of what the first stream has to do by that time: a little late, and free for
//! memory that stays in one stream.
#![forbid(unsafe_code)]

use crate::driver::Access;

/// Streams that are remembered without a look at whether their reads are done.
const PRUNE_THRESHOLD: usize = 32;

/// The streams that used some memory last.
#[derive(Debug)]
pub(crate) struct StreamSync<S> {
    /// Where it was last written.
    last_write: S,
    /// Where it was read since: those are behind the write already.
    reads: Vec<S>,
}

impl<S: Clone + PartialEq> StreamSync<S> {
    /// Of memory that was last written in that stream.
    pub(crate) fn new(wrote: S) -> StreamSync<S> {
        StreamSync {
            last_write: wrote,
            reads: Vec::new(),
        }
    }

    /// The streams whose work so far has to be done before the host may use the memory.
    pub(crate) fn streams_before_host(&self, access: Access) -> Vec<S> {
        let reads = self.reads.iter().filter(|_| access == Access::ReadWrite);
        std::iter::once(&self.last_write)
            .chain(reads)
            .cloned()
            .collect()
    }

    /// The streams whose work so far has to be done before work of `stream` may use the memory.
    pub(crate) fn streams_before(&self, stream: &S, access: Access) -> Vec<S> {
        if access == Access::Read && self.reads.contains(stream) {
            return Vec::new();
        }
        let mut others = self.streams_before_host(access);
        others.retain(|other| other != stream);
        others
    }

    /// Work that uses the memory is in a stream now, behind what [`before`](Self::before) said.
    pub(crate) fn record(&mut self, stream: &S, access: Access) {
        match access {
            Access::ReadWrite => *self = StreamSync::new(stream.clone()),
            Access::Read if self.reads.contains(stream) => {}
            Access::Read => self.reads.push(stream.clone()),
        }
    }

    /// Forgets reads that are done, where there are so many that it is worth asking. Who only reads, in ever new streams, would
    /// otherwise be remembered for ever.
    pub(crate) fn prune_reads(&mut self, done: impl Fn(&S) -> bool) {
        if self.reads.len() > PRUNE_THRESHOLD {
            self.reads.retain(|stream| !done(stream));
        }
    }

    /// The stream of the last write.
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
            // Every hundredth is slow.
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
        /// Streams as clocks: each knows how much of every other's work is done before its next work begins.
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
