//! Opens a session with the agent.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use bursar_protocol::VERSION;
use bursar_protocol::connect::connect;
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fd_passing::receive_with_fd;
use bursar_protocol::messages::{self, Account, HeldCredit, Message, Request, Response};
use bursar_protocol::units::Units;

use super::stream::{classify, now_ms};
use super::{AGENT_TIMEOUT, AgentError, MapDevices, SHORT_TIMEOUT};
use crate::session_state::{MAX_DEVICES, SessionGuard, SessionState};

/// Connects, sends what the process holds, and migrates to the page that the agent sends.
pub(super) fn open_session(
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
pub(super) fn socket_inode(fd: i32) -> Option<u64> {
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
