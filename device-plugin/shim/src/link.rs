//! The conversation with the agent: bounded in time, repeated after the agent's restart.
//!
//! Everything here runs with the state's lock held, and only when the credit page does not suffice.

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

use crate::state::{Held, MAX_DEVICES, State};

/// How long a call that cannot do without the agent waits for it: it may be being replaced, or have a
/// busy node. After a wait in vain nobody waits that long before it was back.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an answer may take after a wait in vain.
const IMPATIENCE: Duration = Duration::from_millis(200);

/// How long the agent is left alone after it did not answer in time: other threads must not wait
/// for it one after the other.
const QUIET: Duration = Duration::from_secs(1);

/// How often an agent that is away is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Tells which device of the driver each account is: filled into `State::devices`.
pub(crate) type MapDevices = fn(&[Account], &mut dyn FnMut(usize, u8));

/// The agent's answer to a request for credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The page holds it.
    Granted,
    /// The quota does not allow it.
    Refused,
    /// The agent does not answer.
    Away,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoAnswer {
    /// Nobody listens, or whoever did hung up.
    Away,
    /// It took too long, or did a moment ago.
    Late,
    /// The agent will not have this process, or nobody understands the other.
    Unwelcome,
}

impl From<io::Error> for NoAnswer {
    fn from(error: io::Error) -> NoAnswer {
        use io::ErrorKind::*;
        match error.kind() {
            WouldBlock | TimedOut => NoAnswer::Late,
            NotFound | ConnectionRefused | ConnectionReset | BrokenPipe | NotConnected
            | UnexpectedEof => NoAnswer::Away,
            _ => NoAnswer::Unwelcome,
        }
    }
}

/// Says hello if that was not done yet.
pub(crate) fn ensure_welcomed(state: &State, held: &Held<'_>, map: MapDevices) -> bool {
    let hello = || connect(state, held, map);
    state.page().is_some() || patiently(state, hello).is_ok()
}

/// Says hello if that was not done yet, once: an agent that is away is not waited for.
pub(crate) fn introduce(state: &State, held: &Held<'_>, map: MapDevices) {
    if state.page().is_none() {
        // The first allocation says it again.
        let _ = connect(state, held, map);
    }
}

/// Asks for `units` more of an account. A session that an agent's restart cut is taken up once.
pub(crate) fn request(
    state: &State,
    held: &Held<'_>,
    map: MapDevices,
    account: u8,
    units: Units,
) -> Answer {
    let message = ToAgent::Request { account, units };
    let ask = || exchange(state, held, map, &message);
    let answer = match may_be_granted(state, account, units) {
        true => patiently(state, ask),
        false => ask(),
    };
    match answer {
        Ok(ToShim::Granted { account: got, .. }) if got == account => Answer::Granted,
        Ok(ToShim::Refused { account: got, .. } | ToShim::Fenced { account: got })
            if got == account =>
        {
            Answer::Refused
        }
        Ok(_) => {
            forget(state);
            Answer::Away
        }
        Err(_) => Answer::Away,
    }
}

/// Asks the agent to write what the container's other processes use. Without an answer the page
/// holds what it wrote last.
pub(crate) fn refresh(state: &State, held: &Held<'_>, map: MapDevices) {
    if exchange(state, held, map, &ToAgent::Refresh) != Ok(ToShim::Refreshed) {
        forget(state);
    }
}

/// Tells that a context was made; what one takes, if the agent knows.
pub(crate) fn context_made(
    state: &State,
    held: &Held<'_>,
    map: MapDevices,
    account: u8,
) -> Option<Units> {
    match exchange(state, held, map, &ToAgent::ContextMade { account }).ok()? {
        ToShim::ContextSize {
            account: got,
            units,
        } if got == account => Some(units).filter(|units| *units > Units::ZERO),
        _ => {
            forget(state);
            None
        }
    }
}

/// Reports poison; the verdict. An agent that knows no such report, or that is away for long, has none. The account
/// is looked up in a session, and is the first where there is no other.
pub(crate) fn poisoned(
    state: &State,
    held: &Held<'_>,
    map: MapDevices,
    code: i32,
    able: bool,
    account: impl Fn() -> Option<u8>,
) -> Option<Verdict> {
    if !ensure_welcomed(state, held, map) {
        return None;
    }
    let account = account().unwrap_or_default();
    let report = ToAgent::Poisoned {
        account,
        code,
        able,
    };
    let answer = patiently(state, || {
        // Another agent may have come since.
        if state.version.load(Ordering::Relaxed) < u32::from(POISON_SINCE) {
            return Err(NoAnswer::Unwelcome);
        }
        exchange(state, held, map, &report)
    });
    match answer {
        Ok(ToShim::Verdict(verdict)) => Some(verdict),
        _ => None,
    }
}

