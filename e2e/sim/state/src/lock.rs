//! Locks bytes of files, for an open file description or for a process; the kernel drops the locks.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Opens a lock file for reading and writing; `execve` closes it.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
}

fn request(kind: libc::c_int, start: u64, len: u64) -> libc::flock {
    // SAFETY: `flock` is plain data, for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = len as libc::off_t;
    lock
}

fn fcntl(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and `lock` is a `flock` that the kernel reads and writes.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Locks one byte exclusively for this open file description; false if another one has it locked.
///
/// # Errors
/// The system's, other than a byte that is already locked.
pub fn try_lock_exclusive(file: &File, byte: u64) -> io::Result<bool> {
    match fcntl(
        file,
        libc::F_OFD_SETLK,
        &mut request(libc::F_WRLCK, byte, 1),
    ) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Locks one byte for this open file description, shared with others.
///
/// # Errors
/// The system's.
pub fn lock_shared(file: &File, byte: u64) -> io::Result<()> {
    fcntl(
        file,
        libc::F_OFD_SETLK,
        &mut request(libc::F_RDLCK, byte, 1),
    )
}

/// Finds a byte in `start..start + len` (0: to the end) that another description has locked.
///
/// # Errors
/// The system's.
pub fn find_locked_byte(file: &File, start: u64, len: u64) -> io::Result<Option<u64>> {
    let mut lock = request(libc::F_WRLCK, start, len);
    fcntl(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok((lock.l_type != libc::F_UNLCK as libc::c_short).then_some(lock.l_start as u64))
}

/// Locks one byte for this process, so that [`locking_pid`] finds the process.
///
/// The kernel drops the lock when the process closes any descriptor of the file. A forked child
/// does not inherit it.
///
/// # Errors
/// The system's.
pub fn lock_for_process(file: &File, byte: u64) -> io::Result<()> {
    fcntl(file, libc::F_SETLK, &mut request(libc::F_WRLCK, byte, 1))
}

/// The pid of the process that locked a byte, in the caller's pid namespace.
///
/// `None` if no other process locked the byte, or if that process has no pid in this namespace. The
/// kernel does not report the caller's own lock.
///
/// # Errors
/// The system's.
pub fn locking_pid(file: &File, byte: u64) -> io::Result<Option<u32>> {
    let mut lock = request(libc::F_WRLCK, byte, 1);
    fcntl(file, libc::F_GETLK, &mut lock)?;
    let is_locked = lock.l_type != libc::F_UNLCK as libc::c_short;
    Ok(u32::try_from(lock.l_pid)
        .ok()
        .filter(|pid| is_locked && *pid != 0))
}

/// The inode that identifies this process's pid namespace.
///
/// # Errors
/// `/proc` is not mounted.
pub fn pid_namespace() -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino())
}
