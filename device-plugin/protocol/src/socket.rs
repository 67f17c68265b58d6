//! Sends and receives bytes with a file descriptor beside them, on a Unix stream socket.
#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Sends `bytes` with `fd` attached to the first of them; how many bytes were taken. The
/// descriptor is delivered if that is at least one.
///
/// # Errors
/// What `sendmsg` answers.
pub fn send_with_fd(socket: impl AsFd, bytes: &[u8], fd: impl AsFd) -> std::io::Result<usize> {
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        flags,
    )?)
}

/// Receives up to `bytes.len()` bytes and at most one descriptor, close-on-exec; further ones are
/// closed.
///
/// # Errors
/// What `recvmsg` answers.
pub fn receive_with_fd(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> std::io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((received.bytes, fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_arrives_with_its_bytes() {
        let (agent, shim) = UnixStream::pair().unwrap();
        let (_page, fd) = crate::page::CreditPage::create(1).unwrap();
        assert_eq!(send_with_fd(&agent, b"hello", &fd).unwrap(), 5);
        let mut bytes = [0; 16];
        let (length, received) = receive_with_fd(&shim, &mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"hello");
        crate::page::CreditPage::open(received.unwrap()).unwrap();
    }
}
