//! Serves a folder with one file, whose ioctls a function answers, by the FUSE protocol.
//!
//! The mount is in no mount namespace. Its folder is reached through the server's descriptor, so
//! that nothing of it stays when the server ends: opened files then fail with ENOTCONN. Numbers and
//! layouts are those of `include/uapi/linux/fuse.h`.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// Operations.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const IOCTL: u32 = 39;
const BATCH_FORGET: u32 = 42;

/// The nodes: the folder and the file.
const ROOT: u64 = 1;
const FILE: u64 = 2;

/// `FOPEN_DIRECT_IO`, and `FOPEN_NOFLUSH`: a close asks nothing.
const DIRECT_IO: u32 = 1;
const NO_FLUSH: u32 = 1 << 5;

/// The kernel keeps an answer for so many seconds: for ever.
const VALID: u64 = 1 << 30;

/// How often a server looks whether it is to stop.
const STOP_CHECK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// More than a request, whose writes are limited to [`MAX_WRITE`].
const BUFFER: usize = 128 << 10;
const MAX_WRITE: u32 = 64 << 10;

/// Answers for the file.
pub trait Handler {
    /// Whether each close asks the server too, and waits for ever, because it has no answer.
    const HANGS_ON_CLOSE: bool = false;

    /// Answers an ioctl of a thread through an open file: changes the argument in place.
    ///
    /// # Errors
    /// The error of the call.
    fn ioctl(&mut self, file: u64, thread: u32, number: u32, argument: &mut [u8])
    -> io::Result<()>;

    /// The last descriptor of an open file is closed.
    fn release(&mut self, file: u64);
}

/// A mounted folder.
#[derive(Debug)]
pub struct Folder {
    device: File,
    mount: OwnedFd,
    name: &'static str,
    /// The process through whose descriptor the folder is reached.
    keeper: u32,
}

impl Folder {
    /// Mounts a folder with a file of this name.
    ///
    /// # Errors
    /// The system's: `/dev/fuse` is missing, or the process is not root.
    pub fn mount(name: &'static str) -> io::Result<Folder> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let descriptor = device.as_raw_fd().to_string();
        for (key, value) in [
            ("source", name),
            ("fd", &descriptor),
            ("rootmode", "40000"),
            ("user_id", "0"),
            ("group_id", "0"),
        ] {
            fsconfig_set_string(&context, key, value)?;
        }
        fsconfig_set_flag(&context, "allow_other")?;
        fsconfig_create(&context)?;
        let (flags, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
        let mount = fsmount(&context, flags, attributes)?;
        Ok(Folder {
            device,
            mount,
            name,
            keeper: std::process::id(),
        })
    }

    /// Starts a process that keeps the folder open for others, and ends with this one. Without any
    /// capability itself, it lets processes without one follow a path through its descriptors.
    ///
    /// # Errors
    /// The system's.
    ///
    /// # Safety
    /// This process has one thread.
    pub unsafe fn start_keeper(&mut self) -> io::Result<()> {
        // SAFETY: by the function's contract no other thread holds a lock that the child needs.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => keep(self.mount.as_raw_fd()),
            child => {
                self.keeper = child as u32;
                Ok(())
            }
        }
    }

    /// The file's path while this process lives.
    pub fn file(&self) -> PathBuf {
        let (keeper, folder) = (self.keeper, self.mount.as_raw_fd());
        PathBuf::from(format!("/proc/{keeper}/fd/{folder}/{}", self.name))
    }

    /// Answers requests until `stop` is set. The folder ends then: what waits gets an error.
    ///
    /// # Errors
    /// The system's.
    pub fn serve(self, handler: &mut impl Handler, stop: &AtomicBool) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        let mut next_file = 1;
        while !stop.load(Relaxed) {
            let mut fds = [PollFd::new(&self.device, PollFlags::IN)];
            if poll(&mut fds, Some(&STOP_CHECK_INTERVAL))? == 0 {
                continue;
            }
            let len = match (&self.device).read(&mut buffer) {
                Ok(len) => len,
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
                // The caller was killed before its request was read.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let Some(request) = Request::parse(&mut buffer[..len]) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let unique = request.unique;
            if let Some(reply) = self.answer(request, handler, &mut next_file) {
                let (error, body) = match &reply {
                    Ok(body) => (0, &body[..]),
                    Err(error) => (-error.raw_os_error().unwrap_or(libc::EIO), &[][..]),
                };
                let mut message = Bytes::default();
                message.u32(16 + body.len() as u32).u32(error as u32);
                message.u64(unique).slice(body);
                // A caller that was killed meanwhile takes no answer.
                let _ = (&self.device).write(&message.0);
            }
        }
        Ok(())
    }

