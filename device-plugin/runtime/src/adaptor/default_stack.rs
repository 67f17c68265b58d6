//! Composes the default resource of a runtime in one layer: a pool with a budget, the check of the
//! state, and a log.
//!
//! A layer of its own for each would cost several nanoseconds a call. Here an allocation costs the
//! pool's time, one load for the state, and one load for the log while that is off.
//!
//! The budget is the smaller of the program's own limit and the quota. In a container with the shim
//! the quota follows the agent. A raised quota counts at the next allocation that would fail, and a
//! lowered quota within [`QUOTA_INTERVAL`].
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::adaptor::logging::{Action, LogRecord, LogSwitch, Sink as _};
use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::{Context, Stream};
use crate::error::ResourceError;
use crate::pool::{Pool, PoolSettings, PoolStatistics};
use crate::resource::{Block, BudgetSnapshot, DeviceMemoryResource, FreeError, Tag, check_origin};
use crate::source::direct::Direct;
use crate::state::DeviceState;
use crate::state::poller::{Polled, Poller};

/// Longest time after which a lowered quota counts.
pub const QUOTA_INTERVAL: Duration = Duration::from_secs(1);

static QUOTA_POLLER: Poller = Poller::new("bursar-quota", QUOTA_INTERVAL);

/// Function that returns the quota in bytes; `None` if it cannot tell, so that the last answer
/// stays in force.
pub type QuotaFn = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// Pool over `cuMemAlloc` with a budget, a state and a log.
pub struct DefaultStack {
    upstream: Upstream<Pool<Direct>>,
    state: Arc<DeviceState>,
    log: LogSwitch,
    quota: QuotaFn,
    /// The program's own limit.
    own_limit: AtomicU64,
    /// Held while the pool's limit changes.
    limit: Mutex<u64>,
}

impl fmt::Debug for DefaultStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DefaultStack")
            .field("upstream", &self.upstream)
            .field("state", &self.state)
            .field("log", &self.log)
            .finish_non_exhaustive()
    }
}

impl DefaultStack {
    /// Composes the stack of a device, with `quota` as the budget.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn new(
        context: &Context,
        state: Arc<DeviceState>,
        quota: QuotaFn,
    ) -> Result<DefaultStack, ResourceError> {
        let limit = quota().unwrap_or(u64::MAX);
        let settings = PoolSettings {
            limit,
            ..PoolSettings::default()
        };
        Ok(DefaultStack {
            upstream: Upstream::new(Pool::new(Direct::new(context), context, settings)?),
            state,
            log: LogSwitch::default(),
            quota,
            own_limit: AtomicU64::new(u64::MAX),
            limit: Mutex::new(limit),
        })
    }

    /// Composes the stack of a device with the container's quota as the budget; without a container
    /// the quota is the device's memory.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn with_container_quota(
        context: &Context,
        state: Arc<DeviceState>,
    ) -> Result<Arc<DefaultStack>, ResourceError> {
        let device = *context.device();
        let quota: QuotaFn = Arc::new(move || device.quota().ok());
        let stack = Arc::new(DefaultStack::new(context, state, quota)?);
        if device.driver().quota_follows_agent() {
            stack.follow_quota();
        }
        Ok(stack)
    }

    /// Reads the quota every [`QUOTA_INTERVAL`] in a thread, as long as the stack lives.
    pub fn follow_quota(self: &Arc<Self>) {
        let polled: Arc<dyn Polled> = Arc::clone(self) as _;
        QUOTA_POLLER.add(Arc::downgrade(&polled));
    }

    /// Sets the program's own limit of live bytes; `None` leaves the quota alone in force.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.own_limit
            .store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.apply_quota();
    }

    /// Returns the limit and the requested bytes of live blocks.
    pub fn budget(&self) -> BudgetSnapshot {
        self.upstream
            .resource
            .budget_snapshot()
            .unwrap_or(BudgetSnapshot {
                limit: u64::MAX,
                used: self.upstream.resource.bytes_outstanding().live,
            })
    }

    /// Returns the pool's statistics.
    pub fn statistics(&self) -> PoolStatistics {
        self.upstream.resource.statistics()
    }

    /// Returns the log.
    pub fn log(&self) -> &LogSwitch {
        &self.log
    }

    /// Reads the quota, changes the pool's limit if the budget has changed, and returns the limit.
    fn apply_quota(&self) -> u64 {
        let mut limit = self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.own_limit.load(Ordering::Relaxed);
        let wanted = match (self.quota)() {
            Some(quota) => quota.min(own),
            None => own.min(*limit),
        };
        let before = std::mem::replace(&mut *limit, wanted);
        if wanted != before {
            self.upstream.resource.set_limit(wanted);
        }
        wanted
    }

    /// Tries again if the budget was the reason and has grown since, whichever thread noticed that.
    #[cold]
    fn retry_with_quota(
        &self,
        error: ResourceError,
        layout: Layout,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Block, ResourceError> {
        match error {
            ResourceError::OverBudget { limit, .. } if self.apply_quota() > limit => {
                self.upstream.allocate(layout, stream, tag)
            }
            error => Err(error),
        }
    }

    #[cold]
    fn write_log(&self, action: Action, address: u64, bytes: u64, stream: &Stream, tag: Tag) {
        self.log
            .write(LogRecord::now(action, address, bytes, stream.key(), tag));
    }
}

impl Polled for DefaultStack {
    fn poll(&self) {
        self.apply_quota();
    }
}

impl DeviceMemoryResource for DefaultStack {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        self.state.check()?;
        let result = self
            .upstream
            .allocate(layout, stream, tag)
            .or_else(|error| self.retry_with_quota(error, layout, stream, tag));
        if self.log.is_on() {
            let (action, address) = Action::of_allocation(result.as_ref().map(Block::address));
            self.write_log(action, address, layout.size() as u64, stream, tag);
        }
        result
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        if self.log.is_on() {
            let block = check_origin(self.upstream.origin, block)?;
            let (address, bytes) = (block.address(), block.bytes());
            self.write_log(Action::Free, address, bytes, stream, Tag::default());
            return self.upstream.deallocate(block, stream);
        }
        self.upstream.deallocate(block, stream)
    }

    fn kind(&self) -> &'static str {
        "default"
    }

    forward!(
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}
