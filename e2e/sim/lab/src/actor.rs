//! The test's end of an actor: lines to it, lines from it, descriptors both ways.

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

/// What an actor was answered by the driver: words, or a `CUresult`.
pub type Reply = Result<String, i32>;

/// A running actor; killed when dropped.
#[derive(Debug)]
pub struct DriverClient {
    child: Child,
    socket: UnixStream,
    replies: BufReader<ChildStdout>,
}

impl DriverClient {
    pub(crate) fn spawn(mut command: Command) -> Result<DriverClient> {
        let (socket, theirs) = UnixStream::pair()?;
        let mut child = command
            .stdin(OwnedFd::from(theirs))
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

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to do something (see `sim-actor`'s documentation) and returns the driver's answer.
    ///
    /// # Panics
    /// The actor died or does not understand.
    pub fn request(&mut self, line: &str) -> Reply {
        self.send_request(line);
        self.read_reply()
    }

    /// As [`Actor::ask`], for what must succeed and answers a number.
    ///
    /// # Panics
    /// It does not.
    pub fn request_number(&mut self, line: &str) -> u64 {
        let answer = self
            .request(line)
            .unwrap_or_else(|code| panic!("`{line}` answered {code}"));
        answer
            .parse()
            .unwrap_or_else(|_| panic!("`{line}` answered `{answer}`"))
    }

    /// Tells it something without waiting for the answer.
    ///
    /// # Panics
    /// The actor is gone.
    pub fn send_request(&mut self, line: &str) {
        send_with_fd(&self.socket, format!("{line}\n").as_bytes(), None)
            .expect("the actor listens");
    }

    /// The next answer.
    ///
    /// # Panics
    /// The actor is gone, or did not understand.
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

    /// Exports a handle, and receives the descriptor that the actor sends.
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

    /// Sends a descriptor and has it imported.
    ///
    /// # Panics
    /// The actor is gone.
    pub fn import_fd(&mut self, descriptor: &OwnedFd) -> Reply {
        send_with_fd(&self.socket, b"import\n", Some(descriptor.as_fd()))
            .expect("the actor listens");
        self.read_reply()
    }

    /// SIGKILLs it and waits until it is gone.
    ///
    /// # Panics
    /// It cannot be waited for.
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

/// Sends bytes, with a descriptor.
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
/// The system's, or there was no descriptor.
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
