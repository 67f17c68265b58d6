//! Sets and reads options of Unix sockets that rustix has no safe call for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// `SO_PASSRIGHTS` (asm-generic/socket.h, Linux 6.16), which is 1 by default. With 0, a peer that
/// sends a descriptor gets `EPERM`.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Refuses descriptors on a socket, and on sockets that are accepted from it afterwards.
///
/// # Errors
/// `ENOPROTOOPT` from a kernel before 6.16.
#[expect(unsafe_code, reason = "rustix does not know this option")]
pub(super) fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let takes: libc::c_int = 0;
    // SAFETY: the descriptor is open while it is borrowed, and the kernel reads the one integer.
    let code = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const takes).cast(),
            size_of_val(&takes) as libc::socklen_t,
        )
    };
    if code == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// The pid of the process that connected a socket; `None` where it has no pid in the agent's
/// namespace.
pub(super) fn peer_pid(socket: impl AsFd) -> Option<u32> {
    // The call of rustix cannot return the pid 0 of a foreign namespace.
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    get_option(socket.as_fd(), libc::SO_PEERCRED, &mut peer).ok()?;
    u32::try_from(peer.pid).ok().filter(|pid| *pid > 0)
}

/// Whether the kernel accepts descriptors on a socket.
#[cfg(test)]
pub(super) fn accepts_descriptors(socket: impl AsFd) -> io::Result<bool> {
    let mut takes: libc::c_int = -1;
    get_option(socket.as_fd(), SO_PASSRIGHTS, &mut takes)?;
    Ok(takes != 0)
}

/// C types for which any bytes are a valid value.
trait Plain {}
impl Plain for libc::ucred {}
#[cfg(test)]
impl Plain for libc::c_int {}

#[expect(unsafe_code, reason = "rustix does not know this option")]
fn get_option<T: Plain>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the descriptor is open; the kernel writes at most `length` bytes, any of which are a
    // value.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    if code == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
