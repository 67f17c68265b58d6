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
pub enum Stale {
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

impl Stale {
    /// The word that says so: what is asked most is zero, a later stage is larger.
    fn word(self) -> u64 {
        match self {
            Stale::Draining => 1 << 32,
            Stale::Poisoned(code) => 2 << 32 | u64::from(code.cast_unsigned()),
            Stale::ShutDown => 3 << 32,
        }
    }

    fn stage(word: u64) -> u64 {
        word >> 32
    }

    /// What a word other than zero says.
    #[cold]
    fn of(word: u64) -> Stale {
        match Stale::stage(word) {
            1 => Stale::Draining,
            #[expect(clippy::cast_possible_truncation, reason = "the code is the low half")]
            2 => Stale::Poisoned((word as u32).cast_signed()),
            _ => Stale::ShutDown,
        }
    }
}

impl From<Fence> for Stale {
    fn from(fence: Fence) -> Stale {
        match fence {
            Fence::Drained => Stale::Draining,
            Fence::Poisoned(0) => Stale::Poisoned(UNKNOWN),
            Fence::Poisoned(code) => Stale::Poisoned(code),
        }
    }
}

/// `CUDA_ERROR_UNKNOWN`: a fault that only the kernel's log told of.
const UNKNOWN: i32 = 999;

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
    pub fn check(&self) -> Result<(), Stale> {
        match (self.word.load(Ordering::Acquire), self.fence) {
            (0, None) => Ok(()),
            (0, Some(ask)) => match ask() {
                0 => Ok(()),
                word => self.fenced(word),
            },
            (word, _) => Err(Stale::of(word)),
        }
    }

    /// The agent does nothing more for this image: that stays so.
    #[cold]
    fn fenced(&self, word: u64) -> Result<(), Stale> {
        let why = Fence::of(word).map(Stale::from);
        why.inspect(|why| self.advance(*why)).map_or(Ok(()), Err)
    }

    /// Lets nothing new start.
    pub fn drain(&self) {
        self.advance(Stale::Draining);
    }

    /// Ends it.
    pub fn shut_down(&self) {
        self.advance(Stale::ShutDown);
    }

    /// Goes to a later stage; of two at once the first stays, with its code.
    fn advance(&self, to: Stale) {
        let later = |word| (Stale::stage(word) < Stale::stage(to.word())).then(|| to.word());
        // An error says that it is there already, or further.
        let _ = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }
}

/// What sees every code of the driver in a process image, and tells every device's state.
#[derive(Debug)]
pub struct Supervisor {
    watched: Mutex<Watched>,
    fence: OnceLock<Ask>,
}

#[derive(Debug)]
struct Watched {
    /// The code that poisoned the image.
    poison: Option<i32>,
    states: Vec<Weak<DeviceState>>,
}

static IMAGE: Supervisor = Supervisor::new();

impl Supervisor {
    /// Of an image in which nothing has happened yet.
    pub const fn new() -> Supervisor {
        Supervisor {
            watched: Mutex::new(Watched {
                poison: None,
                states: Vec::new(),
            }),
            fence: OnceLock::new(),
        }
    }

    /// How the states that are made from now on ask what the node's agent says of this image.
    pub fn ask(&self, fence: Ask) {
        // Whoever was first asked for the same.
        let _ = self.fence.set(fence);
    }

    /// That of this process image, which every call of the driver in this crate reports to.
    pub fn of_this_image() -> &'static Supervisor {
        &IMAGE
    }

    /// A fresh state of a device; one of a poisoned image is poisoned from the start.
    pub fn watch(&self) -> Arc<DeviceState> {
        let state = Arc::new(DeviceState {
            fence: self.fence.get().copied(),
            ..DeviceState::default()
        });
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = watched.poison {
            state.advance(Stale::Poisoned(code));
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
    pub fn saw(&self, code: i32, ask_again: impl FnOnce() -> i32) {
        match ErrorClass::of(code) {
            class if class.poisons() => self.poisoned(code),
            ErrorClass::Unknown => {
                let again = ask_again();
                if ErrorClass::of(again).poisons() || again == code {
                    self.poisoned(again);
                }
            }
            _ => {}
        }
    }

    fn poisoned(&self, code: i32) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let code = *watched.poison.get_or_insert(code);
        for state in watched.states.iter().filter_map(Weak::upgrade) {
            state.advance(Stale::Poisoned(code));
        }
    }
}

