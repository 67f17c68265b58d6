//! Classifies a `CUresult` by what it means for the context, the process and the GPU.
//!
//! Source: the comments of `CUresult` in cuda.h (CUDA 13.0), and measurements on an H200 with
//! driver 580 (fact F1). After a kernel's fault every context of the process image fails, whatever
//! the header says of destroying one. Codes are integers, because newer drivers have codes that no
//! list here has.
#![forbid(unsafe_code)]

/// The consequence of a driver error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// "The process must be terminated and relaunched": nothing in this process image works again.
    StickyProcess,
    /// "The context cannot be used anymore": all of its memory is lost. By fact F1, another context
    /// of the same process image does not help either.
    StickyContext,
    /// The driver is shutting down, or the context was destroyed by the program.
    Gone,
    /// Memory or a link of the GPU failed. What was being computed is lost with its process.
    Hardware,
    /// Out of memory; only code 2 says so.
    OutOfMemory,
    /// The request is wrong or not possible here: the same call fails again.
    Caller,
    /// The call may succeed later.
    NotReady,
    /// An ambiguous or unknown code. Call the driver again: a sticky error is returned again.
    Unknown,
}

impl ErrorClass {
    /// Returns the class of a code other than `CUDA_SUCCESS`.
    pub const fn of(code: i32) -> ErrorClass {
        match code {
            // ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION,
            // MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED,
            // TENSOR_MEMORY_LEAK, MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE, CONTAINED
            700 | 702 | 714..=719 | 721 | 810 | 911 | 226 => ErrorClass::StickyProcess,
            // ASSERT
            710 => ErrorClass::StickyContext,
            // DEINITIALIZED, CONTEXT_IS_DESTROYED
            4 | 709 => ErrorClass::Gone,
            // ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE
            214 | 220 => ErrorClass::Hardware,
            2 => ErrorClass::OutOfMemory,
            // DEVICE_UNAVAILABLE, NOT_READY, SYSTEM_NOT_READY, MPS_SERVER_NOT_READY,
            // MPS_MAX_CLIENTS_REACHED, MPS_MAX_CONNECTIONS_REACHED, TIMEOUT
            46 | 600 | 802 | 807..=809 | 909 => ErrorClass::NotReady,
            // SUCCESS is no error, and UNKNOWN is ambiguous.
            0 | 999 => ErrorClass::Unknown,
            code if known(code) => ErrorClass::Caller,
            _ => ErrorClass::Unknown,
        }
    }

    /// Returns whether this process image cannot use the GPU any more, because its contexts are
    /// poisoned.
    pub const fn poisons(self) -> bool {
        matches!(
            self,
            ErrorClass::StickyProcess | ErrorClass::StickyContext | ErrorClass::Hardware
        )
    }

    /// Returns whether the same call may succeed later in the same process image.
    pub const fn retryable(self) -> bool {
        matches!(self, ErrorClass::OutOfMemory | ErrorClass::NotReady)
    }
}

/// Returns whether cuda.h of CUDA 13.0 has this code.
const fn known(code: i32) -> bool {
    matches!(
        code,
        0..=8 | 34 | 35 | 36 | 46 | 100..=102 | 200..=202 | 205..=226 | 300..=304 | 400..=402
            | 500 | 600 | 700..=705 | 708..=721 | 800..=812 | 900..=917 | 999
    )
}

/// Returns whether a code poisons its context by itself. An [`ErrorClass::Unknown`] code needs
/// another driver call.
pub const fn poisons(code: i32) -> bool {
    ErrorClass::of(code).poisons()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes that poison a context.
    const POISON: [i32; 15] = [
        700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 214, 220, 226,
    ];

    #[test]
    fn exactly_the_listed_codes_poison_a_context() {
        let found: Vec<i32> = (-1..2000).filter(|&code| poisons(code)).collect();
        let mut expected = POISON.to_vec();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn only_code_2_is_out_of_memory() {
        let found: Vec<i32> = (-1..2000)
            .filter(|&code| ErrorClass::of(code) == ErrorClass::OutOfMemory)
            .collect();
        assert_eq!(found, [2]);
    }

    #[test]
    fn poisoning_codes_are_never_retryable() {
        for code in -1..2000 {
            let class = ErrorClass::of(code);
            assert!(!(class.poisons() && class.retryable()), "{code}");
        }
    }

    #[test]
    fn code_of_a_newer_driver_is_unknown() {
        for code in [-1, 227, 722, 813, 918, 1000, i32::MAX, i32::MIN] {
            assert_eq!(ErrorClass::of(code), ErrorClass::Unknown, "{code}");
        }
    }

    #[test]
    fn codes_have_their_documented_class() {
        for code in [1, 3, 101, 200, 201, 400, 500, 701, 720, 800, 801, 906] {
            assert_eq!(ErrorClass::of(code), ErrorClass::Caller, "{code}");
        }
        for code in [600, 802, 909] {
            assert_eq!(ErrorClass::of(code), ErrorClass::NotReady, "{code}");
        }
        for code in [4, 709] {
            assert_eq!(ErrorClass::of(code), ErrorClass::Gone, "{code}");
        }
    }
}
