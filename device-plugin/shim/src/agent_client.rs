//! The conversation with the agent: bounded in time, repeated after the agent's restart.
//!
//! Everything here runs with the state's lock guard, and only when the credit page does not suffice.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bursar_protocol::dial::{dial, read};
use bursar_protocol::page::CreditPage;
use bursar_protocol::socket::receive_with_fd;
use bursar_protocol::units::Units;
use bursar_protocol::wire::{self, Account, Holding, Message, ToAgent, ToShim, Verdict};
use bursar_protocol::word::Word;
use bursar_protocol::{CONTAINER_RUN_DIR, POISON_SINCE, VERSION};

use crate::session_state::{MAX_DEVICES, SessionGuard, SessionState};

/// How long a call that cannot do without the agent waits for it: it may be being replaced, or have a
/// busy node. After a wait in vain nobody waits that long before it was back.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an answer may take after a wait in vain.
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the agent is left alone after it did not answer in time: other threads must not wait
/// for it one after the other.
const BACKOFF: Duration = Duration::from_secs(1);

/// How often an agent that is away is looked for.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Tells which device of the driver each account is: filled into `State::devices`.
pub(crate) type MapDevices = fn(&[Account], &mut dyn FnMut(usize, u8));

/// The agent's answer to a request for credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CreditOutcome {
    /// The page holds it.
    Granted,
    /// The quota does not allow it.
    Refused,
    /// The agent does not answer.
    Unavailable,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentError {
    /// Nobody listens, or whoever did hung up.
    Unavailable,
    /// It took too long, or did a moment ago.
    TimedOut,
    /// The agent will not have this process, or nobody understands the other.
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

/// Says hello if that was not done yet.
pub(crate) fn ensure_session(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
) -> bool {
    let hello = || connect(state, guard, map);
    state.page().is_some() || with_retry(state, hello).is_ok()
}

/// Says hello if that was not done yet, once: an agent that is away is not waited for.
pub(crate) fn connect_once(state: &SessionState, guard: &SessionGuard<'_>, map: MapDevices) {
    if state.page().is_none() {
        // The first allocation says it again.
        let _ = connect(state, guard, map);
    }
}

/// Asks for `units` more of an account. A session that an agent's restart cut is taken up once.
pub(crate) fn request_credit(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    account: u8,
    units: Units,
) -> CreditOutcome {
    let message = ToAgent::Request { account, units };
    let send = || exchange(state, guard, map, &message);
    let answer = match quota_allows(state, account, units) {
        true => with_retry(state, send),
        false => send(),
    };
    match answer {
        Ok(ToShim::Granted { account: got, .. }) if got == account => CreditOutcome::Granted,
        Ok(ToShim::Refused { account: got, .. } | ToShim::Fenced { account: got })
            if got == account =>
        {
            CreditOutcome::Refused
        }
        Ok(_) => {
            close_session(state);
            CreditOutcome::Unavailable
        }
        Err(_) => CreditOutcome::Unavailable,
    }
}

/// Asks the agent to write what the container's other processes use. Without an answer the page
/// holds what it wrote last.
pub(crate) fn refresh_usage(state: &SessionState, guard: &SessionGuard<'_>, map: MapDevices) {
    if exchange(state, guard, map, &ToAgent::Refresh) != Ok(ToShim::Refreshed) {
        close_session(state);
    }
}

/// Tells that a context was made; what one takes, if the agent knows.
pub(crate) fn report_context(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    account: u8,
) -> Option<Units> {
    match exchange(state, guard, map, &ToAgent::ContextMade { account }).ok()? {
        ToShim::ContextSize {
            account: got,
            units,
        } if got == account => Some(units).filter(|units| *units > Units::ZERO),
        _ => {
            close_session(state);
            None
        }
    }
}

/// Reports poison; the verdict. An agent that knows no such report, or that is away for long, has none. The account
/// is looked up in a session, and is the first where there is no other.
pub(crate) fn report_poison(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    code: i32,
    able: bool,
    account: impl Fn() -> Option<u8>,
) -> Option<Verdict> {
    if !ensure_session(state, guard, map) {
        return None;
    }
    let account = account().unwrap_or_default();
    let report = ToAgent::Poisoned {
        account,
        code,
        able,
    };
    let answer = with_retry(state, || {
        // Another agent may have come since.
        if state.version.load(Ordering::Relaxed) < u32::from(POISON_SINCE) {
            return Err(AgentError::Rejected);
        }
        exchange(state, guard, map, &report)
    });
    match answer {
        Ok(ToShim::Verdict(verdict)) => Some(verdict),
        _ => None,
    }
}

/// Reports a denial, if there is a session: it is news, not a request.
pub(crate) fn report_denial(
    state: &SessionState,
    _guard: &SessionGuard<'_>,
    account: u8,
    bytes: u64,
    function: &str,
) {
    let message = ToAgent::Denied {
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

/// Whether the quota is large enough, whatever others of the container use.
fn quota_allows(state: &SessionState, account: u8, units: Units) -> bool {
    let slot = state.page().and_then(|page| page.slot(account.into()));
    slot.is_none_or(|slot| {
        let granted = Units(slot.word().granted);
        slot.quota().saturating_sub(granted) >= units
    })
}

/// Repeats a conversation for as long as the agent may be being replaced.
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

/// Whether an agent serves this container, now or when it is back.
fn agent_is_expected() -> bool {
    Path::new(CONTAINER_RUN_DIR).is_dir()
}

fn exchange(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    map: MapDevices,
    message: &ToAgent,
) -> Result<ToShim, AgentError> {
    if session_stream(state).map(leave_open).is_some() {
        match call_once(state, message) {
            // The agent started again since the last conversation.
            Err(AgentError::Unavailable) => {}
            answer => return answer,
        }
    }
    connect(state, guard, map)?;
    call_once(state, message)
}

/// Leaves the stream's descriptor open: the state owns it.
fn leave_open(stream: UnixStream) {
    let _ = stream.into_raw_fd();
}

/// One question to the agent; without an answer the session is over.
fn call_once(state: &SessionState, message: &ToAgent) -> Result<ToShim, AgentError> {
    let mut stream = session_stream(state).ok_or(AgentError::Unavailable)?;
    let answer = stream
        .write_all(&message.frame())
        .and_then(|()| read(&mut stream));
    leave_open(stream);
    answer.map_err(|error| {
        close_session(state);
        classify(state, error)
    })
}

/// The socket, if it is still the one that was opened: a program that closes every descriptor may
/// have given its number to a file of its own. The caller hands it back by [`close`].
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

/// Why a conversation failed; who is late is left alone for a while. Who hangs up made nobody wait.
fn classify(state: &SessionState, error: io::Error) -> AgentError {
    let why = AgentError::from(error);
    if why == AgentError::TimedOut {
        state.gave_up_waiting.store(true, Ordering::Relaxed);
        let until = now_ms() + BACKOFF.as_millis() as u64;
        state.backoff_until.store(until, Ordering::Relaxed);
    }
    why
}

/// Connects, says hello with what the process holds, and moves to the page that the agent sends.
fn connect(
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
    let stream = dial(timeout).map_err(|error| classify(state, error))?;
    let inode = socket_inode(stream.as_raw_fd()).ok_or(AgentError::Unavailable)?;
    // Frozen while it moves: nothing is charged to a page that is left.
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

/// The inode of a socket; `None` where the descriptor is none.
fn socket_inode(fd: i32) -> Option<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes the whole structure when it answers zero.
    let stat = unsafe { (libc::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// The present page with its words frozen: usable again when this is dropped, unless the process
/// has moved to another.
struct FrozenPage<'a> {
    state: &'a SessionState,
    words: Vec<Word>,
}

impl FrozenPage<'_> {
    fn freeze(state: &SessionState) -> FrozenPage<'_> {
        let slots = (0..state.accounts().len()).filter_map(|index| state.page()?.slot(index));
        let words = slots.map(|slot| slot.freeze()).collect();
        FrozenPage { state, words }
    }

    /// The process has another page: this one stays frozen.
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
    frozen: &[Word],
) -> io::Result<(CreditPage, u16, Vec<wire::Quota>)> {
    let holdings = state
        .accounts()
        .iter()
        .zip(frozen)
        .map(|(account, word)| Holding {
            account: account.clone(),
            granted: Units(word.granted),
            used: Units(word.used),
        });
    let hello = ToAgent::Hello {
        version: VERSION,
        image: process_image_id(state),
        holdings: holdings.collect(),
    };
    let mut stream = stream;
    stream.write_all(&hello.frame())?;
    let mut bytes = vec![0; wire::HEADER + wire::MAX_PAYLOAD];
    let (mut length, fd) = receive_with_fd(stream, &mut bytes)?;
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    while length < wire::HEADER {
        length += read_nonempty(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
    }
    let wanted =
        wire::HEADER + wire::payload_length([bytes[0], bytes[1]]).map_err(io::Error::other)?;
    while length < wanted {
        length += read_nonempty(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
    }
    let payload = bytes.get(wire::HEADER..wanted).ok_or_else(short)?;
    match (ToShim::parse(payload).map_err(io::Error::other)?, fd) {
        (
            ToShim::Welcome {
                version, quotas, ..
            },
            Some(fd),
        ) => {
            let page = CreditPage::open(fd).map_err(io::Error::other)?;
            Ok((page, version, quotas))
        }
        _ => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
    }
}

/// Moves to a new page: what was used by each account goes along.
fn migrate_page(
    state: &SessionState,
    page: CreditPage,
    quotas: Vec<wire::Quota>,
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
            // Another set of accounts than this process was charged to cannot be followed: what is
            // granted stays usable on the page that it has, and more is refused.
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

/// This process image's name: drawn at its first hello. A forked child draws its own.
fn process_image_id(state: &SessionState) -> u64 {
    let known = state.process_image_id.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // `RandomState` is keyed by the system's randomness, once a process; a forked child inherits
    // its keys, so the pid goes in.
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
