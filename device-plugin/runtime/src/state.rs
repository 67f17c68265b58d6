//! Whether what a device holds for this process image is still there: one word, asked with one load.
//!
//! ```text
//!   Ok --drain--> Draining --+
//!    |                |      | shut_down
//!    +----poison------+      |
//!    v                v      v
//!   Poisoned(code) ------> ShutDown          (never back: what comes next is another state, or another image)
//! ```
//!
//! A fault of a kernel poisons the process image, whichever device it ran on, and for good (design F1). So there
//! is one [`Supervisor`] for the image, which sees every code that the driver answers in this crate, and each
//! runtime of a device has a [`DeviceState`] from it. What was allocated under a state stays bound to that
//! one: a handle cannot become fresh again by being wrapped after the fact.
//!
//! In a container the agent may know first: of a fault by the kernel's log, of a drain always. It says so in the page that
//! it shares with the shim, which answers for it. Nobody is told: a state asks when it is asked.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use bursar_protocol::fence::{Ask, Fence};

use crate::error::ErrorClass;

/// Why memory cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StaleReason {
    /// The process image's contexts are poisoned: only a new image can go on.
    #[error(
        "the process's CUDA contexts are poisoned (error {0}); end the process: its next image starts clean"
    )]
    Poisoned(i32),
    /// The device is being given up: nothing new starts, and what is there can only be freed.
    #[error("the device is being drained; free what is left and start again later")]
    Draining,
    /// The runtime that it was allocated from has ended.
    #[error("the runtime that the memory came from was shut down; allocate it anew")]
    ShutDown,
}

impl StaleReason {
    /// The word that says so: what is asked most is zero, a later stage is larger.
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

    /// What a word other than zero says.
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

/// `CUDA_ERROR_UNKNOWN`: a fault that only the kernel's log told of.
const CUDA_ERROR_UNKNOWN: i32 = 999;

/// A device's state in this process image, shared by all that was allocated under it.
#[derive(Debug, Default)]
pub struct DeviceState {
    word: AtomicU64,
    /// Asks what the node's agent says of this image; none outside of its containers.
    fence: Option<Ask>,
}

impl DeviceState {
    /// Whether memory of this state can be used: one load, and where an agent may fence this image, one of what it said.
    ///
    /// # Errors
    /// Why not.
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

    /// The agent does nothing more for this image: that stays so.
    #[cold]
    fn apply_fence(&self, word: u64) -> Result<(), StaleReason> {
        let reason = Fence::of(word).map(StaleReason::from);
        reason
            .inspect(|reason| self.advance(*reason))
            .map_or(Ok(()), Err)
    }

    /// Lets nothing new start.
    pub fn drain(&self) {
        self.advance(StaleReason::Draining);
    }

    /// Ends it.
    pub fn shut_down(&self) {
        self.advance(StaleReason::ShutDown);
    }

    /// Goes to a later stage; of two at once the first stays, with its code.
    fn advance(&self, to: StaleReason) {
        let later = |word| {
            (StaleReason::stage(word) < StaleReason::stage(to.encode())).then(|| to.encode())
        };
        // An error says that it is there already, or further.
        let _ = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }
}

/// What sees every code of the driver in a process image, and tells every device's state.
#[derive(Debug)]
pub struct ErrorMonitor {
    watched: Mutex<MonitorState>,
    fence: OnceLock<Ask>,
}

#[derive(Debug)]
struct MonitorState {
    /// The code that poisoned the image.
    poison: Option<i32>,
    states: Vec<Weak<DeviceState>>,
}

static MONITOR: ErrorMonitor = ErrorMonitor::new();

impl ErrorMonitor {
    /// Of an image in which nothing has happened yet.
    pub const fn new() -> ErrorMonitor {
        ErrorMonitor {
            watched: Mutex::new(MonitorState {
                poison: None,
                states: Vec::new(),
            }),
            fence: OnceLock::new(),
        }
    }

    /// How the states that are made from now on ask what the node's agent says of this image.
    pub fn set_fence_fn(&self, fence: Ask) {
        // Whoever was first asked for the same.
        let _ = self.fence.set(fence);
    }

    /// That of this process image, which every call of the driver in this crate reports to.
    pub fn global() -> &'static ErrorMonitor {
        &MONITOR
    }

    /// A fresh state of a device; one of a poisoned image is poisoned from the start.
    pub fn new_state(&self) -> Arc<DeviceState> {
        let state = Arc::new(DeviceState {
            fence: self.fence.get().copied(),
            ..DeviceState::default()
        });
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = watched.poison {
            state.advance(StaleReason::Poisoned(code));
        }
        watched.states.retain(|state| state.strong_count() > 0);
        watched.states.push(Arc::downgrade(&state));
        state
    }

    /// The code that poisoned the image, if one did.
    pub fn poison(&self) -> Option<i32> {
        self.watched
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .poison
    }

    /// Takes note of what a call answered. A code that means nothing here is held against what the driver answers when it
    /// is asked again: a sticky one is answered by every call.
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
        for state in watched.states.iter().filter_map(Weak::upgrade) {
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
        static SAID: AtomicU64 = AtomicU64::new(0);
        extern "C" fn ask() -> u64 {
            SAID.load(Ordering::Relaxed)
        }
        let image = ErrorMonitor::new();
        let before = image.new_state();
        image.set_fence_fn(ask);
        let state = image.new_state();
        assert_eq!(state.check(), Ok(()));
        SAID.store(Fence::Drained.word(), Ordering::Relaxed);
        assert_eq!(state.check(), Err(StaleReason::Draining));
        SAID.store(Fence::Poisoned(0).word(), Ordering::Relaxed);
        assert_eq!(
            image.new_state().check(),
            Err(StaleReason::Poisoned(CUDA_ERROR_UNKNOWN))
        );
        SAID.store(0, Ordering::Relaxed);
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
