//! The contexts of this process, and what each is charged for itself and for its threads' stacks.
//!
//! The driver keeps a stack for every thread that can be resident: the limit that a program sets, or the
//! local memory of the largest kernel if that is more. Measured on an H200: multiprocessors x threads x
//! (size - 1 KiB), the first KiB being part of the context; taken at `cuCtxSetLimit`, and for a kernel at
//! its first launch, after which it stays. A kernel is charged when a program gets hold of it: launches
//! are not hooked.
//!
//! The lock is held while the agent is asked, for seconds at most. A forked child never takes it: the
//! driver has no context for it.

use std::ffi::c_int;
use std::sync::MutexGuard;

use bursar_protocol::units::Units;

use super::real;
use crate::afresh::Afresh;
use crate::codes;
use crate::ledger::{self, Denied, Kind, Pending};
use crate::live::Charge;
use crate::state::MAX_DEVICES;

/// Bytes of stack that a thread has in a fresh context.
const FIRST_STACK: u64 = 1024;

/// The driver rounds limits up to multiples of this.
const GRAIN: u64 = 16;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`.
const THREADS: c_int = 39;

/// A context and its charges.
#[derive(Debug)]
pub(crate) struct Context {
    name: u64,
    device: c_int,
    charges: Vec<Charge>,
    /// What of the charges is for stacks, in units.
    stack: Units,
    /// The limit that the program set, in bytes a thread.
    limit: u64,
}

struct Known {
    contexts: Vec<Context>,
    /// The most local memory of a kernel of each device, in bytes a thread.
    locals: [u64; MAX_DEVICES],
}

impl Default for Known {
    fn default() -> Known {
        Known {
            contexts: Vec::new(),
            locals: [0; MAX_DEVICES],
        }
    }
}

static KNOWN: Afresh<Known> = Afresh::new();

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock()
}

/// In a forked child: it has none of its parent's contexts.
pub(crate) fn forget() {
    KNOWN.forget();
}

/// A context was made and charged (not where contexts are not charged).
///
/// # Errors
/// The kernels that the process has need more stack than the quota allows.
pub(crate) fn made(name: u64, device: c_int, own: Option<Pending>) -> Result<(), Denied> {
    let mut known = known();
    if known.contexts.iter().any(|context| context.name == name) {
        return Ok(());
    }
    let mut context = Context::new(name, device);
    context.fit(known.locals(device), "cuCtxCreate")?;
    context.charges.extend(own.map(Pending::hold));
    known.contexts.push(context);
    Ok(())
}

/// Forgets a context; what it was charged.
pub(crate) fn ended(name: u64) -> Option<Context> {
    let mut known = known();
    let place = known
        .contexts
        .iter()
        .position(|context| context.name == name)?;
    Some(known.contexts.swap_remove(place))
}

/// Takes a context back that did not end.
pub(crate) fn lives(context: Context) {
    known().contexts.push(context);
}

/// Charges a context for a stack of `bytes` a thread before it is set; less is given back by
/// [`limited`].
///
/// # Errors
/// The quota does not allow it.
pub(crate) fn limit(name: u64, device: c_int, bytes: u64) -> Result<(), Denied> {
    let mut known = known();
    let locals = known.locals(device);
    let context = known.context(name, device);
    let bytes = bytes.checked_next_multiple_of(GRAIN).ok_or(Denied)?;
    let wanted = bytes.max(context.limit).max(locals);
    context.fit(wanted, "cuCtxSetLimit")
}

/// A context's limit is now `bytes` a thread.
pub(crate) fn limited(name: u64, device: c_int, bytes: u64) {
    let mut known = known();
    let locals = known.locals(device);
    let context = known.context(name, device);
    context.limit = bytes;
    // More than was charged before the call is not what the program asked for: the audit sees it.
    let _ = context.fit(bytes.max(locals), "cuCtxSetLimit");
}

/// The program has a kernel with `bytes` of local memory a thread: charges every context of the device.
///
/// # Errors
/// The quota does not allow it.
pub(crate) fn loaded(device: c_int, bytes: u64, function: &str) -> Result<(), Denied> {
    let mut known = known();
    if bytes <= known.locals(device).max(FIRST_STACK) {
        return Ok(());
    }
    let here = |context: &&mut Context| context.device == device;
    for context in known.contexts.iter_mut().filter(here) {
        context.fit(bytes.max(context.limit), function)?;
    }
    let place = usize::try_from(device).ok();
    if let Some(locals) = place.and_then(|place| known.locals.get_mut(place)) {
        *locals = bytes;
    }
    Ok(())
}

impl Known {
    fn locals(&self, device: c_int) -> u64 {
        let place = usize::try_from(device).ok();
        place
            .and_then(|place| self.locals.get(place))
            .copied()
            .unwrap_or(0)
    }

    /// The context of that name: entered, where nobody saw it being made.
    fn context(&mut self, name: u64, device: c_int) -> &mut Context {
        let place = self
            .contexts
            .iter()
            .position(|context| context.name == name);
        let place = place.unwrap_or_else(|| {
            self.contexts.push(Context::new(name, device));
            self.contexts.len() - 1
        });
        &mut self.contexts[place]
    }
}

impl Context {
    fn new(name: u64, device: c_int) -> Context {
        Context {
            name,
            device,
            charges: Vec::new(),
            stack: Units::ZERO,
            limit: FIRST_STACK,
        }
    }

    /// Charges what is missing for stacks of `bytes` a thread, or gives back what is too much.
    fn fit(&mut self, bytes: u64, function: &str) -> Result<(), Denied> {
        let wanted = stack_bytes(threads(self.device), bytes).ok_or(Denied)?;
        let wanted = Units::holding(wanted).ok_or(Denied)?;
        let missing = wanted.saturating_sub(self.stack);
        if missing > Units::ZERO {
            let pending = ledger::charge(Kind::Device(self.device), missing.bytes(), function)?;
            self.charges.push(pending.hold());
        }
        self.give_back(self.stack.saturating_sub(wanted));
        self.stack = wanted;
        Ok(())
    }

    fn give_back(&mut self, mut units: Units) {
        for charge in &mut self.charges {
            let part = units.min(Units(charge.units));
            ledger::discharge(Charge {
                units: part.0,
                ..*charge
            });
            charge.units -= part.0;
            units = units.saturating_sub(part);
        }
        self.charges.retain(|charge| charge.units > 0);
    }

    /// Gives back all that the context was charged: it ended.
    pub(crate) fn discharge(self) {
        self.charges.into_iter().for_each(ledger::discharge);
    }
}

/// Threads that can be resident on a device.
fn threads(device: c_int) -> u64 {
    let attribute = |which: c_int| {
        let mut value = 0;
        let code = real!(cuDeviceGetAttribute(
            &raw mut value => *mut c_int, which => c_int, device => c_int,
        ));
        if code == codes::SUCCESS {
            u64::try_from(value).unwrap_or(0)
        } else {
            0
        }
    };
    attribute(MULTIPROCESSORS) * attribute(THREADS)
}

/// Bytes of a device that stacks of `bytes` a thread take beyond the context; `None` beyond all numbers.
fn stack_bytes(threads: u64, bytes: u64) -> Option<u64> {
    threads.checked_mul(bytes.saturating_sub(FIRST_STACK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_takes_what_was_measured() {
        let h200 = 132 * 2048;
        let mebibytes = |bytes| stack_bytes(h200, bytes).map(|bytes| bytes >> 20);
        assert_eq!(mebibytes(16 << 10), Some(3960));
        assert_eq!(mebibytes(256 << 10), Some(67_320));
        assert_eq!(mebibytes(64 << 10), Some(16_632));
        assert_eq!(stack_bytes(h200, 1024), Some(0));
        assert_eq!(stack_bytes(h200, 0), Some(0));
        assert_eq!(stack_bytes(h200, u64::MAX), None);
    }
}
