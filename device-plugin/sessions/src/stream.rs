//! Wraps the connection of a tenant process, and the listener that accepted it.
//!
//! No thread of the runtime releases a descriptor that a process passed. Where the kernel refuses
//! descriptors there is nothing to release. Elsewhere the agent reads no byte that came with a
//! descriptor, and [the container's thread](super::closer) closes the socket with its unread
//! messages.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use bursar_protocol::fd_passing::send_with_fd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::closer::SocketCloser;
use super::options;

/// The connections that may wait to be accepted: as many as the kernel allows.
const BACKLOG: i32 = i32::MAX;

/// A socket, with its closer where tenant processes may have passed descriptors.
#[derive(Debug)]
struct Socket {
    fd: Option<OwnedFd>,
    closer: Option<Arc<SocketCloser>>,
}

impl Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd = self.fd.as_ref();
        fd.expect("only the drop takes it").as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let (Some(fd), Some(closer)) = (self.fd.take(), &self.closer) {
            closer.close(fd);
        }
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that lend a descriptor they do not own; this one owns it"
)]
fn register(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    AsyncFd::new(socket)
}

/// The listener of an allocation.
#[derive(Debug)]
pub(super) struct Listener(AsyncFd<Socket>);

impl Listener {
    /// Listens at an unused path. `closer` closes the sockets where the kernel does not refuse
    /// descriptors, or where `refuse` is false.
    pub(super) fn bind(
        path: &Path,
        closer: Arc<SocketCloser>,
        refuse: bool,
    ) -> io::Result<Listener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The agent sets the option before a process can connect, so that it holds for all waiting
        // connections.
        let refused = refuse && options::refuse_descriptors(&fd).is_ok();
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&fd, BACKLOG)?;
        let closer = (!refused).then_some(closer);
        let socket = Socket {
            fd: Some(fd),
            closer,
        };
        Ok(Listener(register(socket)?))
    }

    /// Accepts the next connection.
    pub(super) async fn accept(&self) -> io::Result<PeerStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accept = |listener: &Socket| Ok(rustix::net::accept_with(listener.as_fd(), flags)?);
        let socket = Socket {
            fd: Some(self.0.async_io(Interest::READABLE, accept).await?),
            closer: self.0.get_ref().closer.clone(),
        };
        if socket.closer.is_some() {
            // Otherwise the kernel skips an out-of-band byte unseen, and releases its descriptors.
            sockopt::set_socket_oobinline(socket.as_fd(), true)?;
        }
        Ok(PeerStream(register(socket)?))
    }
}

/// The connection of one peer.
#[derive(Debug)]
pub(super) struct PeerStream(AsyncFd<Socket>);

impl PeerStream {
    /// The pid of the process that connected.
    pub(super) fn peer_pid(&self) -> Option<u32> {
        options::peer_pid(self.0.get_ref().as_fd())
    }

    /// Whether the peer has closed its socket, even if the agent has not read all messages.
    pub(super) fn has_hung_up(&self) -> bool {
        let socket = self.0.get_ref().as_fd();
        // The kernel reports a hangup whatever the caller polls for.
        let mut polled = [PollFd::new(&socket, PollFlags::empty())];
        poll(&mut polled, Some(&Timespec::default())).is_ok()
            && polled[0].revents().contains(PollFlags::HUP)
    }

    /// Fills `into`.
    ///
    /// # Errors
    /// The error of the system call; `UnexpectedEof` where the peer closes the socket,
    /// `InvalidData` where it passes a descriptor.
    pub(super) async fn read_exact(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let take = |socket: &Socket| read_bytes(socket, into);
            let taken = self.0.async_io(Interest::READABLE, take).await?;
            if taken == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into = &mut std::mem::take(&mut into)[taken..];
        }
        Ok(())
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// The error of the system call.
    pub(super) async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let send = |socket: &Socket| send_bytes(socket, bytes);
            let sent = self.0.async_io(Interest::WRITABLE, send).await?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Sends all of `bytes`, the first of them with a descriptor.
    ///
    /// # Errors
    /// The error of the system call.
    pub(super) async fn write_with_descriptor(
        &mut self,
        bytes: &[u8],
        fd: impl AsFd,
    ) -> io::Result<()> {
        let send = |socket: &Socket| send_with_fd(socket.as_fd(), bytes, &fd);
        let sent = self.0.async_io(Interest::WRITABLE, send).await?;
        self.write_all(&bytes[sent..]).await
    }

    /// Sends as much as the socket has room for, without waiting.
    pub(super) fn try_write(&self, bytes: &[u8]) {
        let _ = send_bytes(self.0.get_ref(), bytes);
    }
}

#[cfg(test)]
impl AsFd for PeerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

fn send_bytes(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL;
    Ok(rustix::net::send(socket.as_fd(), bytes, flags)?)
}

/// Reads bytes that came without a descriptor. Passed descriptors stay in the socket, and the
/// thread that closes the socket releases them.
fn read_bytes(socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
    let mut limit = into.len();
    if socket.closer.is_some() {
        let (mut into, mut none) = ([IoSliceMut::new(into)], RecvAncillaryBuffer::default());
        let peeked = rustix::net::recvmsg(socket.as_fd(), &mut into, &mut none, RecvFlags::PEEK)?;
        if peeked.flags.contains(ReturnFlags::CTRUNC) {
            let passed = "a descriptor was passed";
            return Err(io::Error::new(io::ErrorKind::InvalidData, passed));
        }
        limit = peeked.bytes;
    }
    let taken = rustix::net::recv(socket.as_fd(), &mut into[..limit], RecvFlags::empty())?;
    Ok(taken.0)
}
