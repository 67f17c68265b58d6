//! Tests that a budget stays exact whatever its upstream does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use bursar_runtime::adaptor::fault_injection::FaultPlan;
use bursar_runtime::{
    Budget, BudgetSnapshot, DebugGuard, DeviceMemoryResource, Direct, FaultInjection, FreeError,
    Pool, PoolSettings, ResourceError, StreamOrdered, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};
use proptest::prelude::*;

use crate::{MIB, SPIN_TIME, bytes, context, spin};

const LIMIT: u64 = 1 << 20;

#[test]
fn request_is_over_budget_only_when_it_does_not_fit() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (budget, stream) = (
            Budget::new(Direct::new(&context), LIMIT),
            context.default_stream(),
        );
        let half = budget
            .allocate(bytes(MIB / 2), &stream, Tag::default())
            .unwrap();
        let error = budget
            .allocate(bytes(MIB / 2 + 1), &stream, Tag::default())
            .unwrap_err();
        let (requested, used) = (LIMIT / 2 + 1, LIMIT / 2);
        assert_eq!(
            error,
            ResourceError::OverBudget {
                ordinal: 0,
                requested,
                used,
                limit: LIMIT
            }
        );
        let rest = budget
            .allocate(bytes(MIB / 2), &stream, Tag::default())
            .unwrap();
        budget.deallocate(half, &stream).unwrap();
        budget.deallocate(rest, &stream).unwrap();
        assert_eq!(
            budget.budget_snapshot(),
            Some(BudgetSnapshot {
                limit: LIMIT,
                used: 0
            })
        );
    });
}

#[test]
fn block_cannot_bypass_its_budget_when_freed() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let direct = Arc::new(Direct::new(&context));
        let (budget, stream) = (
            Budget::new(Arc::clone(&direct), LIMIT),
            context.default_stream(),
        );
        let block = budget.allocate(bytes(1), &stream, Tag::default()).unwrap();
        let Err(FreeError::Refused { block, reason }) = direct.deallocate(block, &stream) else {
            panic!("it was freed");
        };
        assert_eq!(reason.reason(), "Foreign");
        budget.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn budget_counts_only_its_own_blocks() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (shared, stream) = (
            Arc::new(StreamOrdered::new(&context)),
            context.stream().unwrap(),
        );
        let [first, second] = [(); 2].map(|()| Budget::new(Arc::clone(&shared), LIMIT));
        let blocks =
            [&first, &second].map(|of| of.allocate(bytes(MIB), &stream, Tag::default()).unwrap());
        for (of, block) in [&first, &second].into_iter().zip(blocks) {
            of.deallocate(block, &stream).unwrap();
        }
        // Each budget finds its own blocks, whichever user reaps the shared resource.
        shared.reap_pending().unwrap();
        for of in [&first, &second] {
            assert_eq!(of.reap_pending().unwrap().freed, LIMIT);
            assert_eq!(of.account().snapshot().used, 0);
        }
    });
}

#[test]
fn pending_free_still_counts() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (budget, stream) = (
            Budget::new(StreamOrdered::new(&context), LIMIT),
            context.stream().unwrap(),
        );
        let block = budget
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        spin(&stream, SPIN_TIME);
        budget.deallocate(block, &stream).unwrap();
        assert!(budget.allocate(bytes(1), &stream, Tag::default()).is_err());
        stream.synchronize().unwrap();
        // The budget reaps by itself.
        let block = budget
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        budget.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn released_blocks_stop_counting_without_a_reap() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (budget, stream) = (
            Budget::new(StreamOrdered::new(&context), u64::MAX),
            context.stream().unwrap(),
        );
        for _ in 0..2000 {
            let block = budget
                .allocate(bytes(1024), &stream, Tag::default())
                .unwrap();
            budget.deallocate(block, &stream).unwrap();
            stream.synchronize().unwrap();
        }
        let used = budget.account().snapshot().used;
        assert!(used < LIMIT, "{used}");
    });
}

#[test]
fn failed_allocation_charges_nothing() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (budget, stream) = (
            Budget::new(Direct::new(&context), u64::MAX),
            context.default_stream(),
        );
        let error = budget
            .allocate(bytes(1 << 40), &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error.reason(), "OutOfMemory");
        assert_eq!(budget.account().snapshot().used, 0);
    });
}

