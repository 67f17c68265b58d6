//! Talks to the agent: bounds every wait and reconnects after a restart of the agent.
//!
//! Every function here runs with the session lock held, and only when the credit page does not
//! suffice.

mod session;
mod stream;

use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bursar_protocol::messages::{Account, Message, Recovery, Request, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{CONTAINER_RUN_DIR, POISON_SINCE};

use crate::session_state::{SessionGuard, SessionState};
use session::open_session;
use stream::{close_session, exchange, session_stream};

/// How long a call that needs the agent waits for it, because the agent may be restarting or its
/// node may be busy. After a timeout, calls wait only [`SHORT_TIMEOUT`] until the agent answers
/// again.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an exchange may take after a timeout.
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the shim leaves the agent alone after a timeout, so that threads do not wait for it in
/// turn.
const BACKOFF: Duration = Duration::from_secs(1);

/// How often the shim tries to reach an agent that is down.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Maps accounts to the driver's devices: the result goes into [`SessionState::devices`].
pub(crate) type MapDevices = fn(&[Account], &mut dyn FnMut(usize, u8));

/// The outcome of a request for credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CreditOutcome {
    /// The page has the credit.
    Granted,
    /// The quota does not allow it.
    Refused,
    /// The agent does not answer.
    Unavailable,
}

/// Why an exchange with the agent failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentError {
    /// The agent does not listen, or it closed the connection.
    Unavailable,
    /// The exchange timed out, or one did a moment ago.
    TimedOut,
    /// The agent rejects this process, or a message could not be parsed.
    Rejected,
}

impl From<io::Error> for AgentError {
    fn from(error: io::Error) -> AgentError {
        use io::ErrorKind::*;
        match error.kind() {
            WouldBlock | TimedOut => AgentError::TimedOut,
            NotFound | ConnectionRefused | ConnectionReset | BrokenPipe | NotConnected
            | UnexpectedEof => AgentError::Unavailable,
            _ => AgentError::Rejected,
        }
    }
}

/// Opens a session unless there is one, and waits for an agent that is restarting.
pub(crate) fn ensure_session(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
) -> bool {
    let hello = || open_session(state, guard, map);
    state.page().is_some() || with_retry(state, hello).is_ok()
}

/// Opens a session unless there is one. Does not wait for an agent that is down.
pub(crate) fn connect_once(state: &SessionState, guard: &SessionGuard<'_>, map: MapDevices) {
    if state.page().is_none() {
        // The first allocation connects again.
        let _ = open_session(state, guard, map);
    }
}

/// Requests `units` more credit for an account. Reconnects once where the agent restarted since the
/// last exchange.
pub(crate) fn request_credit(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    account: u8,
    units: Units,
) -> CreditOutcome {
    let message = Request::Credit { account, units };
    let send = || exchange(state, guard, map, &message);
    let answer = match quota_allows(state, account, units) {
        true => with_retry(state, send),
        false => send(),
    };
    match answer {
        Ok(Response::Granted {
            account: answered, ..
        }) if answered == account => CreditOutcome::Granted,
        Ok(
            Response::Refused {
                account: answered, ..
            }
            | Response::Fenced { account: answered },
        ) if answered == account => CreditOutcome::Refused,
        Ok(_) => {
            close_session(state);
            CreditOutcome::Unavailable
        }
        Err(_) => CreditOutcome::Unavailable,
    }
}

/// Asks the agent to write the usage of the container's other processes into the page. Without an
/// answer the page keeps the last values.
pub(crate) fn refresh_usage(state: &SessionState, guard: &SessionGuard<'_>, map: MapDevices) {
    if exchange(state, guard, map, &Request::Refresh) != Ok(Response::Refreshed) {
        close_session(state);
    }
}

/// Reports a new context. Returns the size of a context, if the agent has measured it.
pub(crate) fn report_context(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    account: u8,
) -> Option<Units> {
    match exchange(state, guard, map, &Request::ContextMade { account }).ok()? {
        Response::ContextSize {
            account: answered,
            units,
        } if answered == account => Some(units).filter(|units| *units > Units::ZERO),
        _ => {
            close_session(state);
            None
        }
    }
}

/// Reports a sticky error and returns the agent's decision. Returns none for an agent that is too
/// old or down. `account` runs within a session; without a result the first account is reported.
pub(crate) fn report_poison(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    code: i32,
    able: bool,
    account: impl Fn() -> Option<u8>,
) -> Option<Recovery> {
    if !ensure_session(state, guard, map) {
        return None;
    }
    let account = account().unwrap_or_default();
    let report = Request::Poisoned {
        account,
        code,
        can_reexec: able,
    };
    let answer = with_retry(state, || {
        // Another agent may have answered the last handshake.
        if state.version.load(Ordering::Relaxed) < u32::from(POISON_SINCE) {
            return Err(AgentError::Rejected);
        }
        exchange(state, guard, map, &report)
    });
    match answer {
        Ok(Response::Recovery(verdict)) => Some(verdict),
        _ => None,
    }
}

/// Reports a denied allocation, if there is a session. No answer follows.
pub(crate) fn report_denial(
    state: &SessionState,
    _guard: &SessionGuard<'_>,
    account: u8,
    bytes: u64,
    function: &str,
) {
    let message = Request::Denied {
        account,
        bytes,
        function: function.to_owned(),
    };
    if let Some(mut stream) = session_stream(state) {
        let sent = stream.write_all(&message.frame()).is_ok();
        let _ = stream.into_raw_fd();
        if !sent {
            close_session(state);
        }
    }
}

/// Returns whether the quota is large enough, whatever the container's other processes use.
fn quota_allows(state: &SessionState, account: u8, units: Units) -> bool {
    let slot = state.page().and_then(|page| page.slot(account.into()));
    slot.is_none_or(|slot| {
        let granted = Units(slot.word().granted);
        slot.quota().saturating_sub(granted) >= units
    })
}

/// Repeats an exchange while the agent may be restarting, for at most [`AGENT_TIMEOUT`].
fn with_retry<T>(
    state: &SessionState,
    converse: impl Fn() -> Result<T, AgentError>,
) -> Result<T, AgentError> {
    let start = Instant::now();
    loop {
        let answer = converse();
        match answer {
            Err(AgentError::Unavailable)
                if agent_is_expected() && !state.gave_up_waiting.load(Ordering::Relaxed) => {}
            _ => return answer,
        }
        if start.elapsed() > AGENT_TIMEOUT {
            state.gave_up_waiting.store(true, Ordering::Relaxed);
            return answer;
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Returns whether an agent serves this container, now or after its restart.
fn agent_is_expected() -> bool {
    Path::new(CONTAINER_RUN_DIR).is_dir()
}
