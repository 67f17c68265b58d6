//! Tests physical memory, and that its budget is the one of device memory.

use std::sync::Arc;

use bursar_runtime::adaptor::fault_injection::FaultPlan;
use bursar_runtime::driver::{Driver, Stream};
use bursar_runtime::{
    Budget, BudgetSnapshot, DeviceMemoryResource, Direct, FaultInjection, FreeError, Physical,
    PhysicalBlock, PhysicalMemoryResource, ReleaseError, ResourceError, Statistics, Tag,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};
use proptest::prelude::*;

use crate::{bytes, context};

/// Granularity of physical memory.
const GRANULE: u64 = 2 << 20;

const LIMIT: u64 = 16 * GRANULE;

fn physical() -> Physical {
    Physical::new(&Driver::get().unwrap().device(0).unwrap()).unwrap()
}

#[test]
fn sizes_are_whole_granules() {
    run_in_subprocess(ONE_GPU, |_| {
        let memory = physical();
        assert_eq!(memory.granularity(), GRANULE);
        assert_eq!(memory.round_up(1), Ok(GRANULE));
        assert_eq!(memory.round_up(GRANULE), Ok(GRANULE));
        assert_eq!(memory.round_up(0).unwrap_err().reason(), "ZeroBytes");
        assert_eq!(memory.round_up(u64::MAX).unwrap_err().reason(), "TooLarge");
        let error = memory.create(GRANULE + 1, Tag::default()).unwrap_err();
        assert_eq!(error.reason(), "Cuda");
        let error = memory.create(1 << 40, Tag::default()).unwrap_err();
        assert_eq!(error.reason(), "OutOfMemory");
        assert_eq!(memory.bytes_outstanding(), 0);
    });
}

#[test]
fn physical_block_is_released_by_its_own_resource_only() {
    run_in_subprocess(ONE_GPU, |_| {
        let source = Arc::new(physical());
        let budget = Budget::new(Arc::clone(&source), LIMIT);
        let block = budget.create(GRANULE, Tag::default()).unwrap();
        let ReleaseError { block, reason } = source.release(block).unwrap_err();
        assert_eq!(reason.reason(), "Foreign");
        assert_eq!(source.bytes_outstanding(), GRANULE);
        budget.release(block).unwrap();
        assert_eq!(source.bytes_outstanding(), 0);
        assert_eq!(budget.account().snapshot().used, 0);
    });
}

#[test]
fn failed_release_returns_the_block_which_still_counts() {
    run_in_subprocess(ONE_GPU, |machine| {
        let plan = FaultPlan {
            allocations: [Some(2)].into(),
            frees: [Some(999)].into(),
            ..FaultPlan::default()
        };
        let counted = Statistics::new(FaultInjection::new(physical(), plan));
        let budget = Budget::new(counted, LIMIT);
        let error = budget.create(GRANULE, Tag::default()).unwrap_err();
        assert_eq!(error.reason(), "OutOfMemory");
        let block = budget.create(GRANULE, Tag::default()).unwrap();
        let used = machine.used(0);
        let failed = budget.release(block).unwrap_err();
        assert_eq!(failed.reason.reason(), "Cuda");
        assert_eq!(budget.account().snapshot().used, GRANULE);
        assert_eq!(machine.used(0), used);
        budget.release(failed.block).unwrap();
        assert_eq!(budget.account().snapshot().used, 0);
        assert_eq!(machine.used(0), used - GRANULE);
    });
}

#[derive(Debug, Clone)]
enum Step {
    /// Allocates a number of granules; a code fails the source.
    Allocate(u64, Option<i32>),
    /// Frees a block; the first attempt may fail.
    Free(usize, bool),
    Resize(u64),
}

fn step() -> impl Strategy<Value = Step> {
    // A budget of device memory retries after code 2, because a reap may have made room.
    let code = prop_oneof![4 => Just(None), 1 => prop_oneof![Just(700), Just(999)].prop_map(Some)];
    prop_oneof![
        6 => (1..8_u64, code).prop_map(|(granules, code)| Step::Allocate(granules, code)),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, fails)| Step::Free(which, fails)),
        1 => (0..2 * LIMIT).prop_map(Step::Resize),
    ]
}

/// Budget over a source that fails by a plan.
trait Budgeted {
    type Block;

