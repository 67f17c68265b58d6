//! Executes the program again in its own process after a fault poisoned the process image.
//!
//! The new image is the container's main process as the container runtime started it. The library
//! saves the start state when the loader loads it, before the program's first instruction. Saved
//! are the program, arguments, environment, working directory, umask, CPU affinity, blocked and
//! ignored signals. Descriptors are the three standard ones that the process was given. A standard
//! descriptor that the program replaced leads to `/dev/null`, because the replacement may keep the
//! GPU's memory. Every other process of the pid namespace is killed. User and group, resource
//! limits, priority and files that the program wrote are not restored.
//!
//! Only the first process of a pid namespace does this. It is the main process of a container with
//! a pid namespace of its own, and may kill all others there. The agent checks the container, and
//! limits how often this happens.

mod start_state;

use start_state::StartState;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How the container's main process was started; empty in any other process.
static START_STATE: OnceLock<StartState> = OnceLock::new();

/// How long the other processes may take to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// One more than the highest signal.
const SIGNAL_END: c_int = 65;

/// Higher descriptors are not closed where the kernel has no `close_range`.
const MAX_DESCRIPTORS: libc::rlim_t = 1 << 20;

/// `CLOSE_RANGE_CLOEXEC` (Linux 5.11).
const CLOSE_RANGE_CLOEXEC: c_int = 4;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Saves the start state. Runs in every process that loads the library, so it does almost nothing
/// in all but one.
#[cfg_attr(test, allow(dead_code, reason = "the tests load no library"))]
extern "C" fn on_load() {
    if std::process::id() == 1
        && let Some(start) = StartState::read()
    {
        let _ = START_STATE.set(start);
    }
}

/// Returns whether this process could be executed again.
pub(crate) fn is_possible() -> bool {
    std::process::id() == 1 && START_STATE.get().is_some()
}

/// Executes the program again. Returns only where that is impossible.
pub(crate) fn execute() {
    if let Some(start) = START_STATE.get().filter(|_| is_possible()) {
        start.execute();
    }
}

/// The working directory to return to.
struct SavedCwd(c_int);

impl SavedCwd {
    /// Changes to a directory. Returns `None` where it no longer exists.
    fn change_to(to: &CStr) -> Option<SavedCwd> {
        // SAFETY: strings that end with a zero.
        unsafe {
            let here = libc::open(c".".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
            if libc::chdir(to.as_ptr()) == 0 {
                return Some(SavedCwd(here));
            }
            libc::close(here);
            None
        }
    }

    fn restore(self) {
        // SAFETY: the descriptor is this value's own.
        unsafe {
            libc::fchdir(self.0);
            libc::close(self.0);
        }
    }
}

/// Blocks exactly these signals in this thread. Returns those that were blocked before.
fn set_signal_mask(signals: u64) -> u64 {
    let (mut before, mut set) = (0, MaybeUninit::<libc::sigset_t>::uninit());
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: libc functions initialize the sets before they are read.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigemptyset(old.as_mut_ptr());
        for signal in (1..SIGNAL_END).filter(|signal| signals >> (signal - 1) & 1 == 1) {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), old.as_mut_ptr());
        for signal in 1..SIGNAL_END {
            before |= u64::from(libc::sigismember(old.as_ptr(), signal) == 1) << (signal - 1);
        }
    }
    before
}

/// Kills every other process of the pid namespace, and reaps this process's children.
fn kill_other_processes() {
    let until = Instant::now() + KILL_TIMEOUT;
    loop {
        // SAFETY: neither call takes memory. The first process of a pid namespace signals no
        // process outside of it.
        let ended = unsafe {
            libc::kill(-1, libc::SIGKILL);
            libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL)
        };
        match ended {
            ..0 => return,
            0 if Instant::now() > until => return,
            0 => std::thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
    }
}

/// Marks every descriptor but the standard ones as close-on-exec.
fn close_nonstandard_descriptors() {
    // SAFETY: system calls on numbers; a descriptor that is not open is an error without effect.
    unsafe {
        if libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_RANGE_CLOEXEC) == 0 {
            return;
        }
        let mut limit = MaybeUninit::<libc::rlimit>::uninit();
        let most = match libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) {
            0 => limit.assume_init().rlim_cur.min(MAX_DESCRIPTORS),
            _ => MAX_DESCRIPTORS,
        };
        for descriptor in 3..c_int::try_from(most).unwrap_or(c_int::MAX) {
            libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
}

/// Stops the interval timers, which would outlive the image.
fn stop_timers() {
    for timer in [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF] {
        // SAFETY: all zeros is a timer that is off.
        unsafe { libc::setitimer(timer, &std::mem::zeroed(), std::ptr::null_mut()) };
    }
}

fn cpu_affinity() -> Option<libc::cpu_set_t> {
    // SAFETY: all zeros is an empty set, and the call gets its size.
    unsafe {
        let mut set = std::mem::zeroed();
        (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0).then_some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_mask_is_restored_in_this_thread() {
        let usr1 = 1 << (libc::SIGUSR1 - 1);
        let before = set_signal_mask(usr1);
        assert_eq!(set_signal_mask(before), usr1);
    }

    #[test]
    fn execute_returns_when_the_process_is_not_pid_1() {
        assert!(!is_possible());
        // The call returns at once.
        execute();
    }
}
