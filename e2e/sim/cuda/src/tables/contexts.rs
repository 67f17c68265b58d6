//! Records the primary, created and green contexts of the process image.

use bursar_sim_state::rm::ContextGroups;
use std::collections::BTreeMap;

/// A new context's stack bytes per thread, which are part of the context's own bytes.
pub(crate) const DEFAULT_STACK_BYTES: u64 = 1024;

/// A context of this image.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// `cuCtxAttach` increments the number, `cuCtxDetach` decrements it.
    pub(crate) users: u32,
    /// The stack limit set with `cuCtxSetLimit`, in bytes per thread.
    pub(crate) stack_limit: u64,
    /// Charged stack bytes per thread: the limit, or more if a kernel's local memory needs it.
    pub(crate) stack_per_thread: u64,
    /// Other limits, of which only the heap's costs something.
    pub(crate) limits: BTreeMap<i32, u64>,
    /// Bytes of the heap of device-side malloc, which a launch has taken (F25 in
    /// docs/internals/facts.md).
    pub(crate) heap: u64,
    /// Its channel groups in the kernel module; none without one.
    pub(crate) groups: Option<ContextGroups>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Primary {
    pub(crate) context: Option<u64>,
    pub(crate) users: u32,
    pub(crate) flags: u32,
}

/// All contexts of this image.
#[derive(Debug)]
pub(crate) struct Contexts {
    pub(crate) primaries: Vec<Primary>,
    pub(crate) live: BTreeMap<u64, Context>,
    /// Green contexts, each with the device whose primary context it belongs to.
    pub(crate) green: BTreeMap<u64, usize>,
    pub(crate) handle_count: u64,
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Contexts {
        Contexts {
            primaries: vec![Primary::default(); devices],
            live: BTreeMap::new(),
            green: BTreeMap::new(),
            handle_count: 0,
        }
    }

    /// Inserts a context under a new handle. Handles look like pointers, as programs expect.
    pub(crate) fn insert(
        &mut self,
        device: usize,
        flags: u32,
        groups: Option<ContextGroups>,
    ) -> u64 {
        self.handle_count += 1;
        let id = 0x5147_0000_0000 + self.handle_count * 0x100;
        let context = Context {
            device,
            flags,
            users: 1,
            stack_limit: DEFAULT_STACK_BYTES,
            stack_per_thread: DEFAULT_STACK_BYTES,
            limits: BTreeMap::new(),
            heap: 0,
            groups,
        };
        self.live.insert(id, context);
        id
    }
}
