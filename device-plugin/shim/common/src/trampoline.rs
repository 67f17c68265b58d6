//! Generates assembly functions that forward to the real library without knowing a prototype.
//!
//! [`crate::forward!`] jumps and leaves all registers and the stack as they were. [`crate::watch!`]
//! calls and checks the result, because errors of earlier asynchronous work appear there, also
//! those that poison the context. It must know the number of arguments, because it copies those on
//! the stack for the callee. A success costs the call and one comparison. Unwind tables describe
//! its frame to debuggers and to thread cancellation, because the watched functions include those
//! that wait.
//!
//! Both are macros, because each library exports functions of its own, under the driver's names.

#[doc(hidden)]
#[macro_export]
macro_rules! naked {
    ($(#[$about:meta])* $name:ident: $($assembly:tt)*) => {
        $(#[$about])*
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!($($assembly)*)
        }
    };
}

#[cfg(target_arch = "aarch64")]
#[path = "trampoline/aarch64.rs"]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[path = "trampoline/x86_64.rs"]
mod x86_64;

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::AtomicPtr;

    use crate::watch;

    type Eleven = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> c_int;

    static SLOTS: [AtomicPtr<c_void>; 1] = [AtomicPtr::new(real as Eleven as *mut c_void)];

    thread_local! {
        /// The arguments of the last call of the real function.
        static CALLED: Cell<[u64; 11]> = const { Cell::new([0; 11]) };
    }

    /// Returns its first argument.
    #[allow(clippy::too_many_arguments, reason = "as a launch has")]
    #[rustfmt::skip]
    extern "C" fn real(
        a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64, i: u64, j: u64, k: u64,
    ) -> c_int {
        CALLED.set([a, b, c, d, e, f, g, h, i, j, k]);
        // Compilers rely on an aligned stack, so the callee checks it.
        #[repr(align(16))]
        struct Aligned(u64);
        let aligned = std::hint::black_box(Aligned(a));
        assert_eq!(std::ptr::from_ref(&aligned).addr() % 16, 0);
        aligned.0 as c_int
    }

    extern "C" fn on_error(code: c_int) -> c_int {
        code + 10_000
    }

    watch!(bursar_watched_6, SLOTS, 0, 6, on_error);
    watch!(bursar_watched_7, SLOTS, 0, 7, on_error);
    watch!(bursar_watched_8, SLOTS, 0, 8, on_error);
    watch!(bursar_watched_9, SLOTS, 0, 9, on_error);
    watch!(bursar_watched_10, SLOTS, 0, 10, on_error);
    watch!(bursar_watched_11, SLOTS, 0, 11, on_error);

    #[test]
    fn watch_passes_every_argument_and_reports_only_failures() {
        let watched: [(usize, unsafe extern "C" fn()); 6] = [
            (6, bursar_watched_6),
            (7, bursar_watched_7),
            (8, bursar_watched_8),
            (9, bursar_watched_9),
            (10, bursar_watched_10),
            (11, bursar_watched_11),
        ];
        for (count, function) in watched {
            // SAFETY: the trampoline calls a function of this prototype.
            let function =
                unsafe { std::mem::transmute::<unsafe extern "C" fn(), Eleven>(function) };
            for (first, answer) in [(0, 0), (700, 10_700)] {
                assert_eq!(function(first, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), answer);
                let wanted = [first, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
                assert_eq!(CALLED.get()[..count], wanted[..count]);
            }
        }
    }
}
