//! Fails calls according to a plan, for tests of the adaptors above.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::{CudaError, ResourceError};
use crate::resource::physical::{PhysicalBlock, PhysicalMemoryResource, ReleaseError};
use crate::resource::{
    Block, BlockRef, DeviceMemoryResource, FreeError, Outstanding, Reaped, Tag, check_origin,
};

/// Outcome of the next calls: `None` succeeds, a code fails with that `CUresult`. All calls after
/// the last entry succeed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Outcomes of allocations.
    pub allocations: VecDeque<Option<i32>>,
    /// Outcomes of frees. A block whose free fails is retired until a reap frees it; a physical
    /// block returns to its owner.
    pub frees: VecDeque<Option<i32>>,
    /// Outcomes of frees that a reap retries.
    pub reaps: VecDeque<Option<i32>>,
}

#[derive(Debug)]
struct State {
    plan: FaultPlan,
    /// Blocks whose free failed, as the upstream knows them, with the stream of the free.
    retired: Vec<(Block, Stream)>,
}

/// Injected failures over an upstream resource.
#[derive(Debug)]
pub struct FaultInjection<R> {
    upstream: Upstream<R>,
    state: Mutex<State>,
}

fn inject(call: &'static str, code: Option<Option<i32>>) -> Result<(), CudaError> {
    match code.flatten() {
        Some(code) => Err(CudaError { call, code }),
        None => Ok(()),
    }
}

impl<R> FaultInjection<R> {
    /// Injects failures by a plan.
    pub fn new(resource: R, plan: FaultPlan) -> Self {
        FaultInjection {
            upstream: Upstream::new(resource),
            state: Mutex::new(State {
                plan,
                retired: Vec::new(),
            }),
        }
    }

    /// Replaces the plan.
    pub fn set_plan(&self, plan: FaultPlan) {
        self.lock().plan = plan;
    }

    fn inject_allocation(&self, ordinal: u32, bytes: u64) -> Result<(), ResourceError> {
        let next = self.lock().plan.allocations.pop_front();
        inject("injected allocation", next)
            .map_err(|error| ResourceError::from_alloc_failure(ordinal, bytes, error))
    }

    fn inject_free(&self) -> Result<(), CudaError> {
        let next = self.lock().plan.frees.pop_front();
        inject("injected free", next)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for FaultInjection<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.inject_allocation(self.ordinal(), layout.size() as u64)?;
        self.upstream.allocate(layout, stream, tag)
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_origin(self.upstream.origin, block)?;
        match self.inject_free() {
            Ok(()) => self.upstream.deallocate(block, stream),
            Err(source) => {
                let bytes = block.bytes();
                self.lock().retired.push((block, stream.clone()));
                Err(FreeError::Retired { bytes, source })
            }
        }
    }

    fn bytes_outstanding(&self) -> Outstanding {
        let state = self.lock();
        let own: u64 = state.retired.iter().map(|(block, _)| block.bytes()).sum();
        let under = self.upstream.resource.bytes_outstanding();
        Outstanding {
            live: under.live.saturating_sub(own),
            retired: under.retired + own,
        }
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let mut state = self.lock();
        let (mut freed, mut result, mut remaining) = (0, Ok(()), Vec::new());
        for (block, stream) in std::mem::take(&mut state.retired) {
            let bytes = block.bytes();
            let next = state.plan.reaps.pop_front();
            let outcome = inject("injected reap", next).map_err(ResourceError::from);
            match outcome {
                Err(error) => {
                    result = Err(error);
                    remaining.push((block, stream));
                }
                Ok(()) => match self.upstream.deallocate(block, &stream) {
                    Ok(()) => freed += bytes,
                    Err(FreeError::Retired { source, .. }) => result = Err(source.into()),
                    Err(FreeError::Refused { block, reason }) => {
                        result = Err(reason);
                        remaining.push((block, stream));
                    }
                },
            }
        }
        state.retired = remaining;
        drop(state);
        let under = self.upstream.resource.reap_pending()?;
        result?;
        Ok(Reaped {
            freed: freed + under.freed,
            pending: self.bytes_outstanding().retired,
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        let own = self
            .lock()
            .retired
            .iter()
            .any(|(own, _)| own.as_ref() == block);
        own || self
            .upstream
            .resource
            .is_retired(self.upstream.translate(block))
    }

    fn kind(&self) -> &'static str {
        "fault-injection"
    }

    forward!(identity, budget_snapshot, uses);
}

impl<R: PhysicalMemoryResource> PhysicalMemoryResource for FaultInjection<R> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        self.inject_allocation(self.ordinal(), bytes)?;
        self.upstream.create(bytes, tag)
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        match self.inject_free() {
            Ok(()) => self.upstream.release(block),
            Err(error) => Err(ReleaseError {
                block,
                reason: error.into(),
            }),
        }
    }

    fn kind(&self) -> &'static str {
        "fault-injection"
    }

    forward!(physical_identity, budget_snapshot);
}
