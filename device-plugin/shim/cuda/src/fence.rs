//! Tells the program's libraries what the agent has told this process image: its number, its fence
//! and its quotas.

use std::ffi::{CStr, c_void};
use std::sync::atomic::Ordering;

use bursar_protocol::fence::{
    FENCE_SYMBOL, FenceFn, PROCESS_GENERATION_SYMBOL, ProcessGenerationFn, QUOTA_SYMBOL, QuotaFn,
};

use crate::session_state;

/// Returns the function where `name` is the name of one that only the shim has.
pub(crate) fn lookup(name: &CStr) -> Option<*const c_void> {
    match name {
        name if name == FENCE_SYMBOL => Some(fence as FenceFn as *const c_void),
        name if name == PROCESS_GENERATION_SYMBOL => {
            Some(process_generation as ProcessGenerationFn as *const c_void)
        }
        name if name == QUOTA_SYMBOL => Some(quota as QuotaFn as *const c_void),
        _ => None,
    }
}

/// Returns the process generation of the last handshake.
extern "C" fn process_generation() -> u64 {
    session_state::state().map_or(0, |state| state.process_generation.load(Ordering::Acquire))
}

/// Reads a device's quota from the credit page. Runtime clients call this once a second.
extern "C" fn quota(device: i32) -> u64 {
    session_state::state().map_or(0, |state| state.device_quota(device))
}

/// Reads the fence word of the credit page. Runtime clients call this before each use of memory:
/// two loads once there is a page.
extern "C" fn fence() -> u64 {
    let page = session_state::state().and_then(session_state::SessionState::page);
    page.map_or(0, |page| page.fence())
}