#[test]
fn budget_can_be_lowered_below_its_usage() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (budget, stream) = (
            Budget::new(Direct::new(&context), LIMIT),
            context.default_stream(),
        );
        let block = budget
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        budget.account().set_limit(LIMIT / 2);
        assert!(budget.allocate(bytes(1), &stream, Tag::default()).is_err());
        budget.deallocate(block, &stream).unwrap();
        assert!(
            budget
                .allocate(bytes(MIB), &stream, Tag::default())
                .is_err()
        );
        budget.account().set_limit(LIMIT);
        let block = budget
            .allocate(bytes(MIB), &stream, Tag::default())
            .unwrap();
        budget.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn eight_threads_fill_a_budget_to_the_last_byte() {
    const EACH: usize = 4096;
    const BLOCKS: usize = 37;
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let budget = Budget::new(Direct::new(&context), (BLOCKS * EACH) as u64);
        let stream = context.default_stream();
        let (live, most, together) = (AtomicUsize::new(0), AtomicUsize::new(0), Barrier::new(8));
        let short = AtomicUsize::new(0);
        let take = || {
            let block = budget.allocate(bytes(EACH), &stream, Tag::default()).ok()?;
            most.fetch_max(live.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Some(block)
        };
        let free = |block| {
            live.fetch_sub(1, Ordering::SeqCst);
            budget.deallocate(block, &stream).unwrap();
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..64 {
                        together.wait();
                        let own: Vec<_> = std::iter::from_fn(take).collect();
                        together.wait();
                        let full = live.load(Ordering::SeqCst) == BLOCKS;
                        short.fetch_add(usize::from(!full), Ordering::SeqCst);
                        together.wait();
                        own.into_iter().for_each(free);
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), BLOCKS);
        assert_eq!(
            short.into_inner(),
            0,
            "somebody was refused what there was room for"
        );
        assert_eq!(budget.account().snapshot().used, 0);
        assert_eq!(budget.bytes_outstanding().total(), 0);
    });
}

#[derive(Debug, Clone)]
enum Step {
    Allocate(usize),
    Free(usize),
    Resize(u64),
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..LIMIT as usize / 3).prop_map(Step::Allocate),
        4 => any::<usize>().prop_map(Step::Free),
        1 => (0..LIMIT * 2).prop_map(Step::Resize),
        1 => Just(Step::Reap),
    ]
}

/// About one call in five fails.
fn fault_codes() -> impl Strategy<Value = VecDeque<Option<i32>>> {
    let one = prop_oneof![5 => Just(None), 1 => prop_oneof![Just(2), Just(700), Just(999)].prop_map(Some)];
    prop::collection::vec_deque(one, 0..60)
}

/// Asserts that a budget over a failing upstream counts exactly the bytes that are requested and
/// not released.
fn assert_exact(
    resource: impl DeviceMemoryResource,
    stream: &bursar_runtime::driver::Stream,
    steps: Vec<Step>,
) {
    let budget = Budget::new(resource, LIMIT);
    let (mut live, mut limit) = (Vec::new(), LIMIT);
    for step in steps {
        match step {
            Step::Allocate(size) => {
                let before = budget.account().snapshot().used;
                match budget.allocate(bytes(size), stream, Tag::default()) {
                    Ok(block) => {
                        live.push(block);
                        assert!(budget.account().snapshot().used <= limit);
                    }
                    Err(ResourceError::OverBudget {
                        used, requested, ..
                    }) => {
                        assert!(used + requested > limit, "{used} + {requested} of {limit}");
                    }
                    Err(_) => assert!(budget.account().snapshot().used <= before),
                }
            }
            Step::Free(_) if live.is_empty() => {}
            Step::Free(which) => {
                let block = live.swap_remove(which % live.len());
                match budget.deallocate(block, stream) {
                    Ok(()) | Err(FreeError::Retired { .. }) => {}
                    Err(FreeError::Refused { reason, .. }) => panic!("{reason}"),
                }
            }
            Step::Resize(to) => {
                budget.account().set_limit(to);
                limit = to;
            }
            Step::Reap => {
                drop(budget.reap_pending());
                assert_eq!(
                    budget.account().snapshot().used,
                    budget.bytes_outstanding().total()
                );
            }
        }
        // Bytes that the upstream has released since may still count.
        assert!(budget.account().snapshot().used >= budget.bytes_outstanding().total());
        let owned: u64 = live.iter().map(bursar_runtime::Block::bytes).sum();
        assert_eq!(budget.bytes_outstanding().live, owned);
    }
    for block in live {
        drop(budget.deallocate(block, stream));
    }
    // The plans end, so that all bytes return in the end.
    while budget
        .reap_pending()
        .map_or(true, |reaped| reaped.pending > 0)
    {}
    assert_eq!(budget.account().snapshot().used, 0);
}

#[test]
fn budget_never_drifts_when_its_upstream_fails() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let stream = context.stream().unwrap();
        let histories = prop::collection::vec(step(), 0..60);
        proptest!(|(steps in histories, allocations in fault_codes(), frees in fault_codes(), reaps in fault_codes())| {
            let plan = FaultPlan { allocations, frees, reaps };
            assert_exact(FaultInjection::new(Direct::new(&context), plan.clone()), &stream, steps.clone());
            assert_exact(FaultInjection::new(StreamOrdered::new(&context), plan), &stream, steps);
        });
    });
}

#[test]
fn budget_never_drifts_over_a_quarantine_or_a_pool() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let stream = context.default_stream();
        let pool = || Pool::new(Direct::new(&context), &context, PoolSettings::default()).unwrap();
        proptest!(ProptestConfig::with_cases(32), |(steps in prop::collection::vec(step(), 0..40), frees in fault_codes())| {
            let plan = FaultPlan { frees, ..FaultPlan::default() };
            assert_exact(DebugGuard::new(Direct::new(&context), LIMIT / 4), &stream, steps.clone());
            assert_exact(DebugGuard::new(FaultInjection::new(pool(), plan), LIMIT / 4), &stream, steps);
        });
    });
}
