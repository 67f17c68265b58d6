//! Sends and receives bytes or messages with a file descriptor, on a Unix stream socket.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::messages::{self, Message};

/// Sends `bytes` with `fd` attached to the first of them. Returns how many bytes were sent. The
/// descriptor is delivered with the first byte.
///
/// # Errors
/// The error of `sendmsg`.
pub fn send_with_fd(socket: impl AsFd, bytes: &[u8], fd: impl AsFd) -> std::io::Result<usize> {
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::NOSIGNAL;
    // With a timeout on the socket a signal ends the call even under SA_RESTART.
    Ok(retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, flags)
    })?)
}

/// Receives up to `bytes.len()` bytes and at most one descriptor, close-on-exec. Further
/// descriptors are closed.
///
/// # Errors
/// The error of `recvmsg`.
pub fn receive_with_fd(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> std::io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(bytes)];
        rustix::net::recvmsg(&socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((received.bytes, fd))
}

/// Sends one message, with an optional descriptor. Only for a socket that blocks.
///
/// # Errors
/// The system's error: `EPIPE` when the peer is gone, `EAGAIN` after the socket's timeout.
pub fn send_message(
    mut stream: &UnixStream,
    message: &impl Message,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let frame = message.frame();
    let sent = match fd {
        Some(fd) => send_with_fd(stream, &frame, fd)?,
        None => 0,
    };
    stream.write_all(&frame[sent..])
}

/// Receives one message and its descriptor. A descriptor sent with a later part of the message is
/// closed.
///
/// # Errors
/// The connection ended or timed out, or the bytes are no message ([`messages::DecodeError`]
/// inside).
pub fn receive_message<M: Message>(stream: &UnixStream) -> io::Result<(M, Option<OwnedFd>)> {
    let (payload, fd) = receive_payload(stream)?;
    Ok((M::parse(&payload).map_err(io::Error::other)?, fd))
}

/// Receives the payload of one frame, like [`receive_message`], and does not parse it.
///
/// # Errors
/// The connection ended or timed out, or the header announces a length that no frame has.
pub fn receive_payload(mut stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut header = [0; messages::HEADER];
    let (received, fd) = receive_with_fd(stream, &mut header)?;
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut header[received..])?;
    let mut payload = vec![0; messages::payload_length(header).map_err(io::Error::other)?];
    stream.read_exact(&mut payload)?;
    Ok((payload, fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{RejectReason, Response};

    #[test]
    fn descriptor_arrives_with_its_bytes() {
        let (agent, shim) = UnixStream::pair().unwrap();
        let (_page, fd) = crate::credit_page::CreditPage::create(1).unwrap();
        assert_eq!(send_with_fd(&agent, b"hello", &fd).unwrap(), 5);
        let mut bytes = [0; 16];
        let (length, received) = receive_with_fd(&shim, &mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"hello");
        crate::credit_page::CreditPage::open(received.unwrap()).unwrap();
    }

    #[test]
    fn each_message_has_its_own_descriptor_or_none() {
        let (agent, shim) = UnixStream::pair().unwrap();
        let goodbye = Response::Rejected {
            reason: RejectReason::Busy,
        };
        let (page, fd) = crate::credit_page::CreditPage::create(1).unwrap();
        send_message(&agent, &Response::Refreshed, None).unwrap();
        send_message(&agent, &goodbye, Some(fd.as_fd())).unwrap();
        send_message(&agent, &Response::Refreshed, None).unwrap();
        drop((agent, page));
        let (first, none) = receive_message::<Response>(&shim).unwrap();
        assert!(first == Response::Refreshed && none.is_none());
        let (second, some) = receive_message::<Response>(&shim).unwrap();
        assert!(second == goodbye && some.is_some());
        assert!(receive_message::<Response>(&shim).unwrap().1.is_none());
        let end = receive_message::<Response>(&shim).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }
}
