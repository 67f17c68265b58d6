//! Holds a process's session state in memory that the kernel zeroes in a forked child.
//!
//! A child has neither its parent's credit page, which is not mapped there, nor the threads that
//! may hold a lock. So the whole state, its lock included, is in one mapping with `MADV_WIPEONFORK`
//! (Linux 4.14). Zero means "no session yet".

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering,
};
use std::time::{Duration, Instant};

use bursar_protocol::credit_page::CreditPageLayout;
use bursar_protocol::messages::Account;

/// The largest number of devices that a process can see; more than a node has.
pub(crate) const MAX_DEVICES: usize = 64;

/// How long a thread waits for another thread that talks to the agent. Longer than any one
/// exchange, including the wait for a restarting agent.
const LOCK_TIMEOUT: Duration = Duration::from_secs(40);

/// The longest sleep between two attempts to take the lock.
const MAX_PAUSE: Duration = Duration::from_millis(1);

/// The session state of this process. Zero is a valid value of every field.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SessionState {
    /// Not zero once this process has initialized the state.
    pub(crate) initialized: AtomicU32,
    lock: AtomicU32,
    /// The credit page; null before the first handshake.
    pub(crate) page: AtomicPtr<CreditPageLayout>,
    /// The page's accounts, in its order; null before the first handshake.
    pub(crate) accounts: AtomicPtr<Vec<Account>>,
    /// The socket's descriptor plus one; zero without a socket.
    pub(crate) socket: AtomicI32,
    /// The socket's inode, which detects that the program reused the descriptor's number.
    pub(crate) socket_inode: AtomicU64,
    /// The random id of this process image, sent in each handshake.
    pub(crate) process_image_id: AtomicU64,
    /// The protocol version of the last handshake.
    pub(crate) version: AtomicU32,
    /// The agent's number of this process image; zero before the first handshake.
    pub(crate) process_generation: AtomicU64,
    /// The error code that poisoned this image; zero for none.
    pub(crate) poisoned: AtomicI32,
    /// Milliseconds since this library's first use before which the shim does not call the agent.
    pub(crate) backoff_until: AtomicU64,
    /// The account of each device, plus one; zero for a device without an account.
    pub(crate) devices: [AtomicU8; MAX_DEVICES],
    /// The account of managed memory, plus one.
    pub(crate) managed: AtomicU8,
    /// Whether a wait for the agent timed out since the agent last answered.
    pub(crate) gave_up_waiting: AtomicBool,
    /// Whether a handshake ever succeeded.
    pub(crate) session_established: AtomicBool,
}

/// Exclusive right of one thread to talk to the agent.
pub(crate) struct SessionGuard<'a>(&'a SessionState);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

impl SessionState {
    /// Takes the lock, or returns `None` after [`LOCK_TIMEOUT`]. Only the slow path takes the lock,
    /// because an exchange with the agent takes longer than a pause.
    pub(crate) fn lock(&self) -> Option<SessionGuard<'_>> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(50);
        while self
            .lock
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            if start.elapsed() > LOCK_TIMEOUT {
                return None;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(MAX_PAUSE);
        }
        Some(SessionGuard(self))
    }

    /// Returns the credit page, if there is one.
    pub(crate) fn page(&self) -> Option<&'static CreditPageLayout> {
        // SAFETY: the pointer is null or a leaked page of this process: a forked child's is null.
        unsafe { self.page.load(Ordering::Acquire).as_ref() }
    }

    /// Returns a device's quota in bytes as the agent last wrote it; zero without an account.
    pub(crate) fn device_quota(&self, device: i32) -> u64 {
        let account = usize::try_from(device)
            .ok()
            .and_then(|device| self.devices.get(device))
            .and_then(|account| account.load(Ordering::Acquire).checked_sub(1));
        let slot = account.and_then(|account| self.page()?.slot(usize::from(account)));
        slot.map_or(0, |slot| slot.quota().bytes())
    }

    /// Returns the page's accounts.
    pub(crate) fn accounts(&self) -> &[Account] {
        // SAFETY: the pointer is null or a leaked vector that is never modified.
        unsafe { self.accounts.load(Ordering::Acquire).as_ref() }.map_or(&[], Vec::as_slice)
    }
}

/// Returns the state of this process, or `None` where the kernel cannot wipe memory on fork.
/// Without a state every charge is denied.
#[inline]
pub(crate) fn state() -> Option<&'static SessionState> {
    static STATE: OnceLock<Option<&'static SessionState>> = OnceLock::new();
    let state = (*STATE.get_or_init(map_wiped_on_fork))?;
    if state.initialized.load(Ordering::Acquire) == 0 {
        init_process(state);
    }
    Some(state)
}

/// Initializes the state at the first call of a process, where the parent's pointers mean nothing.
/// Only one thread may run this: a second run would discard allocations already recorded by the
/// first.
#[cold]
fn init_process(state: &SessionState) {
    let Some(_guard) = state.lock() else {
        return;
    };
    if state.initialized.load(Ordering::Acquire) != 0 {
        return;
    }
    for reset in crate::FORK_RESETS {
        reset();
    }
    state.initialized.store(1, Ordering::Release);
}

fn map_wiped_on_fork() -> Option<&'static SessionState> {
    const { assert!(size_of::<SessionState>() <= 4096) };
    // SAFETY: a fresh private mapping, larger than the state, that is never unmapped.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range is the mapping just made.
    if unsafe { libc::madvise(address, 4096, libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    // SAFETY: page-aligned, zeroed, valid for ever, and every field is an atomic for which zero is
    // a value.
    Some(unsafe { &*address.cast::<SessionState>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_initialization_keeps_recorded_allocations() {
        // The test process's own first call must be over, because the calls below use the same
        // statics.
        let _ = super::state();
        // SAFETY: every field of the state is an atomic, for which zero is a value.
        let state: SessionState = unsafe { std::mem::zeroed() };
        init_process(&state);
        crate::deferred_free::PENDING_EVENTS.lock().push(7);
        init_process(&state);
        assert_eq!(*crate::deferred_free::PENDING_EVENTS.lock(), [7]);
    }
}