    fn snapshot(&self) -> BudgetSnapshot;
    fn set_limit(&self, bytes: u64);
    fn set_plan(&self, plan: FaultPlan);
    fn allocate(&self, bytes: u64) -> Result<Self::Block, ResourceError>;
    /// Frees a block; `failed` runs after a first attempt that failed.
    fn free(&self, block: Self::Block, failed: impl FnOnce());
}

struct OfDevice {
    faults: Arc<FaultInjection<Direct>>,
    budget: Budget<Arc<FaultInjection<Direct>>>,
    stream: Stream,
}

struct OfPhysical {
    faults: Arc<FaultInjection<Physical>>,
    budget: Budget<Arc<FaultInjection<Physical>>>,
}

impl Budgeted for OfDevice {
    type Block = bursar_runtime::Block;

    fn snapshot(&self) -> BudgetSnapshot {
        self.budget.account().snapshot()
    }

    fn set_limit(&self, bytes: u64) {
        self.budget.account().set_limit(bytes);
    }

    fn set_plan(&self, plan: FaultPlan) {
        self.faults.set_plan(plan);
    }

    fn allocate(&self, size: u64) -> Result<Self::Block, ResourceError> {
        let layout = bytes(usize::try_from(size).unwrap());
        self.budget.allocate(layout, &self.stream, Tag::default())
    }

    fn free(&self, block: Self::Block, failed: impl FnOnce()) {
        match self.budget.deallocate(block, &self.stream) {
            Ok(()) => {}
            Err(FreeError::Retired { .. }) => {
                failed();
                self.budget.reap_pending().unwrap();
            }
            Err(FreeError::Refused { reason, .. }) => panic!("{reason}"),
        }
    }
}

impl Budgeted for OfPhysical {
    type Block = PhysicalBlock;

    fn snapshot(&self) -> BudgetSnapshot {
        self.budget.account().snapshot()
    }

    fn set_limit(&self, bytes: u64) {
        self.budget.account().set_limit(bytes);
    }

    fn set_plan(&self, plan: FaultPlan) {
        self.faults.set_plan(plan);
    }

    fn allocate(&self, size: u64) -> Result<Self::Block, ResourceError> {
        self.budget.create(size, Tag::default())
    }

    fn free(&self, block: Self::Block, failed: impl FnOnce()) {
        if let Err(ReleaseError { block, .. }) = self.budget.release(block) {
            failed();
            self.budget.release(block).unwrap();
        }
    }
}

/// Runs a history, and returns the budget after each change with the error of each failure.
fn replay<M: Budgeted>(memory: &M, steps: &[Step]) -> Vec<(BudgetSnapshot, Option<ResourceError>)> {
    let (mut live, mut snapshots) = (Vec::new(), Vec::new());
    for step in steps {
        let mut error = None;
        match *step {
            Step::Allocate(granules, code) => {
                memory.set_plan(FaultPlan {
                    allocations: [code].into(),
                    ..FaultPlan::default()
                });
                match memory.allocate(granules * GRANULE) {
                    Ok(block) => live.push(block),
                    Err(failure) => error = Some(failure),
                }
            }
            Step::Free(..) if live.is_empty() => {}
            Step::Free(which, fails) => {
                memory.set_plan(FaultPlan {
                    frees: [fails.then_some(999)].into(),
                    ..FaultPlan::default()
                });
                let block = live.swap_remove(which % live.len());
                memory.free(block, || snapshots.push((memory.snapshot(), None)));
            }
            Step::Resize(to) => memory.set_limit(to),
        }
        snapshots.push((memory.snapshot(), error));
    }
    memory.set_plan(FaultPlan::default());
    for block in live {
        memory.free(block, || panic!("no fault is left"));
    }
    assert_eq!(memory.snapshot().used, 0);
    snapshots
}

#[test]
fn budgets_of_both_interfaces_agree_on_every_history() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let before = machine.used(0);
        proptest!(|(steps in prop::collection::vec(step(), 0..60))| {
            let faults = Arc::new(FaultInjection::new(Direct::new(&context), FaultPlan::default()));
            let budget = Budget::new(Arc::clone(&faults), LIMIT);
            let stream = context.default_stream();
            let device = replay(&OfDevice { faults, budget, stream }, &steps);
            let faults = Arc::new(FaultInjection::new(physical(), FaultPlan::default()));
            let budget = Budget::new(Arc::clone(&faults), LIMIT);
            prop_assert_eq!(device, replay(&OfPhysical { faults, budget }, &steps));
            prop_assert_eq!(machine.used(0), before);
        });
    });
}
