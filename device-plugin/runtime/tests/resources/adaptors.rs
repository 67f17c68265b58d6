//! Tests logging, statistics, the failure callback, fault injection, and all adaptors together.

use std::sync::{Arc, Mutex};

use bursar_runtime::adaptor::fault_injection::FaultPlan;
use bursar_runtime::adaptor::logging::{Action, CsvSink, MemorySink};
use bursar_runtime::adaptor::on_failure::{AllocationFailure, FailureAction};
use bursar_runtime::adaptor::statistics::Counter;
use bursar_runtime::driver::Access;
use bursar_runtime::{
    Block, Budget, DebugGuard, DeviceMemoryResource, Direct, FaultInjection, FreeError, Logging,
    OnFailure, Statistics, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::raw::Raw as _;
use crate::{MIB, bytes, context};

#[test]
fn log_has_a_line_with_a_tag_for_each_call() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let log = Arc::new(MemorySink::default());
        let (logged, stream) = (
            Logging::new(Direct::new(&context), Arc::clone(&log)),
            context.default_stream(),
        );
        let block = logged
            .allocate(bytes(1000), &stream, Tag("weights"))
            .unwrap();
        let address = block.address();
        logged
            .allocate(bytes(0), &stream, Tag("nothing"))
            .unwrap_err();
        logged.deallocate(block, &stream).unwrap();
        let lines: Vec<_> = log
            .records()
            .into_iter()
            .map(|line| (line.action, line.address, line.bytes, line.tag.0))
            .collect();
        let expected = [
            (Action::Allocate, address, 1000, "weights"),
            (Action::AllocateFailure, 0, 0, "nothing"),
            (Action::Free, address, 1000, ""),
        ];
        assert_eq!(lines, expected);
    });
}

/// Checks a log as RMM's `replay` does: columns by name, and each address allocated once before its
/// free.
fn replay(log: &str) -> usize {
    let mut lines = log.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let column = |name: &str| header.iter().position(|label| *label == name).unwrap();
    let [thread, action, pointer, size, stream] =
        ["Thread", "Action", "Pointer", "Size", "Stream"].map(column);
    let (mut live, mut events) = (std::collections::HashMap::new(), 0);
    for line in lines {
        line[thread].parse::<u64>().unwrap();
        let size: u64 = line[size].parse().unwrap();
        assert_eq!(line[stream], "0", "replay takes the default stream only");
        let pointer = match line[pointer] {
            "(nil)" => 0,
            text => u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap(),
        };
        match line[action] {
            "allocate" => assert_eq!(live.insert(pointer, size), None, "{pointer:#x} twice"),
            "free" => assert_eq!(live.remove(&pointer), Some(size)),
            other => assert_eq!(other, "allocate failure"),
        }
        events += 1;
    }
    assert!(live.is_empty());
    events
}

/// Writer whose bytes the test can read.
#[derive(Clone, Debug, Default)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn log_of_eight_threads_can_be_replayed() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let page = SharedBuffer::default();
        let csv = Arc::new(CsvSink::new(page.clone()).unwrap());
        let logged = Logging::new(Direct::new(&context), Arc::clone(&csv));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let stream = context.stream().unwrap();
                    for iteration in 1..=64 {
                        let block = logged
                            .allocate(bytes(iteration * 100), &stream, Tag("a,\"b\""))
                            .unwrap();
                        logged.deallocate(block, &stream).unwrap();
                    }
                });
            }
        });
        csv.flush().unwrap();
        let text = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
        assert_eq!(replay(&text), 8 * 64 * 2);
    });
}

#[test]
fn statistics_count_current_peak_and_total() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let plan = FaultPlan {
            frees: [Some(1)].into(),
            ..FaultPlan::default()
        };
        let counted = Statistics::new(FaultInjection::new(Direct::new(&context), plan));
        let stream = context.default_stream();
        let [first, second] = [100, 50].map(|size| {
            counted
                .allocate(bytes(size), &stream, Tag::default())
                .unwrap()
        });
        counted.deallocate(first, &stream).unwrap_err();
        counted.deallocate(second, &stream).unwrap();
        let third = counted
            .allocate(bytes(10), &stream, Tag::default())
            .unwrap();
        counted
            .allocate(bytes(0), &stream, Tag::default())
            .unwrap_err();
        let counts = counted.counts();
        assert_eq!(
            counts.bytes,
            Counter {
                current: 10,
                peak: 150,
                total: 160
            }
        );
        assert_eq!(
            counts.blocks,
            Counter {
                current: 1,
                peak: 2,
                total: 3
            }
        );
        assert_eq!((counts.failed_allocations, counts.failed_frees), (1, 1));
        counted.deallocate(third, &stream).unwrap();
    });
}

