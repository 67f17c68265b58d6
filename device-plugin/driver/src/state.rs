//! Says whether the device memory of this process image is still valid, at the cost of one load.
//!
//! ```text
//!   Ok --drain--> Draining --+
//!    |                |      | shut_down
//!    +----poison------+      |
//!    v                v      v
//!   Poisoned(code) ------> ShutDown   (a state never returns to Ok)
//! ```
//!
//! A kernel's fault poisons the whole process image for good, whichever device it ran on (F1 in
//! `docs/internals/facts.md`). One [`ErrorMonitor`] therefore observes every error code that the
//! driver returns to this crate, and each runtime has a [`DeviceState`] from that monitor. Memory
//! stays bound to the state under which it was allocated, so that wrapping old memory cannot make
//! it valid again.
//!
//! In a container the node's agent may know of a fault or a drain first. The agent writes a fence
//! into the page that it shares with the shim, and a state reads that fence on each check.
//!
//! * [`subscription`] tells threads and tasks of a change, so that they need not poll.
//! * [`poller`] calls values regularly while they exist.
//! * `waiters` wakes them.
#![forbid(unsafe_code)]

pub mod poller;
pub mod subscription;
mod waiters;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use bursar_protocol::error_class::ErrorClass;
use bursar_protocol::fence::{Fence, FenceFn, ProcessGenerationFn};

use waiters::Waiters;

/// Reason for which memory cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StaleReason {
    /// A sticky error poisoned the process image; only a new image can use the GPU.
    #[error(
        "failed to use the GPU: CUDA error {0} poisoned this process image; restart the process"
    )]
    Poisoned(i32),
    /// The device is being drained: its memory can only be freed.
    #[error(
        "failed to use the GPU: the device is being drained; free its memory and allocate again later"
    )]
    Draining,
    /// The runtime of the memory was shut down.
    #[error("failed to use the memory: its runtime was shut down; allocate from a new runtime")]
    ShutDown,
}

impl StaleReason {
    /// Returns the class of the failure; memory never becomes valid again.
    pub fn class(&self) -> ErrorClass {
        match self {
            StaleReason::Poisoned(code) => ErrorClass::of(*code),
            StaleReason::Draining | StaleReason::ShutDown => ErrorClass::Gone,
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }

    /// Encodes the reason in a word: zero means valid, and a later stage is larger.
    fn encode(self) -> u64 {
        match self {
            StaleReason::Draining => 1 << 32,
            StaleReason::Poisoned(code) => 2 << 32 | u64::from(code.cast_unsigned()),
            StaleReason::ShutDown => 3 << 32,
        }
    }

    fn stage(word: u64) -> u64 {
        word >> 32
    }

    /// Returns the number of the stage; a later stage is larger, and zero means valid.
    fn stage_number(self) -> u64 {
        StaleReason::stage(self.encode())
    }

    /// Decodes a word other than zero.
    #[cold]
    fn decode(word: u64) -> StaleReason {
        match StaleReason::stage(word) {
            1 => StaleReason::Draining,
            #[expect(clippy::cast_possible_truncation, reason = "the code is the low half")]
            2 => StaleReason::Poisoned((word as u32).cast_signed()),
            _ => StaleReason::ShutDown,
        }
    }
}

impl From<Fence> for StaleReason {
    fn from(fence: Fence) -> StaleReason {
        match fence {
            Fence::Drained => StaleReason::Draining,
            Fence::Poisoned(0) => StaleReason::Poisoned(CUDA_ERROR_UNKNOWN),
            Fence::Poisoned(code) => StaleReason::Poisoned(code),
        }
    }
}

/// Stands for a fault whose code only the kernel log could tell.
const CUDA_ERROR_UNKNOWN: i32 = 999;

/// Number of a device state. Memory of one generation becomes stale together, and memory of a stale
/// generation never becomes valid again.
///
/// Generations are ordered by age. Text form: `3.1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceGeneration {
    /// Process generation: the agent's number of this process image in its container, from 1. Zero
    /// outside of a container with the shim.
    pub process: u64,
    /// Number of the state in this process image, from 1. A runtime that starts again gets the next
    /// number.
    pub state: u64,
}

impl fmt::Display for DeviceGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.process, self.state)
    }
}

/// State of a device in this process image, shared by all memory that was allocated under it.
#[derive(Debug, Default)]
pub struct DeviceState {
    word: AtomicU64,
    generation: DeviceGeneration,
    waiters: Waiters,
    /// Reads the agent's fence of this image; `None` outside a container with the shim.
    fence: Option<FenceFn>,
}

