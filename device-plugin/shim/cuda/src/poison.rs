//! Handles errors that poison the process's contexts.
//!
//! A poisoned process image cannot use the GPU again, whatever it destroys or resets (fact F1). The
//! shim reports the first sticky error of an image to the agent, which fences the image and
//! decides. Either the program gets the error and its container is restarted. Or the shim executes
//! the program again in the same process ([`reexec`]), and the program never sees the error. Other
//! threads that hit the error meanwhile wait for the agent's decision.

use std::ffi::c_int;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use bursar_protocol::error_class::{self, ErrorClass};
use bursar_protocol::messages::Recovery;

use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, current_device, driver};
use crate::{accounting, reexec, session_state};

/// Returns the code that the program gets for a driver result that is not success.
#[cold]
pub(crate) extern "C" fn on_error(code: CuResult) -> CuResult {
    catch_unwind(AssertUnwindSafe(|| handle(code))).unwrap_or(code)
}

fn handle(code: CuResult) -> CuResult {
    match ErrorClass::of(code) {
        ErrorClass::Caller | ErrorClass::NotReady | ErrorClass::Gone => code,
        // The shim itself denies memory to a fenced image, where the driver would have returned the
        // sticky error. The agent may know of the fault from the kernel's log before this image
        // does.
        ErrorClass::OutOfMemory => poison_code().unwrap_or_else(|| match probe() {
            poison if error_class::poisons(poison) => {
                report_and_recover(poison);
                poison
            }
            _ => code,
        }),
        ErrorClass::Unknown if probe() != code => code,
        ErrorClass::Unknown
        | ErrorClass::Hardware
        | ErrorClass::StickyContext
        | ErrorClass::StickyProcess => {
            report_and_recover(code);
            code
        }
    }
}

/// Returns the error that poisoned this image, once a call has returned it.
fn poison_code() -> Option<CuResult> {
    let code = session_state::state()?.poisoned.load(Ordering::Acquire);
    (code != curesult::SUCCESS).then_some(code)
}

/// Returns the result of an unrelated driver call. An ambiguous code is sticky if this call returns
/// it as well.
fn probe() -> CuResult {
    let (mut free, mut total) = (0_usize, 0_usize);
    captures::with_relaxed_capture(
        || driver!(cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)),
    )
}

/// Reports the first sticky error of this image and does what the agent decides. Holds the session
/// lock, so that later threads wait for the decision.
fn report_and_recover(code: CuResult) {
    let Some(state) = session_state::state() else {
        return;
    };
    if poison_code().is_some() {
        return;
    }
    let device: c_int = current_device().unwrap_or_default();
    let Some(guard) = state.lock() else {
        return;
    };
    if poison_code().is_some() {
        return;
    }
    let verdict = accounting::report_poison(state, &guard, device, code, reexec::is_possible());
    match verdict {
        Some(Recovery::Reexec) => {
            log_to_stderr(format_args!(
                "executing the program again in this container after CUDA error {code}"
            ));
            reexec::execute();
        }
        Some(Recovery::End { seconds }) => {
            log_to_stderr(format_args!(
                "CUDA error {code}: this process ends within {seconds} s"
            ));
        }
        Some(Recovery::Continue) | None => {}
    }
    // Publish the error only now: another thread that saw it earlier could exit the program before
    // the re-exec.
    state.poisoned.store(code, Ordering::Release);
}

/// Writes a line to the program's standard error. The program itself never sees the error before a
/// re-exec, and a killed process otherwise looks like one that ran out of host memory.
fn log_to_stderr(text: fmt::Arguments<'_>) {
    let line = format!("bursar: {text}\n");
    // SAFETY: the buffer has the given length. A failed write is ignored.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}
