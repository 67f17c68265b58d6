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

use crate::codes::{self, CuResult};
use crate::hooks::{captures, current_device, real};
use crate::{again, ledger, state};

/// What the program gets where a function answers this, which is no success.
#[cold]
pub(crate) extern "C" fn noticed(code: CuResult) -> CuResult {
    catch_unwind(AssertUnwindSafe(|| answer(code))).unwrap_or(code)
}

fn answer(code: CuResult) -> CuResult {
    match ErrorClass::of(code) {
        ErrorClass::Caller | ErrorClass::NotReady | ErrorClass::Gone => code,
        // The shim's own, to a fenced image: the driver would have said another. That image may not know yet what the
        // agent has from the kernel's log.
        ErrorClass::OutOfMemory => known().unwrap_or_else(|| match asked() {
            poison if sticky::poisons(poison) => {
                act(poison);
                poison
            }
            _ => code,
        }),
        ErrorClass::Unknown if asked() != code => code,
        ErrorClass::Unknown
        | ErrorClass::Hardware
        | ErrorClass::StickyContext
        | ErrorClass::StickyProcess => {
            act(code);
            code
        }
    }
}

/// The code that poisoned this image, once it was seen.
fn known() -> Option<CuResult> {
    let code = state::state()?.poisoned.load(Ordering::Acquire);
    (code != codes::SUCCESS).then_some(code)
}

/// What a call answers that has nothing to do with the one that failed: a code that says nothing is poison if that says
/// the same.
fn asked() -> CuResult {
    let (mut free, mut total) = (0_usize, 0_usize);
    captures::apart(
        || real!(cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)),
    )
}

/// Reports the first code of this image, and does what the agent says. With the lock of the conversation held: who
/// comes later waits for it.
fn act(code: CuResult) {
    let Some(state) = state::state() else {
        return;
    };
    if known().is_some() {
        return;
    }
    let device: c_int = current_device().unwrap_or_default();
    let Some(held) = state.hold() else {
        return;
    };
    if known().is_some() {
        return;
    }
    let verdict = ledger::poisoned(state, &held, device, code, again::is_possible());
    if verdict == Some(Verdict::Execute) {
        say(code);
        again::execute();
    }
    // From here on nobody waits: before, a thread with its error in hand could end a program that is to go on.
    state.poisoned.store(code, Ordering::Release);
}

/// The program never gets to tell of it, so its log does.
fn say(code: CuResult) {
    let line =
        format!("bursar: CUDA error {code}: the program is executed again in this container\n");
    // SAFETY: the buffer is as long as is said; whether somebody reads it does not matter.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}