/// Reports a denial, if there is a session: it is news, not a request.
pub(crate) fn denied(state: &State, _held: &Held<'_>, account: u8, bytes: u64, function: &str) {
    let message = ToAgent::Denied {
        account,
        bytes,
        function: function.to_owned(),
    };
    if let Some(mut stream) = session(state) {
        let sent = stream.write_all(&message.frame()).is_ok();
        let _ = stream.into_raw_fd();
        if !sent {
            forget(state);
        }
    }
}

/// Whether the quota is large enough, whatever others of the container use.
fn may_be_granted(state: &State, account: u8, units: Units) -> bool {
    let slot = state.page().and_then(|page| page.slot(account.into()));
    slot.is_none_or(|slot| {
        let granted = Units(slot.word().granted);
        slot.quota().saturating_sub(granted) >= units
    })
}

/// Repeats a conversation for as long as the agent may be being replaced.
fn patiently<T>(state: &State, converse: impl Fn() -> Result<T, NoAnswer>) -> Result<T, NoAnswer> {
    let begun = Instant::now();
    loop {
        let answer = converse();
        match answer {
            Err(NoAnswer::Away) if is_served() && !state.waited.load(Ordering::Relaxed) => {}
            _ => return answer,
        }
        if begun.elapsed() > PATIENCE {
            state.waited.store(true, Ordering::Relaxed);
            return answer;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether an agent serves this container, now or when it is back.
fn is_served() -> bool {
    Path::new(CONTAINER_RUN_DIR).is_dir()
}

fn exchange(
    state: &State,
    held: &Held<'_>,
    map: MapDevices,
    message: &ToAgent,
) -> Result<ToShim, NoAnswer> {
    if session(state).map(close).is_some() {
        match ask(state, message) {
            // The agent started again since the last conversation.
            Err(NoAnswer::Away) => {}
            answer => return answer,
        }
    }
    connect(state, held, map)?;
    ask(state, message)
}

/// Leaves the stream's descriptor open: the state owns it.
fn close(stream: UnixStream) {
    let _ = stream.into_raw_fd();
}

/// One question to the agent; without an answer the session is over.
fn ask(state: &State, message: &ToAgent) -> Result<ToShim, NoAnswer> {
    let mut stream = session(state).ok_or(NoAnswer::Away)?;
    let answer = stream
        .write_all(&message.frame())
        .and_then(|()| read(&mut stream));
    close(stream);
    answer.map_err(|error| {
        forget(state);
        noted(state, error)
    })
}

/// The socket, if it is still the one that was opened: a program that closes every descriptor may
/// have given its number to a file of its own. The caller hands it back by [`close`].
fn session(state: &State) -> Option<UnixStream> {
    let fd = state
        .socket
        .load(Ordering::Acquire)
        .checked_sub(1)
        .filter(|fd| *fd >= 0)?;
    let ours = inode(fd) == Some(state.socket_inode.load(Ordering::Relaxed));
    if !ours {
        state.socket.store(0, Ordering::Release);
        return None;
    }
    // SAFETY: the descriptor is open and the socket that this module opened; every user of the
    // stream releases it again.
    Some(unsafe { UnixStream::from_raw_fd(fd) })
}

/// Closes the session's socket.
fn forget(state: &State) {
    drop(session(state));
    state.socket.store(0, Ordering::Release);
}

fn now() -> u64 {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGUN.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Why a conversation failed; who is late is left alone for a while. Who hangs up made nobody wait.
fn noted(state: &State, error: io::Error) -> NoAnswer {
    let why = NoAnswer::from(error);
    if why == NoAnswer::Late {
        state.waited.store(true, Ordering::Relaxed);
        let until = now() + QUIET.as_millis() as u64;
        state.quiet_until.store(until, Ordering::Relaxed);
    }
    why
}

/// Connects, says hello with what the process holds, and moves to the page that the agent sends.
fn connect(state: &State, _held: &Held<'_>, map: MapDevices) -> Result<(), NoAnswer> {
    if now() < state.quiet_until.load(Ordering::Relaxed) {
        return Err(NoAnswer::Late);
    }
    let timeout = match state.waited.load(Ordering::Relaxed) {
        true => IMPATIENCE,
        false => PATIENCE,
    };
    let stream = dial(timeout).map_err(|error| noted(state, error))?;
    let inode = inode(stream.as_raw_fd()).ok_or(NoAnswer::Away)?;
    // Frozen while it moves: nothing is charged to a page that is left.
    let frozen = Frozen::of(state);
    let (page, version, quotas) =
        greet(state, &stream, &frozen.words).map_err(|error| noted(state, error))?;
    settle_in(state, page, quotas, frozen, map);
    state.version.store(version.into(), Ordering::Relaxed);
    let _ = stream.set_read_timeout(Some(PATIENCE));
    state.socket_inode.store(inode, Ordering::Relaxed);
    let socket = stream.into_raw_fd() + 1;
    state.socket.store(socket, Ordering::Release);
    state.waited.store(false, Ordering::Relaxed);
    Ok(())
}

/// The inode of a socket; `None` where the descriptor is none.
fn inode(fd: i32) -> Option<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes the whole structure when it answers zero.
    let stat = unsafe { (libc::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// The present page with its words frozen: usable again when this is dropped, unless the process
/// has moved to another.
struct Frozen<'a> {
    state: &'a State,
    words: Vec<Word>,
}

impl Frozen<'_> {
    fn of(state: &State) -> Frozen<'_> {
        let slots = (0..state.accounts().len()).filter_map(|index| state.page()?.slot(index));
        let words = slots.map(|slot| slot.freeze()).collect();
        Frozen { state, words }
    }

    /// The process has another page: this one stays frozen.
    fn leave(mut self) {
        self.words.clear();
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        for (index, word) in self.words.iter().enumerate() {
            if let Some(slot) = self.state.page().and_then(|page| page.slot(index)) {
                slot.set(*word);
            }
        }
    }
}

fn greet(
    state: &State,
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
        image: image(state),
        holdings: holdings.collect(),
    };
    let mut stream = stream;
    stream.write_all(&hello.frame())?;
    let mut bytes = vec![0; wire::HEADER + wire::MAX_PAYLOAD];
    let (mut length, fd) = receive_with_fd(stream, &mut bytes)?;
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    while length < wire::HEADER {
        length += read_some(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
    }
    let wanted =
        wire::HEADER + wire::payload_length([bytes[0], bytes[1]]).map_err(io::Error::other)?;
    while length < wanted {
        length += read_some(&mut stream, bytes.get_mut(length..).ok_or_else(short)?)?;
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
fn settle_in(
    state: &State,
    page: CreditPage,
    quotas: Vec<wire::Quota>,
    frozen: Frozen<'_>,
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
    frozen.leave();
    state
        .page
        .store(std::ptr::from_ref(page).cast_mut(), Ordering::Release);
    state.welcomed.store(true, Ordering::Release);
}

/// This process image's name: drawn at its first hello. A forked child draws its own.
fn image(state: &State) -> u64 {
    let known = state.image.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // `RandomState` is keyed by the system's randomness, once a process; a forked child inherits
    // its keys, so the pid goes in.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let drawn = hasher.finish() | 1;
    state.image.store(drawn, Ordering::Relaxed);
    drawn
}

fn read_some(stream: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    match stream.read(bytes)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_is_given_up_leaves_the_page_usable() {
        // SAFETY: every field of the state is an atomic, for which zero is a value.
        let state: State = unsafe { std::mem::zeroed() };
        let (page, _fd) = CreditPage::create(1).unwrap();
        let page = page.leak();
        state
            .page
            .store(std::ptr::from_ref(page).cast_mut(), Ordering::Release);
        let accounts = Box::into_raw(Box::new(vec![Account::Managed]));
        state.accounts.store(accounts, Ordering::Release);
        let slot = page.slot(0).unwrap();
        assert!(slot.grant(Units(10)));
        let given_up = Frozen::of(&state);
        assert!(slot.charge(Units(1)).is_err());
        drop(given_up);
        assert_eq!(slot.charge(Units(10)), Ok(()));
        Frozen::of(&state).leave();
        assert!(slot.charge(Units(0)).is_err(), "it moved away");
    }
}
