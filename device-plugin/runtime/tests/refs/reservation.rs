//! Tests reservations in a budget.

use std::sync::Arc;

use bursar_runtime::adaptor::budget::Reservation;
use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::{
    Budget, BudgetSnapshot, DeviceMemoryResource as _, DeviceRuntime, Direct, ResourceError, Tag,
    TrackedSlice,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{fault, runtime};

const LIMIT: u64 = 1000;

fn budget(runtime: &DeviceRuntime) -> Arc<Budget<Direct>> {
    Arc::new(Budget::new(Direct::new(runtime.context()), LIMIT))
}

fn used(budget: &Budget<Direct>) -> u64 {
    budget.account().snapshot().used
}

/// Returns a runtime that allocates from a reservation.
fn runtime_over(runtime: &DeviceRuntime, reservation: &Arc<Reservation<Direct>>) -> DeviceRuntime {
    runtime.with_resource(|_| Arc::clone(reservation))
}

fn bytes(runtime: &DeviceRuntime, len: usize) -> Result<TrackedSlice<u8>, MemoryError> {
    let stream = runtime.context().default_stream();
    TrackedSlice::allocate(runtime, len, &stream, Tag::default())
}

#[test]
fn reservation_counts_at_once_and_returns_its_rest() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let budget = budget(&runtime);
        let reservation = Arc::new(budget.reserve(600).unwrap());
        assert_eq!(used(&budget), 600);
        assert!(budget.reserve(401).is_err(), "there are 400 left");
        let reserved = runtime_over(&runtime, &reservation);
        let slice = bytes(&reserved, 500).unwrap();
        assert_eq!(used(&budget), 600);
        let left = BudgetSnapshot {
            limit: 600,
            used: 500,
        };
        assert_eq!(reservation.budget_snapshot(), Some(left));
        let over = ResourceError::OverBudget {
            ordinal: 0,
            requested: 101,
            used: 500,
            limit: 600,
        };
        assert_eq!(bytes(&reserved, 101).unwrap_err(), over.into());
        drop((reserved, reservation));
        assert_eq!(used(&budget), 600, "the slice keeps it alive");
        drop(slice);
        assert_eq!(used(&budget), 0);
    });
}

#[test]
fn reserved_bytes_are_exclusive_and_freed_bytes_shared() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let budget = budget(&runtime);
        let everybodys = runtime.with_resource(|_| Arc::clone(&budget));
        let reservation = Arc::new(budget.reserve(LIMIT).unwrap());
        bytes(&everybodys, 1).unwrap_err();
        let slice = bytes(&runtime_over(&runtime, &reservation), 1000).unwrap();
        drop(slice);
        assert_eq!(used(&budget), 0);
        bytes(&runtime_over(&runtime, &reservation), 1).unwrap_err();
        bytes(&everybodys, 1000).unwrap();
    });
}

#[test]
fn reservation_stays_exact_when_the_driver_fails() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let budget = budget(&runtime);
        let reservation = Arc::new(budget.reserve(600).unwrap());
        let slice = bytes(&runtime_over(&runtime, &reservation), 100).unwrap();
        fault(runtime.context());
        let stream = runtime.context().default_stream();
        let layout = std::alloc::Layout::new::<[u8; 50]>();
        reservation
            .allocate(layout, &stream, Tag::default())
            .unwrap_err();
        let left = BudgetSnapshot {
            limit: 600,
            used: 100,
        };
        assert_eq!(reservation.budget_snapshot(), Some(left));
        drop((slice, reservation));
        assert_eq!(used(&budget), 100, "the driver did not free it");
    });
}

#[test]
fn eight_threads_use_a_reservation_to_the_last_byte() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let budget = budget(&runtime);
        let reservation = Arc::new(budget.reserve(512).unwrap());
        let kept: Vec<TrackedSlice<u8>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let reserved = runtime_over(&runtime, &reservation);
                        (0..100)
                            .filter_map(|_| bytes(&reserved, 1).ok())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(kept.len(), 512);
        assert_eq!(used(&budget), 512);
        drop((kept, reservation));
        assert_eq!(used(&budget), 0);
    });
}
