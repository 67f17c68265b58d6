//! Why the agent does nothing more for a process image: a word of its page, and how a program's libraries ask for it.

/// What [`cuGetProcAddress`] of the shim hands out under this name: a function without arguments that returns the word
/// of the page, zero before there is one. The driver has none of this name.
///
/// [`cuGetProcAddress`]: https://docs.nvidia.com/cuda/cuda-driver-api/
pub const FENCE_SYMBOL: &std::ffi::CStr = c"bursarFence";

/// The function of that name.
pub type FenceFn = extern "C" fn() -> u64;

/// Why nothing more is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Its GPU is drained.
    Drained,
    /// Its contexts are poisoned, with this `CUresult`; zero where only the kernel's log told of it.
    Poisoned(i32),
}

impl Fence {
    /// As a word; never zero, which is no fence.
    pub fn word(self) -> u64 {
        match self {
            Fence::Drained => 1 << 32,
            Fence::Poisoned(code) => 2 << 32 | u64::from(code.cast_unsigned()),
        }
    }

    /// What a word says. What a later agent says is taken for a drain: memory is not to be used.
    pub fn of(word: u64) -> Option<Fence> {
        #[expect(clippy::cast_possible_truncation, reason = "the code is the low half")]
        match word >> 32 {
            _ if word == 0 => None,
            2 => Some(Fence::Poisoned((word as u32).cast_signed())),
            _ => Some(Fence::Drained),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_word_round_trips() {
        for fence in [
            Fence::Drained,
            Fence::Poisoned(700),
            Fence::Poisoned(0),
            Fence::Poisoned(-1),
        ] {
            assert_eq!(Fence::of(fence.word()), Some(fence));
        }
        assert_eq!(Fence::of(0), None);
        assert_eq!(Fence::of(9 << 32), Some(Fence::Drained));
    }
}
