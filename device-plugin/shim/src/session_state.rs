//! What a process knows about its session, in memory that a forked child gets zeroed.
//!
//! A child has neither its parent's credit page (it is not mapped there) nor the threads that may
//! hold a lock; so all of this, the lock included, is in one mapping with `MADV_WIPEONFORK` (Linux
//! 4.14), and zero means "no session yet".

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering,
};
use std::time::{Duration, Instant};

use bursar_protocol::page::Page;
use bursar_protocol::wire::Account;

/// Devices that a process can see; more than a node has.
pub(crate) const MAX_DEVICES: usize = 64;

/// How long a thread waits for another that talks to the agent. Longer than any one conversation, with
/// the wait for an agent that is being replaced.
const LOCK_TIMEOUT: Duration = Duration::from_secs(40);

/// The longest pause of a thread that waits.
const MAX_PAUSE: Duration = Duration::from_millis(1);

/// The state. Zero is a valid value of every field.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SessionState {
    /// Not zero in the process that set it up.
    pub(crate) initialized: AtomicU32,
    lock: AtomicU32,
    /// The credit page; null before the first hello.
    pub(crate) page: AtomicPtr<Page>,
    /// The page's accounts, in its order; null before the first hello.
    pub(crate) accounts: AtomicPtr<Vec<Account>>,
    /// The socket's descriptor plus one; zero when there is none.
    pub(crate) socket: AtomicI32,
    /// The socket's inode: tells it from a file that got its number.
    pub(crate) socket_inode: AtomicU64,
    /// This process image's name in hellos.
    pub(crate) process_image_id: AtomicU64,
    /// The version of the protocol that the agent answered the last hello with.
    pub(crate) version: AtomicU32,
    /// The code that poisoned this image; zero for none.
    pub(crate) poisoned: AtomicI32,
    /// Milliseconds since this library's first use before which the agent is not asked again.
    pub(crate) backoff_until: AtomicU64,
    /// The account of each device, plus one; zero where it has none.
    pub(crate) devices: [AtomicU8; MAX_DEVICES],
    /// The account of managed memory, plus one.
    pub(crate) managed: AtomicU8,
    /// Whether the agent was waited for in vain since it last answered.
    pub(crate) gave_up_waiting: AtomicBool,
    /// Whether a hello was ever answered.
    pub(crate) session_established: AtomicBool,
}

/// Held while one thread talks to the agent.
pub(crate) struct SessionGuard<'a>(&'a SessionState);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

impl SessionState {
    /// Waits for the lock, but not for ever. Only the slow path takes it: asking the agent takes
    /// longer than the pause.
    pub(crate) fn lock(&self) -> Option<SessionGuard<'_>> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(50);
        while self
            .lock
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            if begun.elapsed() > LOCK_TIMEOUT {
                return None;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(MAX_PAUSE);
        }
        Some(SessionGuard(self))
    }

    /// The credit page, if there is one.
    pub(crate) fn page(&self) -> Option<&'static Page> {
        // SAFETY: the pointer is null or a leaked page of this process: a forked child's is null.
        unsafe { self.page.load(Ordering::Acquire).as_ref() }
    }

    /// The page's accounts.
    pub(crate) fn accounts(&self) -> &[Account] {
        // SAFETY: the pointer is null or a leaked vector that nobody changes.
        unsafe { self.accounts.load(Ordering::Acquire).as_ref() }.map_or(&[], Vec::as_slice)
    }
}

/// The state of this process; `None` where the kernel cannot wipe memory on fork. Then nothing is
/// charged and so nothing allocated.
#[inline]
pub(crate) fn state() -> Option<&'static SessionState> {
    static STATE: OnceLock<Option<&'static SessionState>> = OnceLock::new();
    let state = (*STATE.get_or_init(map_wiped_on_fork))?;
    if state.initialized.load(Ordering::Acquire) == 0 {
        init_process(state);
    }
    Some(state)
}

/// The first call of a process. Its parent's pointers mean nothing here. Of threads that come together one does it,
/// or what the first has noted by then would be forgotten.
#[cold]
fn init_process(state: &SessionState) {
    let Some(_guard) = state.lock() else {
        return;
    };
    if state.initialized.load(Ordering::Acquire) != 0 {
        return;
    }
    crate::accounting::ALLOC_TABLE.clear();
    crate::deferred_free::PENDING_EVENTS.reset();
    crate::pools::POOLS.reset();
    crate::hooks::vmm::TABLE.reset();
    crate::hooks::contexts::reset();
    crate::hooks::context_registry::reset();
    crate::graphs::reset();
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
        // The process's own first call is over.
        let _ = super::state();
        // SAFETY: every field of the state is an atomic, for which zero is a value.
        let state: SessionState = unsafe { std::mem::zeroed() };
        init_process(&state);
        crate::deferred_free::PENDING_EVENTS.lock().push(7);
        init_process(&state);
        assert_eq!(*crate::deferred_free::PENDING_EVENTS.lock(), [7]);
    }
}
