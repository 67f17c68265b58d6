//! Talks to the agent: bounds every wait and reconnects after a restart of the agent.
//!
//! Every function here runs with the session lock held, and only when the credit page does not
//! suffice.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bursar_protocol::connect::{connect, read_message};
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fd_passing::receive_with_fd;
use bursar_protocol::messages::{self, Account, HeldCredit, Message, Recovery, Request, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{CONTAINER_RUN_DIR, POISON_SINCE, VERSION};

use crate::session_state::{MAX_DEVICES, SessionGuard, SessionState};

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
    let begun = Instant::now();
    loop {
        let answer = converse();
        match answer {
            Err(AgentError::Unavailable)
                if agent_is_expected() && !state.gave_up_waiting.load(Ordering::Relaxed) => {}
            _ => return answer,
        }
        if begun.elapsed() > AGENT_TIMEOUT {
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

fn exchange(
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
fn session_stream(state: &SessionState) -> Option<UnixStream> {
    let fd = state
        .socket
        .load(Ordering::Acquire)
        .checked_sub(1)
        .filter(|fd| *fd >= 0)?;
    let ours = socket_inode(fd) == Some(state.socket_inode.load(Ordering::Relaxed));
    if !ours {
        state.socket.store(0, Ordering::Release);
        return None;
    }
    // SAFETY: the descriptor is open and the socket that this module opened; every user of the
    // stream releases it again.
    Some(unsafe { UnixStream::from_raw_fd(fd) })
}

/// Closes the session's socket.
fn close_session(state: &SessionState) {
    drop(session_stream(state));
    state.socket.store(0, Ordering::Release);
}

fn now_ms() -> u64 {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGUN.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Classifies an error. A timeout starts the backoff; a closed connection does not, because no
/// thread waited for it.
fn classify(state: &SessionState, error: io::Error) -> AgentError {
    let why = AgentError::from(error);
    if why == AgentError::TimedOut {
        state.gave_up_waiting.store(true, Ordering::Relaxed);
        let until = now_ms() + BACKOFF.as_millis() as u64;
        state.backoff_until.store(until, Ordering::Relaxed);
    }
    why
}

/// Connects, sends what the process holds, and migrates to the page that the agent sends.
fn open_session(
    state: &SessionState,
    _guard: &SessionGuard<'_>,
    map: MapDevices,
) -> Result<(), AgentError> {
    if now_ms() < state.backoff_until.load(Ordering::Relaxed) {
        return Err(AgentError::TimedOut);
    }
    let timeout = match state.gave_up_waiting.load(Ordering::Relaxed) {
        true => SHORT_TIMEOUT,
        false => AGENT_TIMEOUT,
    };
    let stream = connect(timeout).map_err(|error| classify(state, error))?;
    let inode = socket_inode(stream.as_raw_fd()).ok_or(AgentError::Unavailable)?;
    // Frozen during the migration, so that no thread charges the old page.
    let frozen = FrozenPage::freeze(state);
    let (page, version, quotas) =
        handshake(state, &stream, &frozen.words).map_err(|error| classify(state, error))?;
    migrate_page(state, page, quotas, frozen, map);
    state.version.store(version.into(), Ordering::Relaxed);
    let _ = stream.set_read_timeout(Some(AGENT_TIMEOUT));
    state.socket_inode.store(inode, Ordering::Relaxed);
    let socket = stream.into_raw_fd() + 1;
    state.socket.store(socket, Ordering::Release);
    state.gave_up_waiting.store(false, Ordering::Relaxed);
    Ok(())
}

/// Returns the inode of a socket, or `None` for any other descriptor.
fn socket_inode(fd: i32) -> Option<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes the whole structure when it answers zero.
    let stat = unsafe { (libc::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// The current page with its credit words frozen. They become usable again on drop, unless the
/// process has migrated to another page.
struct FrozenPage<'a> {
    state: &'a SessionState,
    words: Vec<CreditWord>,
}

impl FrozenPage<'_> {
    fn freeze(state: &SessionState) -> FrozenPage<'_> {
        let slots = (0..state.accounts().len()).filter_map(|index| state.page()?.slot(index));
        let words = slots.map(|slot| slot.freeze()).collect();
        FrozenPage { state, words }
    }

    /// Leaves the words frozen, because the process has another page.
    fn keep_frozen(mut self) {
        self.words.clear();
    }
}

impl Drop for FrozenPage<'_> {
    fn drop(&mut self) {
        for (index, word) in self.words.iter().enumerate() {
            if let Some(slot) = self.state.page().and_then(|page| page.slot(index)) {
                slot.set(*word);
            }
        }
    }
}

fn handshake(
    state: &SessionState,
    stream: &UnixStream,
    frozen: &[CreditWord],
) -> io::Result<(CreditPage, u16, Vec<messages::Quota>)> {
    let holdings = state
        .accounts()
        .iter()
        .zip(frozen)
        .map(|(account, word)| HeldCredit {
            account: account.clone(),
            granted: Units(word.granted),
            used: Units(word.used),
        });
    let hello = Request::Hello {
        version: VERSION,
        image: process_image_id(state),
        holdings: holdings.collect(),
    };
    let mut stream = stream;
    stream.write_all(&hello.frame())?;
    let mut bytes = vec![0; messages::HEADER + messages::MAX_PAYLOAD];
    let (mut length, fd) = receive_with_fd(stream, &mut bytes)?;
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    while length < messages::HEADER {
        length += read_nonempty(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
    }
    let wanted = messages::HEADER
        + messages::payload_length([bytes[0], bytes[1]]).map_err(io::Error::other)?;
    while length < wanted {
        length += read_nonempty(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
    }
    let payload = bytes.get(messages::HEADER..wanted).ok_or_else(short)?;
    match (Response::parse(payload).map_err(io::Error::other)?, fd) {
        (
            Response::Welcome {
                version,
                generation,
                quotas,
            },
            Some(fd),
        ) => {
            let page = CreditPage::open(fd).map_err(io::Error::other)?;
            let generation = generation.unwrap_or(0);
            state
                .process_generation
                .store(generation, Ordering::Release);
            Ok((page, version, quotas))
        }
        _ => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
    }
}

/// Migrates to a new page: what each account used and exported goes along.
fn migrate_page(
    state: &SessionState,
    page: CreditPage,
    quotas: Vec<messages::Quota>,
    frozen: FrozenPage<'_>,
    map: MapDevices,
) {
    let accounts: Vec<Account> = quotas.into_iter().map(|quota| quota.account).collect();
    let same = state.accounts() == accounts.as_slice();
    if !same {
        if frozen.words.is_empty() {
            map(&accounts, &mut |device, account| {
                if let Some(place) = state.devices.get(device).filter(|_| device < MAX_DEVICES) {
                    place.store(account + 1, Ordering::Release);
                }
            });
            let managed = accounts
                .iter()
                .position(|account| *account == Account::Managed);
            let managed = managed
                .and_then(|index| u8::try_from(index + 1).ok())
                .unwrap_or(0);
            state.managed.store(managed, Ordering::Release);
            state
                .accounts
                .store(Box::into_raw(Box::new(accounts)), Ordering::Release);
        } else {
            // The process cannot follow a different set of accounts. It keeps the page that it has:
            // granted credit stays usable, and more is refused.
            return;
        }
    }
    let page = page.leak();
    for index in 0..frozen.words.len() {
        let before = state.page().and_then(|page| page.slot(index));
        if let (Some(before), Some(after)) = (before, page.slot(index)) {
            after.set_exported(before.exported());
        }
    }
    frozen.keep_frozen();
    state
        .page
        .store(std::ptr::from_ref(page).cast_mut(), Ordering::Release);
    state.session_established.store(true, Ordering::Release);
}

/// Returns the random id of this process image. A forked child draws its own.
fn process_image_id(state: &SessionState) -> u64 {
    let known = state.process_image_id.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // `RandomState` is keyed by the system's randomness once per process. A forked child inherits
    // the keys, so the pid is hashed as well.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let drawn = hasher.finish() | 1;
    state.process_image_id.store(drawn, Ordering::Relaxed);
    drawn
}

fn read_nonempty(stream: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    match stream.read(bytes)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_stays_usable_when_a_migration_is_given_up() {
        // SAFETY: every field of the state is an atomic, for which zero is a value.
        let state: SessionState = unsafe { std::mem::zeroed() };
        let (page, _fd) = CreditPage::create(1).unwrap();
        let page = page.leak();
        state
            .page
            .store(std::ptr::from_ref(page).cast_mut(), Ordering::Release);
        let accounts = Box::into_raw(Box::new(vec![Account::Managed]));
        state.accounts.store(accounts, Ordering::Release);
        let slot = page.slot(0).unwrap();
        assert!(slot.grant(Units(10)));
        let given_up = FrozenPage::freeze(&state);
        assert!(slot.charge(Units(1)).is_err());
        drop(given_up);
        assert_eq!(slot.charge(Units(10)), Ok(()));
        FrozenPage::freeze(&state).keep_frozen();
        assert!(slot.charge(Units(0)).is_err(), "it moved away");
    }
}
