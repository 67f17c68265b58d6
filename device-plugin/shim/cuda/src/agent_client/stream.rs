//! Exchanges messages over the session's socket.

use std::io::{self, Write};
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bursar_protocol::connect::read_message;
use bursar_protocol::messages::{Message, Request, Response};

use super::session::{open_session, socket_inode};
use super::{AgentError, BACKOFF, MapDevices};
use crate::session_state::{SessionGuard, SessionState};

pub(super) fn exchange(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    message: &Request,
) -> Result<Response, AgentError> {
    if session_stream(state).map(leave_open).is_some() {
        match call_once(state, message) {
            // The agent restarted since the last exchange.
            Err(AgentError::Unavailable) => {}
            answer => return answer,
        }
    }
    open_session(state, guard, map)?;
    call_once(state, message)
}

/// Leaves the stream's descriptor open, because the state owns it.
fn leave_open(stream: UnixStream) {
    let _ = stream.into_raw_fd();
}

/// Sends one message and reads the answer. Without an answer the session is closed.
fn call_once(state: &SessionState, message: &Request) -> Result<Response, AgentError> {
    let mut stream = session_stream(state).ok_or(AgentError::Unavailable)?;
    let answer = stream
        .write_all(&message.frame())
        .and_then(|()| read_message(&mut stream));
    leave_open(stream);
    answer.map_err(|error| {
        close_session(state);
        classify(state, error)
    })
}

/// Returns the session's socket if its descriptor is still that socket: a program may close every
/// descriptor and reuse the number. The caller releases the stream by [`leave_open`].
pub(super) fn session_stream(state: &SessionState) -> Option<UnixStream> {
    let fd = state
        .socket
        .load(Ordering::Acquire)
        .checked_sub(1)
        .filter(|fd| *fd >= 0)?;
    let is_own_socket = socket_inode(fd) == Some(state.socket_inode.load(Ordering::Relaxed));
    if !is_own_socket {
        state.socket.store(0, Ordering::Release);
        return None;
    }
    // SAFETY: the descriptor is open and the socket that this module opened; every user of the
    // stream releases it again.
    Some(unsafe { UnixStream::from_raw_fd(fd) })
}

/// Closes the session's socket.
pub(super) fn close_session(state: &SessionState) {
    drop(session_stream(state));
    state.socket.store(0, Ordering::Release);
}

pub(super) fn now_ms() -> u64 {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGUN.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Classifies an error. A timeout starts the backoff; a closed connection does not, because no
/// thread waited for it.
pub(super) fn classify(state: &SessionState, error: io::Error) -> AgentError {
    let why = AgentError::from(error);
    if why == AgentError::TimedOut {
        state.gave_up_waiting.store(true, Ordering::Relaxed);
        let until = now_ms() + BACKOFF.as_millis() as u64;
        state.backoff_until.store(until, Ordering::Relaxed);
    }
    why
}