impl Default for Supervisor {
    fn default() -> Supervisor {
        Supervisor::new()
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
    fn a_fresh_state_is_good() {
        assert_eq!(Supervisor::new().watch().check(), Ok(()));
    }

    #[test]
    fn a_sticky_code_poisons_every_device_of_the_image_with_the_first_code() {
        let image = Supervisor::new();
        let (one, other) = (image.watch(), image.watch());
        image.saw(700, silent);
        image.saw(719, silent);
        assert_eq!(one.check(), Err(Stale::Poisoned(700)));
        assert_eq!(other.check(), Err(Stale::Poisoned(700)));
        assert_eq!(image.poison(), Some(700));
    }

    #[test]
    fn what_the_agent_says_makes_a_state_stale_at_once_and_for_good() {
        static SAID: AtomicU64 = AtomicU64::new(0);
        extern "C" fn ask() -> u64 {
            SAID.load(Ordering::Relaxed)
        }
        let image = Supervisor::new();
        let before = image.watch();
        image.ask(ask);
        let state = image.watch();
        assert_eq!(state.check(), Ok(()));
        SAID.store(Fence::Drained.word(), Ordering::Relaxed);
        assert_eq!(state.check(), Err(Stale::Draining));
        SAID.store(Fence::Poisoned(0).word(), Ordering::Relaxed);
        assert_eq!(image.watch().check(), Err(Stale::Poisoned(UNKNOWN)));
        SAID.store(0, Ordering::Relaxed);
        assert_eq!(state.check(), Err(Stale::Draining));
        assert_eq!((before.check(), image.watch().check()), (Ok(()), Ok(())));
    }

    #[test]
    fn a_state_that_is_made_after_the_poison_is_poisoned() {
        let image = Supervisor::new();
        image.saw(719, silent);
        assert_eq!(image.watch().check(), Err(Stale::Poisoned(719)));
    }

    #[test]
    fn one_image_is_nothing_to_another() {
        let (image, other) = (Supervisor::new(), Supervisor::new());
        let state = other.watch();
        image.saw(700, silent);
        assert_eq!(state.check(), Ok(()));
    }

    #[test]
    fn out_of_memory_wrong_arguments_and_waiting_poison_nothing() {
        let image = Supervisor::new();
        for code in [1, 2, 4, 201, 400, 600, 801] {
            image.saw(code, silent);
        }
        assert_eq!(image.poison(), None);
    }

    #[test]
    fn an_unknown_code_poisons_where_the_driver_repeats_it_or_has_a_sticky_one() {
        for (again, poison) in [
            (5000, Some(5000)),
            (700, Some(700)),
            (0, None),
            (600, None),
            (5001, None),
        ] {
            let image = Supervisor::new();
            image.saw(5000, || again);
            assert_eq!(image.poison(), poison, "then {again}");
        }
    }

    #[test]
    fn a_state_that_nobody_has_any_more_is_watched_no_more() {
        let image = Supervisor::new();
        for _ in 0..100 {
            drop(image.watch());
        }
        let _last = image.watch();
        let watched = image.watched.lock().expect("nobody panicked");
        assert_eq!(watched.states.len(), 1);
    }

    proptest! {
        #[test]
        fn a_state_only_goes_on_and_keeps_its_first_code(steps in prop::collection::vec(0..4u8, 0..12)) {
            let image = Supervisor::new();
            let state = image.watch();
            let (mut stage, mut code) = (0, None);
            for (place, step) in steps.into_iter().enumerate() {
                let number = 714 + i32::try_from(place % 6).expect("small");
                let to = match step {
                    0 => { state.drain(); 1 }
                    1 | 2 => { image.saw(number, silent); code = code.or(Some(number)); 2 }
                    _ => { state.shut_down(); 3 }
                };
                stage = stage.max(to);
                let expected = match stage {
                    0 => Ok(()),
                    1 => Err(Stale::Draining),
                    2 => Err(Stale::Poisoned(code.expect("it was poisoned"))),
                    _ => Err(Stale::ShutDown),
                };
                prop_assert_eq!(state.check(), expected);
            }
        }
    }
}
