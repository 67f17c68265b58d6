//! Tells libraries of the program whether the agent has fenced this image: what it writes into the credit page.

use std::ffi::CStr;

use bursar_protocol::fence::ASK;

use crate::session_state;

/// The function that is asked for by `name`, if that is this one.
pub(crate) fn lookup(name: &CStr) -> Option<bursar_protocol::fence::Ask> {
    (name == ASK).then_some(fence)
}

/// Called for each use of memory: two loads, once there is a page.
extern "C" fn fence() -> u64 {
    let page = session_state::state().and_then(session_state::SessionState::page);
    page.map_or(0, |page| page.fence())
}
