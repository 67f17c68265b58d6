//! Tests random histories of blocks and streams: no memory is released before the work that uses it
//! is done.

use std::time::{Duration, Instant};

use bursar_runtime::driver::{Access, Stream};
use bursar_runtime::{
    Block, BlockRef, DeviceMemoryResource, Exportable, FreeError, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};
use proptest::prelude::*;

use crate::{bytes, context, spin};

const STREAMS: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    /// Keeps a stream busy for a number of milliseconds.
    Spin(usize, u64),
    Allocate(usize),
    /// Prepares and finishes a use of a number of milliseconds.
    Use(usize, usize, u64),
    /// Records a use after its submission.
    Record(usize, usize),
    Free(usize, usize),
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    let (which, stream) = (any::<usize>, || 0..STREAMS);
    prop_oneof![
        2 => (stream(), 1..6_u64).prop_map(|(stream, time)| Step::Spin(stream, time)),
        3 => stream().prop_map(Step::Allocate),
        2 => (which(), stream(), 1..6_u64).prop_map(|(block, stream, time)| Step::Use(block, stream, time)),
        1 => (which(), stream()).prop_map(|(block, stream)| Step::Record(block, stream)),
        3 => (which(), stream()).prop_map(|(block, stream)| Step::Free(block, stream)),
        2 => Just(Step::Reap),
    ]
}

/// Earliest end of each stream's work.
struct StreamDeadlines {
    streams: Vec<Stream>,
    ends: Vec<Instant>,
}

impl StreamDeadlines {
    fn spin(&mut self, stream: usize, milliseconds: u64) {
        let time = Duration::from_millis(milliseconds);
        self.ends[stream] = self.ends[stream].max(Instant::now()) + time;
        spin(&self.streams[stream], time);
    }
}

fn check(memory: &impl DeviceMemoryResource, streams: &[Stream], steps: Vec<Step>) {
    let mut clock = StreamDeadlines {
        streams: streams.to_vec(),
        ends: vec![Instant::now(); STREAMS],
    };
    // Blocks with the end of the last work that uses each.
    let mut live: Vec<(Block, Instant)> = Vec::new();
    let mut gone: Vec<(BlockRef, Instant)> = Vec::new();
    for step in steps {
        match step {
            Step::Spin(stream, time) => clock.spin(stream, time),
            Step::Allocate(stream) => {
                let block = memory.allocate(bytes(4096), &streams[stream], Tag::default());
                live.push((block.unwrap(), clock.ends[stream]));
            }
            Step::Use(..) | Step::Record(..) | Step::Free(..) if live.is_empty() => {}
            Step::Use(which, stream, time) => {
                let place = which % live.len();
                let (block, end) = &mut live[place];
                let used =
                    memory.prepare_block_use(block.as_ref(), &streams[stream], Access::ReadWrite);
                let refused = memory.deallocate(
                    std::mem::replace(block, Block::new(block.as_ref())),
                    &streams[stream],
                );
                assert!(
                    matches!(refused, Err(FreeError::Refused { .. })),
                    "it is in use"
                );
                clock.spin(stream, time);
                memory
                    .finish_block_use(used.unwrap(), &streams[stream])
                    .unwrap();
                *end = clock.ends[stream].max(*end);
            }
            Step::Record(which, stream) => {
                let place = which % live.len();
                let (block, end) = &mut live[place];
                memory
                    .record_block_use(block.as_ref(), &streams[stream], Access::ReadWrite)
                    .unwrap();
                *end = clock.ends[stream].max(*end);
            }
            Step::Free(which, stream) => {
                let (block, end) = live.swap_remove(which % live.len());
                gone.push((block.as_ref(), end.max(clock.ends[stream])));
                memory.deallocate(block, &streams[stream]).unwrap();
            }
            Step::Reap => drop(memory.reap_pending().unwrap()),
        }
        gone.retain(|(block, end)| {
            let retired = memory.is_retired(*block);
            assert!(retired || Instant::now() >= *end, "given back too early");
            retired
        });
        let outstanding = memory.bytes_outstanding();
        assert_eq!(outstanding.live, 4096 * live.len() as u64);
        assert_eq!(outstanding.retired, 4096 * gone.len() as u64);
    }
    for (block, _) in live {
        memory.deallocate(block, &streams[0]).unwrap();
    }
    for stream in streams {
        stream.synchronize().unwrap();
    }
    memory.reap_pending().unwrap();
    assert_eq!(memory.bytes_outstanding().total(), 0);
}

#[test]
fn memory_is_released_only_after_the_work_that_uses_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let streams: Vec<_> = (0..STREAMS).map(|_| context.stream().unwrap()).collect();
        let histories = prop::collection::vec(step(), 0..50);
        proptest!(ProptestConfig::with_cases(64), |(steps in histories)| {
            check(&StreamOrdered::new(&context), &streams, steps.clone());
            check(&Exportable::new(&context).unwrap(), &streams, steps);
        });
    });
}
