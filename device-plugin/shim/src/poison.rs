//! What becomes of a process whose context a fault has poisoned.
//!
//! Nothing in its image can use the GPU again, whatever is destroyed or reset (design F1). The first sticky code of an
//! image is reported to the agent, which fences the image and decides: the program gets the code and its
//! container is restarted, or it is executed again in its own place ([`again`]) and never sees the code. Other
//! threads that meet the code meanwhile wait for the verdict.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use bursar_protocol::sticky::{self, ErrorClass};
use bursar_protocol::wire::Verdict;

use crate::curesult::{self, CuResult};
use crate::hooks::{captures, current_device, driver};
use crate::{accounting, reexec, session_state};

/// What the program gets where a function answers this, which is no success.
#[cold]
pub(crate) extern "C" fn on_error(code: CuResult) -> CuResult {
    catch_unwind(AssertUnwindSafe(|| handle(code))).unwrap_or(code)
}

fn handle(code: CuResult) -> CuResult {
    match ErrorClass::of(code) {
        ErrorClass::Caller | ErrorClass::NotReady | ErrorClass::Gone => code,
        // The shim's own, to a fenced image: the driver would have said another. That image may not know yet what the
        // agent has from the kernel's log.
        ErrorClass::OutOfMemory => poison_code().unwrap_or_else(|| match probe() {
            poison if sticky::poisons(poison) => {
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

/// The code that poisoned this image, once it was seen.
fn poison_code() -> Option<CuResult> {
    let code = session_state::state()?.poisoned.load(Ordering::Acquire);
    (code != curesult::SUCCESS).then_some(code)
}

/// What a call answers that has nothing to do with the one that failed: a code that says nothing is poison if that says
/// the same.
fn probe() -> CuResult {
    let (mut free, mut total) = (0_usize, 0_usize);
    captures::with_relaxed_capture(
        || driver!(cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)),
    )
}

/// Reports the first code of this image, and does what the agent says. With the lock of the conversation held: who
/// comes later waits for it.
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
    if verdict == Some(Verdict::Execute) {
        log_reexec(code);
        reexec::execute();
    }
    // From here on nobody waits: before, a thread with its error in hand could end a program that is to go on.
    state.poisoned.store(code, Ordering::Release);
}

/// The program never gets to tell of it, so its log does.
fn log_reexec(code: CuResult) {
    let line =
        format!("bursar: CUDA error {code}: the program is executed again in this container\n");
    // SAFETY: the buffer is as long as is said; whether somebody reads it does not matter.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}