    /// Answers a request; `None` if it has no answer.
    fn answer<H: Handler>(
        &self,
        request: Request<'_>,
        handler: &mut H,
        next_file: &mut u64,
    ) -> Option<io::Result<Vec<u8>>> {
        let Request {
            operation,
            node,
            thread,
            body,
            ..
        } = request;
        let mut reply = Bytes::default();
        match operation {
            FORGET | BATCH_FORGET | INTERRUPT => return None,
            FLUSH if H::HANGS_ON_CLOSE => return None,
            INIT => init(&mut reply),
            LOOKUP if body.strip_suffix(&[0]) == Some(self.name.as_bytes()) => {
                // Node and generation, then how long name and attributes are valid.
                reply.u64(FILE).u64(0).u64(VALID).u64(VALID).u32(0).u32(0);
                attributes(&mut reply, FILE);
            }
            LOOKUP => return Some(Err(io::Error::from_raw_os_error(libc::ENOENT))),
            GETATTR => {
                reply.u64(VALID).u32(0).u32(0);
                attributes(&mut reply, node);
            }
            OPEN => {
                let on_close = if H::HANGS_ON_CLOSE { 0 } else { NO_FLUSH };
                reply.u64(*next_file).u32(DIRECT_IO | on_close).u32(0);
                *next_file += 1;
            }
            READ | DESTROY => {}
            RELEASE => handler.release(u64_at(body, 0)),
            IOCTL => {
                // File, flags, number, address, and the lengths of argument and result.
                let (file, number, sent) = (u64_at(body, 0), u32_at(body, 12), u32_at(body, 24));
                let argument = body.get_mut(32..32 + sent as usize).unwrap_or_default();
                if let Err(error) = handler.ioctl(file, thread, number, argument) {
                    return Some(Err(error));
                }
                reply.u32(0).u32(0).u32(0).u32(0).slice(argument);
            }
            _ => return Some(Err(io::Error::from_raw_os_error(libc::ENOSYS))),
        }
        Some(Ok(reply.0))
    }
}

/// Keeps one descriptor open until the parent ends.
fn keep(descriptor: i32) -> ! {
    let kept = descriptor as u32;
    for (first, last) in [(0, kept - 1), (kept + 1, u32::MAX)] {
        // SAFETY: nothing in this process uses another descriptor from now on.
        unsafe { libc::close_range(first, last, 0) };
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    let is_ready = set_parent_process_death_signal(Some(Signal::KILL)).is_ok()
        && set_capabilities(None, none).is_ok();
    // A parent that had ended before sends no signal.
    while is_ready && getppid().is_some_and(|parent| parent != Pid::INIT) {
        std::thread::sleep(Duration::from_secs(1));
    }
    std::process::exit(1)
}

struct Request<'a> {
    operation: u32,
    unique: u64,
    node: u64,
    thread: u32,
    body: &'a mut [u8],
}

impl<'a> Request<'a> {
    fn parse(bytes: &'a mut [u8]) -> Option<Request<'a>> {
        let (header, body) = bytes.split_at_mut_checked(40)?;
        Some(Request {
            operation: u32_at(header, 4),
            unique: u64_at(header, 8),
            node: u64_at(header, 16),
            thread: u32_at(header, 32),
            body,
        })
    }
}

fn init(reply: &mut Bytes) {
    // Version 7.31, read-ahead, flags; the numbers of background requests, and the longest write.
    reply.u32(7).u32(31).u32(0).u32(0);
    reply.u32(12 << 16 | 16).u32(MAX_WRITE).u32(1).u32(32);
    reply.slice(&[0; 32]);
}

fn attributes(reply: &mut Bytes, node: u64) {
    let mode = match node {
        ROOT => libc::S_IFDIR | 0o755,
        _ => libc::S_IFREG | 0o666,
    };
    // Inode, size, blocks, three times with nanoseconds; mode, links, owner, device, block size.
    reply.u64(node).u64(0).u64(0).slice(&[0; 36]);
    reply.u32(mode).u32(1).u32(0).u32(0).u32(0).u32(4096).u32(0);
}

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn slice(&mut self, bytes: &[u8]) -> &mut Bytes {
        self.0.extend(bytes);
        self
    }

    fn u32(&mut self, number: u32) -> &mut Bytes {
        self.slice(&number.to_ne_bytes())
    }

    fn u64(&mut self, number: u64) -> &mut Bytes {
        self.slice(&number.to_ne_bytes())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes
        .get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u64::from_ne_bytes)
}
