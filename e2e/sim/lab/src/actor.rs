//! Drives a `sim-actor` process from a test: requests, replies, and descriptors in both directions.

use anyhow::{Context as _, Result, bail};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{BufRead as _, BufReader, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A reply: words, or the driver's `CUresult`.
pub type Reply = Result<String, i32>;

/// A running `sim-actor` process, killed on drop.
#[derive(Debug)]
pub struct DriverClient {
    child: Child,
    socket: UnixStream,
    replies: BufReader<ChildStdout>,
}

impl DriverClient {
    pub(crate) fn spawn(mut command: Command) -> Result<DriverClient> {
        let (socket, peer) = UnixStream::pair()?;
        let mut child = command
            .stdin(OwnedFd::from(peer))
            .stdout(Stdio::piped())
            .spawn()
            .context("starting an actor")?;
        let answers = BufReader::new(child.stdout.take().context("an actor has no output")?);
        Ok(DriverClient {
            child,
            socket,
            replies: answers,
        })
    }

    /// The process's pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request (see `sim-actor`'s documentation) and returns the driver's reply.
    ///
    /// # Panics
    /// The process has died, or does not know the request.
    pub fn request(&mut self, line: &str) -> Reply {
        self.send_request(line);
        self.read_reply()
    }

    /// Sends a request that must succeed, and returns the number in its reply.
    ///
    /// # Panics
    /// The driver returns an error, or the reply is no number.
    pub fn request_number(&mut self, line: &str) -> u64 {
        let answer = self
            .request(line)
            .unwrap_or_else(|code| panic!("`{line}` answered {code}"));
        answer
            .parse()
            .unwrap_or_else(|_| panic!("`{line}` answered `{answer}`"))
    }

    /// Sends a request without waiting for the reply.
    ///
    /// # Panics
    /// The process has died.
    pub fn send_request(&mut self, line: &str) {
        send_with_fd(&self.socket, format!("{line}\n").as_bytes(), None)
            .expect("the actor listens");
    }

    /// Reads the next reply.
    ///
    /// # Panics
    /// The process has died, or did not know the request.
    pub fn read_reply(&mut self) -> Reply {
        let mut line = String::new();
        self.replies
            .read_line(&mut line)
            .expect("the actor answers");
        match line.trim_end_matches('\n').split_once(' ') {
            Some(("ok", words)) => Ok(words.to_owned()),
            Some(("error", code)) => Err(code.parse().expect("an error has a number")),
            _ => panic!("the actor said `{line}`"),
        }
    }

    /// Exports a handle and receives the descriptor.
    ///
    /// # Errors
    /// The system's.
    ///
    /// # Panics
    /// The driver refused to export.
    pub fn export_fd(&mut self, handle: u64) -> Result<OwnedFd> {
        self.request(&format!("export {handle}"))
            .unwrap_or_else(|code| panic!("export answered {code}"));
        receive_fd(&self.socket)
    }

    /// Sends a descriptor and imports it in the process.
    ///
    /// # Panics
    /// The process has died.
    pub fn import_fd(&mut self, descriptor: &OwnedFd) -> Reply {
        send_with_fd(&self.socket, b"import\n", Some(descriptor.as_fd()))
            .expect("the actor listens");
        self.read_reply()
    }

    /// Kills the process with SIGKILL and waits for its end.
    ///
    /// # Panics
    /// The process cannot be waited for.
    pub fn kill(mut self) {
        self.child.kill().expect("the actor can be killed");
        self.child.wait().expect("the actor can be waited for");
    }
}

impl Drop for DriverClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends bytes, with a descriptor if there is one.
///
/// # Errors
/// The system's.
pub fn send_with_fd(
    socket: &UnixStream,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    )?;
    Ok(())
}

/// Receives one byte and the descriptor that comes with it.
///
/// # Errors
/// The system's, or the message has no descriptor.
pub fn receive_fd(socket: impl AsFd) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(descriptor);
        }
    }
    bail!("no descriptor came")
}
