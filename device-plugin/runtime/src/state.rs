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
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

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

/// A device's state in this process image, shared by all that was allocated under it.
#[derive(Debug, Default)]
pub struct DeviceState {
    word: AtomicU64,
}

impl DeviceState {
    /// Whether memory of this state can be used: one load.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn check(&self) -> Result<(), Stale> {
        match self.word.load(Ordering::Acquire) {
            0 => Ok(()),
            word => Err(Stale::of(word)),
        }
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
        }
    }

    /// That of this process image, which every call of the driver in this crate reports to.
    pub fn of_this_image() -> &'static Supervisor {
        &IMAGE
    }

    /// A fresh state of a device; one of a poisoned image is poisoned from the start.
    pub fn watch(&self) -> Arc<DeviceState> {
        let state = Arc::new(DeviceState::default());
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
