//! Encodes why the agent has fenced a process image, and names the shim's functions that tell it.

/// The name under which [`cuGetProcAddress`] of the shim returns the fence function. The function
/// takes no arguments and returns the fence word of the page, zero without a page. No driver has a
/// function of this name.
///
/// [`cuGetProcAddress`]: https://docs.nvidia.com/cuda/cuda-driver-api/
pub const FENCE_SYMBOL: &std::ffi::CStr = c"bursarFence";

/// The function that reads the fence word.
pub type FenceFn = extern "C" fn() -> u64;

/// The name under which `cuGetProcAddress` of the shim returns the process generation function, as
/// for [`FENCE_SYMBOL`].
pub const PROCESS_GENERATION_SYMBOL: &std::ffi::CStr = c"bursarProcessGeneration";

/// The function that returns the process generation; zero before the first session, or with an
/// agent that does not tell it.
pub type ProcessGenerationFn = extern "C" fn() -> u64;

/// The name under which `cuGetProcAddress` of the shim returns the quota function, as for
/// [`FENCE_SYMBOL`].
pub const QUOTA_SYMBOL: &std::ffi::CStr = c"bursarQuota";

/// The function that returns the container's quota of a device, by its ordinal, in bytes; zero
/// without a session or an account.
pub type QuotaFn = extern "C" fn(i32) -> u64;

/// Why the agent grants a process image nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The image's GPU is drained.
    Drained,
    /// The image's contexts are poisoned, with this `CUresult`; zero where only the kernel's log
    /// reported it.
    Poisoned(i32),
}

impl Fence {
    /// Encodes the fence as a word; never zero, which is no fence.
    pub fn word(self) -> u64 {
        match self {
            Fence::Drained => 1 << 32,
            Fence::Poisoned(code) => 2 << 32 | u64::from(code.cast_unsigned()),
        }
    }

    /// Decodes a word. An unknown word of a later agent counts as a drain, because the memory must
    /// not be used.
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
        let words = [
            (Fence::Drained, 0x0000_0001_0000_0000),
            (Fence::Poisoned(700), 0x0000_0002_0000_02bc),
            (Fence::Poisoned(-1), 0x0000_0002_ffff_ffff),
        ];
        for (fence, word) in words {
            assert_eq!(fence.word(), word, "shims of running containers read it");
        }
        assert_eq!(Fence::of(0), None);
        assert_eq!(Fence::of(9 << 32), Some(Fence::Drained));
    }
}
