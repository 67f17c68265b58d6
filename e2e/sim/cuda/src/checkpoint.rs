//! Implements process checkpoints (`cuCheckpointProcess*`) as a state of the calling process.
//!
//! A real driver acts on any process, and moves its device memory to the host. Here a process can
//! only name itself, and its memory stays on the simulated GPU.

use crate::abi::{Code, DriverResult, Out};
use crate::entry::exports;
use crate::process::lock;
use std::ffi::c_void;
use std::sync::Mutex;

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
}

static STATE: Mutex<State> = Mutex::new(State::Running);

fn check_pid(pid: i32) -> DriverResult {
    let is_own = u32::try_from(pid).is_ok_and(|pid| pid == std::process::id());
    if is_own {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// Moves the process from one state to another. Any other state is an error.
fn change(pid: i32, from: State, to: State) -> DriverResult {
    check_pid(pid)?;
    let mut state = lock(&STATE);
    if *state != from {
        return Err(Code::ILLEGAL_STATE);
    }
    *state = to;
    Ok(())
}

exports! {
    fn cuCheckpointProcessLock(pid: i32, _args: *const c_void) = change(pid, State::Running, State::Locked);
    fn cuCheckpointProcessCheckpoint(pid: i32, _args: *const c_void) = change(pid, State::Locked, State::Checkpointed);
    fn cuCheckpointProcessRestore(pid: i32, _args: *const c_void) = change(pid, State::Checkpointed, State::Locked);
    fn cuCheckpointProcessUnlock(pid: i32, _args: *const c_void) = change(pid, State::Locked, State::Running);
    fn cuCheckpointProcessGetState(pid: i32, state: Out<i32>) = {
        check_pid(pid)?;
        state.set(*lock(&STATE) as i32)
    };
    fn cuCheckpointProcessGetRestoreThreadId(pid: i32, thread: Out<i32>) = {
        check_pid(pid)?;
        thread.set(pid)
    };
}
