//! Records the contexts of this process, and what each is charged for itself, its stacks, its heap
//! and the nodes of its graphs.
//!
//! The driver keeps a stack for every thread that can be resident. Its size is the limit that a
//! program sets, or the largest kernel's local memory if that is more. Measured on an H200, the
//! stacks take multiprocessors x threads x (size - 1 KiB): the first KiB is part of the context.
//! They are taken at `cuCtxSetLimit`, and for a kernel at its first launch, and are kept. A kernel
//! is charged when the program gets its handle, because launches are not hooked.
//!
//! The lock is held over requests to the agent, for seconds at most. A forked child never takes it,
//! because the driver has no context for the child.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::MutexGuard;

use bursar_protocol::units::Units;

use crate::accounting::{self, Account, Denied, PendingCharge};
use crate::alloc_table::Charge;
use crate::chunks::CHUNK;
use crate::curesult;
use crate::driver_calls::driver;
use crate::fork_local::ForkLocal;
use crate::session_state::MAX_DEVICES;

/// Bytes of stack that a thread has in a fresh context.
const DEFAULT_STACK: u64 = 1024;

/// A heap of device-side malloc with a limit up to this is not charged: few programs use one.
const FREE_HEAP: u64 = 64 << 20;

/// A module whose kernel uses device-side malloc takes this beside the heap (fact F25).
/// Nothing tells the shim that a module is one, but a program that sets a large limit loads one.
const BESIDE_HEAP: u64 = 140 << 20;

