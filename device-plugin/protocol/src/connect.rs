//! Connects to the agent from inside a container, with every wait bounded.
#![forbid(unsafe_code)]

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::messages::{self, Message};
use crate::{CONTAINER_RUN_DIR, SOCKET_NAME};

/// Connects to the agent that serves this container. No step takes longer than `timeout`, including
/// the wait for space in the agent's backlog.
///
/// # Errors
/// The system's error: refused while the agent is down, `EAGAIN` on a timeout.
pub fn connect(timeout: Duration) -> io::Result<UnixStream> {
    connect_to(&Path::new(CONTAINER_RUN_DIR).join(SOCKET_NAME), timeout)
}

/// Connects to an agent that listens at `path`.
///
/// # Errors
/// As [`connect`].
pub fn connect_to(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    for direction in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
        sockopt::set_socket_timeout(&socket, direction, Some(timeout))?;
    }
    let address = SocketAddrUnix::new(path)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(UnixStream::from(socket))
}

/// Reads one message.
///
/// # Errors
/// The connection ended or timed out, or the bytes are no message ([`messages::DecodeError`]
/// inside).
pub fn read_message<M: Message>(stream: &mut impl Read) -> io::Result<M> {
    let mut header = [0; messages::HEADER];
    stream.read_exact(&mut header)?;
    let mut payload = vec![0; messages::payload_length(header).map_err(io::Error::other)?];
    stream.read_exact(&mut payload)?;
    M::parse(&payload).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{RejectReason, Response};

    #[test]
    fn read_message_leaves_the_next_message_unread() {
        let first = Response::Rejected {
            reason: RejectReason::Busy,
        };
        let bytes = [first.frame(), Response::Refreshed.frame()].concat();
        let mut stream = bytes.as_slice();
        assert_eq!(read_message::<Response>(&mut stream).unwrap(), first);
        assert_eq!(
            read_message::<Response>(&mut stream).unwrap(),
            Response::Refreshed
        );
        assert!(read_message::<Response>(&mut stream).is_err());
    }
}