impl DeviceState {
    /// Checks that memory of this state can be used: one load, and a second one if the agent can
    /// fence this image.
    ///
    /// # Errors
    /// The reason for which the memory is stale.
    #[inline]
    pub fn check(&self) -> Result<(), StaleReason> {
        match (self.word.load(Ordering::Acquire), self.fence) {
            (0, None) => Ok(()),
            (0, Some(ask)) => match ask() {
                0 => Ok(()),
                word => self.apply_fence(word),
            },
            (word, _) => Err(StaleReason::decode(word)),
        }
    }

    /// Records the agent's fence, because a fence is final.
    #[cold]
    fn apply_fence(&self, word: u64) -> Result<(), StaleReason> {
        let reason = Fence::of(word).map(StaleReason::from);
        reason
            .inspect(|reason| self.advance(*reason))
            .map_or(Ok(()), Err)
    }

    /// Returns the number of this state.
    pub fn generation(&self) -> DeviceGeneration {
        self.generation
    }

    /// Returns the reason if the state is stale at a later stage than `stage`, without a look at
    /// the agent's fence.
    fn later_than(&self, stage: u64) -> Option<StaleReason> {
        let word = self.word.load(Ordering::Acquire);
        (StaleReason::stage(word) > stage).then(|| StaleReason::decode(word))
    }

    /// Refuses new work.
    pub fn drain(&self) {
        self.advance(StaleReason::Draining);
    }

    /// Marks the memory of this state as stale.
    pub fn shut_down(&self) {
        self.advance(StaleReason::ShutDown);
    }

    /// Advances to a later stage. Of two concurrent changes to one stage the first keeps its code.
    fn advance(&self, to: StaleReason) {
        let later = |word| {
            (StaleReason::stage(word) < StaleReason::stage(to.encode())).then(|| to.encode())
        };
        // An error means that the state has reached that stage or a later one.
        let changed = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
        if changed.is_ok() {
            self.waiters.wake_all();
        }
    }
}

/// Observes every error code of the driver in a process image and marks all device states.
#[derive(Debug)]
pub struct ErrorMonitor {
    watched: Mutex<MonitorState>,
    fence: OnceLock<FenceFn>,
    process: OnceLock<ProcessGenerationFn>,
}

#[derive(Debug)]
struct MonitorState {
    /// Code of the first error that poisoned the image.
    poison: Option<i32>,
    /// Number of states so far.
    created: u64,
    states: Vec<Weak<DeviceState>>,
}

static MONITOR: ErrorMonitor = ErrorMonitor::new();

impl ErrorMonitor {
    /// Creates the monitor of an image without errors.
    pub const fn new() -> ErrorMonitor {
        ErrorMonitor {
            watched: Mutex::new(MonitorState {
                poison: None,
                created: 0,
                states: Vec::new(),
            }),
            fence: OnceLock::new(),
            process: OnceLock::new(),
        }
    }

    /// Sets the function by which states created from now on read the agent's fence.
    pub fn set_fence_fn(&self, fence: FenceFn) {
        // A second caller would set the same function.
        let _ = self.fence.set(fence);
    }

    /// Sets the function by which states created from now on get the agent's process generation.
    pub fn set_process_generation_fn(&self, generation: ProcessGenerationFn) {
        // A second caller would set the same function.
        let _ = self.process.set(generation);
    }

    /// Returns this process image's monitor, to which every driver call of this crate reports.
    pub fn global() -> &'static ErrorMonitor {
        &MONITOR
    }

    /// Creates a state for a device. In a poisoned image the state is poisoned from the start.
    pub fn new_state(&self) -> Arc<DeviceState> {
        let process = self.process.get().map_or(0, |generation| generation());
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.created += 1;
        let state = Arc::new(DeviceState {
            fence: self.fence.get().copied(),
            generation: DeviceGeneration {
                process,
                state: watched.created,
            },
            ..DeviceState::default()
        });
        if let Some(code) = watched.poison {
            state.advance(StaleReason::Poisoned(code));
        }
        watched.states.retain(|state| state.strong_count() > 0);
        watched.states.push(Arc::downgrade(&state));
        state
    }

    /// Returns the code that poisoned the image.
    pub fn poison(&self) -> Option<i32> {
        self.watched
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .poison
    }

    /// Observes the code of a failed call.
    ///
    /// An unknown code counts as sticky if the driver returns it, or a known sticky code, for a
    /// probe as well. After a sticky error every call fails.
    #[cold]
    pub fn observe(&self, code: i32, ask_again: impl FnOnce() -> i32) {
        match ErrorClass::of(code) {
            class if class.poisons() => self.mark_poisoned(code),
            ErrorClass::Unknown => {
                let again = ask_again();
                if ErrorClass::of(again).poisons() || again == code {
                    self.mark_poisoned(again);
                }
            }
            _ => {}
        }
    }

    fn mark_poisoned(&self, code: i32) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let code = *watched.poison.get_or_insert(code);
        let states: Vec<_> = watched.states.iter().filter_map(Weak::upgrade).collect();
        // A woken task may create a state.
        drop(watched);
        for state in states {
            state.advance(StaleReason::Poisoned(code));
        }
    }
}