/// The driver rounds limits up to multiples of this.
const LIMIT_GRANULARITY: u64 = 16;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const ATTR_MULTIPROCESSOR_COUNT: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`.
const ATTR_MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;

/// A context and its charges.
#[derive(Debug)]
pub(crate) struct Context {
    id: u64,
    device: c_int,
    charges: Vec<Charge>,
    /// The units of the charges that are for each [`Part`].
    parts: [Units; 3],
    /// The limit of a stack that the program set, in bytes a thread.
    limit: u64,
    /// The bytes that the nodes of the executable graphs take now.
    graphs: u64,
}

/// A part of the memory that a context takes beside itself.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The stacks of all threads that can be resident.
    Stacks,
    /// The heap of device-side malloc.
    Heap,
    /// The most that the nodes of executable graphs took at a time.
    Graphs,
}

struct ContextRegistry {
    contexts: Vec<Context>,
    /// The most local memory of a kernel of each device, in bytes a thread.
    locals: [u64; MAX_DEVICES],
}

impl Default for ContextRegistry {
    fn default() -> ContextRegistry {
        ContextRegistry {
            contexts: Vec::new(),
            locals: [0; MAX_DEVICES],
        }
    }
}

static REGISTRY: ForkLocal<ContextRegistry> = ForkLocal::new();

fn registry() -> MutexGuard<'static, ContextRegistry> {
    REGISTRY.lock()
}

/// Forgets the parent's contexts, in a forked child.
pub(crate) fn reset() {
    REGISTRY.reset();
}

/// Registers a context that was created and charged. `own` is empty where contexts are not charged.
///
/// # Errors
/// The process's kernels need more stack than the quota allows.
pub(crate) fn created(name: u64, device: c_int, own: Option<PendingCharge>) -> Result<(), Denied> {
    let mut known = registry();
    if known.contexts.iter().any(|context| context.id == name) {
        return Ok(());
    }
    let mut context = Context::new(name, device);
    context.adjust_stack_charge(known.locals(device), "cuCtxCreate")?;
    context.charges.extend(own.map(PendingCharge::into_charge));
    known.contexts.push(context);
    Ok(())
}

/// Removes a context and returns it with its charges.
pub(crate) fn remove(name: u64) -> Option<Context> {
    let mut known = registry();
    let place = known
        .contexts
        .iter()
        .position(|context| context.id == name)?;
    Some(known.contexts.swap_remove(place))
}

/// Re-registers a context whose destruction failed.
pub(crate) fn reinsert(context: Context) {
    registry().contexts.push(context);
}

/// Charges a context for its stacks, of `bytes` a thread, or for a heap of `bytes`, before the
/// limit is set. [`limit_set`] discharges what a lower limit frees.
///
/// # Errors
/// The quota does not allow it.
pub(crate) fn charge_limit(
    (device, name): (c_int, u64),
    part: Part,
    bytes: u64,
) -> Result<(), Denied> {
    let mut known = registry();
    let locals = known.locals(device);
    let context = known.get_or_insert(name, device);
    let wanted = match part {
        Part::Stacks => {
            let bytes = bytes.checked_next_multiple_of(LIMIT_GRANULARITY);
            let bytes = bytes.ok_or(Denied)?.max(context.limit).max(locals);
            context.stacks_of(bytes)?
        }
        Part::Heap | Part::Graphs => Units::holding(heap_bytes(bytes)).ok_or(Denied)?,
    };
    context.raise(part, wanted, "cuCtxSetLimit")
}

/// Records that a context's limit is now `bytes`, of a heap or of each thread's stack.
pub(crate) fn limit_set((device, name): (c_int, u64), part: Part, bytes: u64) {
    let mut known = registry();
    let locals = known.locals(device);
    let context = known.get_or_insert(name, device);
    if let Part::Stacks = part {
        context.limit = bytes;
        // The driver set more than the program asked for and the quota denies it: the audit finds
        // the difference.
        let _ = context.adjust_stack_charge(bytes.max(locals), "cuCtxSetLimit");
    } else {
        let wanted = Units::holding(heap_bytes(bytes)).unwrap_or(Units::MAX);
        context.lower(part, wanted);
    }
}

/// Charges a context for the nodes of a graph before it is instantiated, as far as no earlier graph
/// has taken their memory.
///
/// # Errors
/// The quota does not allow it.
pub(crate) fn charge_graph(
    (device, name): (c_int, u64),
    bytes: u64,
    function: &str,
) -> Result<(), Denied> {
    let mut known = registry();
    let context = known.get_or_insert(name, device);
    let graphs = context.graphs.saturating_add(bytes);
    let wanted = graphs.checked_next_multiple_of(CHUNK);
    let wanted = wanted.and_then(Units::holding).ok_or(Denied)?;
    context.raise(Part::Graphs, wanted, function)?;
    context.graphs = graphs;
    Ok(())
}

/// Records that the nodes of a graph take no memory any more. The context keeps it for others.
pub(crate) fn graph_ended(name: u64, bytes: u64) {
    let mut known = registry();
    let mut contexts = known.contexts.iter_mut();
    if let Some(context) = contexts.find(|context| context.id == name) {
        context.graphs = context.graphs.saturating_sub(bytes);
    }
}

/// Charges every context for kernels that need these bytes of local memory a thread, by device.
///
/// # Errors
/// The quota does not allow it, and no context is charged more than before.
pub(crate) fn kernels_loaded(needed: &BTreeMap<c_int, u64>, function: &str) -> Result<(), Denied> {
    let mut known = registry();
    let mut larger = needed.clone();
    larger.retain(|device, bytes| *bytes > known.locals(*device).max(DEFAULT_STACK));
    let mut raised = Vec::new();
    for context in &mut known.contexts {
        let Some(bytes) = larger.get(&context.device) else {
            continue;
        };
        let before = context.parts[Part::Stacks as usize];
        let charged = context.adjust_stack_charge(context.limit.max(*bytes), function);
        raised.push((context, before));
        if charged.is_err() {
            for (context, before) in raised {
                context.lower(Part::Stacks, before);
            }
            return charged;
        }
    }
    for (device, bytes) in larger {
        let place = usize::try_from(device).ok();
        if let Some(locals) = place.and_then(|place| known.locals.get_mut(place)) {
            *locals = bytes;
        }
    }
    Ok(())
}

impl ContextRegistry {
    fn locals(&self, device: c_int) -> u64 {
        let place = usize::try_from(device).ok();
        place
            .and_then(|place| self.locals.get(place))
            .copied()
            .unwrap_or(0)
    }

    /// Returns the context with an id. Registers a context whose creation the shim did not see.
    fn get_or_insert(&mut self, name: u64, device: c_int) -> &mut Context {
        let place = self.contexts.iter().position(|context| context.id == name);
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
            id: name,
            device,
            charges: Vec::new(),
            parts: [Units::ZERO; 3],
            limit: DEFAULT_STACK,
            graphs: 0,
        }
    }

    /// Charges or discharges the difference to stacks of `bytes` a thread.
    fn adjust_stack_charge(&mut self, bytes: u64, function: &str) -> Result<(), Denied> {
        let wanted = self.stacks_of(bytes)?;
        self.raise(Part::Stacks, wanted, function)?;
        self.lower(Part::Stacks, wanted);
        Ok(())
    }

    /// Returns what stacks of `bytes` a thread take.
    fn stacks_of(&self, bytes: u64) -> Result<Units, Denied> {
        let stacks = stack_bytes(resident_threads(self.device), bytes);
        stacks.and_then(Units::holding).ok_or(Denied)
    }

    /// Charges what a part is charged less than `wanted`.
    fn raise(&mut self, part: Part, wanted: Units, function: &str) -> Result<(), Denied> {
        let charged = &mut self.parts[part as usize];
        let missing = wanted.saturating_sub(*charged);
        if missing > Units::ZERO {
            let account = Account::Device(self.device);
            let pending = accounting::charge(account, missing.bytes(), function)?;
            self.charges.push(pending.into_charge());
            *charged = wanted;
        }
        Ok(())
    }

    /// Discharges what a part is charged beyond `wanted`.
    fn lower(&mut self, part: Part, wanted: Units) {
        let charged = &mut self.parts[part as usize];
        let mut units = charged.saturating_sub(wanted);
        *charged = wanted.min(*charged);
        for charge in &mut self.charges {
            let part = units.min(Units(charge.units));
            accounting::discharge(Charge {
                units: part.0,
                ..*charge
            });
            charge.units -= part.0;
            units = units.saturating_sub(part);
        }
        self.charges.retain(|charge| charge.units > 0);
    }

    /// Discharges all that a destroyed context was charged.
    pub(crate) fn discharge(self) {
        self.charges.into_iter().for_each(accounting::discharge);
    }
}

/// Returns how many threads can be resident on a device.
fn resident_threads(device: c_int) -> u64 {
    let attribute = |which: c_int| {
        let mut value = 0;
        let code = driver!(cuDeviceGetAttribute(
            &raw mut value => *mut c_int, which => c_int, device => c_int,
        ));
        if code == curesult::SUCCESS {
            u64::try_from(value).unwrap_or(0)
        } else {
            0
        }
    };
    attribute(ATTR_MULTIPROCESSOR_COUNT) * attribute(ATTR_MAX_THREADS_PER_MULTIPROCESSOR)
}

/// Returns the bytes that a heap with this limit is charged.
fn heap_bytes(limit: u64) -> u64 {
    match limit > FREE_HEAP {
        true => limit.saturating_add(BESIDE_HEAP),
        false => 0,
    }
}

/// Returns the bytes that stacks of `bytes` a thread take beyond the context, or `None` on
/// overflow.
fn stack_bytes(threads: u64, bytes: u64) -> Option<u64> {
    threads.checked_mul(bytes.saturating_sub(DEFAULT_STACK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_bytes_equal_the_measured_size() {
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