#[test]
fn failure_callback_can_make_room() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let stream = context.default_stream();
        let budget = Arc::new(Budget::new(Direct::new(&context), 1 << 20));
        let cached: Arc<Mutex<Vec<Block>>> = Arc::default();
        let adaptor = OnFailure::new(Arc::clone(&budget), |failure: &AllocationFailure<'_>| {
            assert_eq!(failure.error.reason(), "OverBudget");
            match cached.lock().unwrap().pop() {
                Some(block) => {
                    budget.deallocate(block, &stream).unwrap();
                    FailureAction::Retry
                }
                None => FailureAction::Fail,
            }
        });
        for _ in 0..2 {
            let block = budget
                .allocate(bytes(MIB / 2), &stream, Tag::default())
                .unwrap();
            cached.lock().unwrap().push(block);
        }
        let block = adaptor
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        assert!(adaptor.allocate(bytes(1), &stream, Tag::default()).is_err());
        adaptor.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn failure_callback_is_skipped_for_other_errors() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let plan = FaultPlan {
            allocations: [Some(700)].into(),
            ..FaultPlan::default()
        };
        let faulty = FaultInjection::new(Direct::new(&context), plan);
        let adaptor = OnFailure::new(faulty, |failure: &AllocationFailure<'_>| {
            panic!("{failure:?}")
        });
        let stream = context.default_stream();
        let error = adaptor
            .allocate(bytes(1), &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error.reason(), "Cuda");
    });
}

#[test]
fn injected_free_failure_is_reaped() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let plan = FaultPlan {
            frees: [Some(999)].into(),
            reaps: [Some(999)].into(),
            ..FaultPlan::default()
        };
        let (faulty, stream) = (
            FaultInjection::new(Direct::new(&context), plan),
            context.default_stream(),
        );
        let before = machine.used(0);
        let block = faulty
            .allocate(bytes(2 * MIB), &stream, Tag::default())
            .unwrap();
        let freed = block.as_ref();
        assert!(matches!(
            faulty.deallocate(block, &stream),
            Err(FreeError::Retired { .. })
        ));
        assert_eq!(faulty.bytes_outstanding().retired, 2 << 20);
        assert!(faulty.reap_pending().is_err());
        assert!(faulty.is_retired(freed));
        assert_eq!(faulty.reap_pending().unwrap().freed, 2 << 20);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn adaptors_compose_and_forward_uses() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (alloc_stream, other) = (context.stream().unwrap(), context.stream().unwrap());
        let log = Arc::new(MemorySink::default());
        let source = DebugGuard::new(StreamOrdered::new(&context), 1 << 20);
        let injected = FaultInjection::new(source, FaultPlan::default());
        let budget = Budget::new(Statistics::new(injected), 1 << 22);
        let all = OnFailure::new(
            Logging::new(budget, Arc::clone(&log)),
            |_: &AllocationFailure<'_>| FailureAction::Fail,
        );
        let block = all.allocate(bytes(MIB), &alloc_stream, Tag("all")).unwrap();
        let used = all
            .prepare_block_use(block.as_ref(), &other, Access::ReadWrite)
            .unwrap();
        assert_eq!(used.block, block.as_ref());
        context.fill_async(block.address(), 1, MIB, &other).unwrap();
        all.finish_block_use(used, &other).unwrap();
        all.record_block_use(block.as_ref(), &alloc_stream, Access::ReadWrite)
            .unwrap();
        let freed = block.as_ref();
        all.deallocate(block, &other).unwrap();
        assert_eq!(all.bytes_outstanding().retired, 1 << 20);
        assert_eq!(all.budget_snapshot().unwrap().used, 1 << 20);
        assert!(all.is_retired(freed));
        all.reap_pending().unwrap();
        context.synchronize().unwrap();
        all.reap_pending().unwrap();
        assert_eq!(all.budget_snapshot().unwrap().used, 0);
        assert_eq!(
            all.record_block_use(freed, &alloc_stream, Access::ReadWrite)
                .unwrap_err()
                .reason(),
            "Stale"
        );
        assert_eq!(log.records().len(), 2);
    });
}