impl Default for ErrorMonitor {
    fn default() -> ErrorMonitor {
        ErrorMonitor::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn silent() -> i32 {
        unreachable!("a known code is not asked for again")
    }

    #[test]
    fn state_is_ok_when_new() {
        assert_eq!(ErrorMonitor::new().new_state().check(), Ok(()));
    }

    #[test]
    fn sticky_code_poisons_every_state_with_the_first_code() {
        let image = ErrorMonitor::new();
        let (one, other) = (image.new_state(), image.new_state());
        image.observe(700, silent);
        image.observe(719, silent);
        assert_eq!(one.check(), Err(StaleReason::Poisoned(700)));
        assert_eq!(other.check(), Err(StaleReason::Poisoned(700)));
        assert_eq!(image.poison(), Some(700));
    }

    #[test]
    fn agent_fence_makes_a_state_stale_for_good() {
        static FENCE: AtomicU64 = AtomicU64::new(0);
        extern "C" fn fence() -> u64 {
            FENCE.load(Ordering::Relaxed)
        }
        let image = ErrorMonitor::new();
        let before = image.new_state();
        image.set_fence_fn(fence);
        let state = image.new_state();
        assert_eq!(state.check(), Ok(()));
        FENCE.store(Fence::Drained.word(), Ordering::Relaxed);
        assert_eq!(state.check(), Err(StaleReason::Draining));
        FENCE.store(Fence::Poisoned(0).word(), Ordering::Relaxed);
        assert_eq!(
            image.new_state().check(),
            Err(StaleReason::Poisoned(CUDA_ERROR_UNKNOWN))
        );
        FENCE.store(0, Ordering::Relaxed);
        assert_eq!(state.check(), Err(StaleReason::Draining));
        assert_eq!(
            (before.check(), image.new_state().check()),
            (Ok(()), Ok(()))
        );
    }

    #[test]
    fn state_is_poisoned_when_created_after_the_poison() {
        let image = ErrorMonitor::new();
        image.observe(719, silent);
        assert_eq!(image.new_state().check(), Err(StaleReason::Poisoned(719)));
    }

    #[test]
    fn monitor_does_not_affect_another_monitor() {
        let (image, other) = (ErrorMonitor::new(), ErrorMonitor::new());
        let state = other.new_state();
        image.observe(700, silent);
        assert_eq!(state.check(), Ok(()));
    }

    #[test]
    fn generations_grow_with_each_state_and_process_image() {
        extern "C" fn third() -> u64 {
            3
        }
        let image = ErrorMonitor::new();
        let [outside, next] = [(); 2].map(|()| image.new_state().generation());
        image.set_process_generation_fn(third);
        let inside = image.new_state().generation();
        assert!(outside < next && next < inside);
        assert_eq!(format!("{outside} {next} {inside}"), "0.1 0.2 3.3");
    }

    #[test]
    fn harmless_codes_poison_nothing() {
        let image = ErrorMonitor::new();
        for code in [1, 2, 4, 201, 400, 600, 801] {
            image.observe(code, silent);
        }
        assert_eq!(image.poison(), None);
    }

    #[test]
    fn unknown_code_poisons_when_a_probe_repeats_it() {
        for (again, poison) in [
            (5000, Some(5000)),
            (700, Some(700)),
            (0, None),
            (600, None),
            (5001, None),
        ] {
            let image = ErrorMonitor::new();
            image.observe(5000, || again);
            assert_eq!(image.poison(), poison, "then {again}");
        }
    }

    #[test]
    fn monitor_forgets_dropped_states() {
        let image = ErrorMonitor::new();
        for _ in 0..100 {
            drop(image.new_state());
        }
        let _last = image.new_state();
        let watched = image.watched.lock().expect("nobody panicked");
        assert_eq!(watched.states.len(), 1);
    }

    proptest! {
        #[test]
        fn state_only_advances_and_keeps_its_first_code(steps in prop::collection::vec(0..4u8, 0..12)) {
            let image = ErrorMonitor::new();
            let state = image.new_state();
            let (mut stage, mut code) = (0, None);
            for (place, step) in steps.into_iter().enumerate() {
                let number = 714 + i32::try_from(place % 6).expect("small");
                let to = match step {
                    0 => { state.drain(); 1 }
                    1 | 2 => { image.observe(number, silent); code = code.or(Some(number)); 2 }
                    _ => { state.shut_down(); 3 }
                };
                stage = stage.max(to);
                let expected = match stage {
                    0 => Ok(()),
                    1 => Err(StaleReason::Draining),
                    2 => Err(StaleReason::Poisoned(code.expect("it was poisoned"))),
                    _ => Err(StaleReason::ShutDown),
                };
                prop_assert_eq!(state.check(), expected);
            }
        }
    }
}
