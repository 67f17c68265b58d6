//! Waits for the signals that end a container.

/// A set of blocked signals.
pub(crate) struct Signals(libc::sigset_t);

/// Blocks SIGTERM and SIGINT for this thread, before it starts others.
pub(crate) fn block_signals() -> Signals {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set, and the other calls get it initialised.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let mut set = set.assume_init();
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        set
    };
    Signals(set)
}

/// Returns when one of the blocked signals arrives.
pub(crate) fn wait_for(signals: &Signals) {
    let mut signal = 0;
    // SAFETY: both pointers are valid for the time of the call.
    unsafe { libc::sigwait(&signals.0, &mut signal) };
}
