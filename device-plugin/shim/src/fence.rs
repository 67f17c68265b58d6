//! Tells the program's libraries whether the agent has fenced this process image.

use std::ffi::CStr;

use bursar_protocol::fence::FENCE_SYMBOL;

use crate::session_state;

/// Returns the fence function where `name` is its name.
pub(crate) fn lookup(name: &CStr) -> Option<bursar_protocol::fence::FenceFn> {
    (name == FENCE_SYMBOL).then_some(fence)
}

/// Reads the fence word of the credit page. Runtime clients call this before each use of memory:
/// two loads once there is a page.
extern "C" fn fence() -> u64 {
    let page = session_state::state().and_then(session_state::SessionState::page);
    page.map_or(0, |page| page.fence())
}
