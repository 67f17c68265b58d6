//! Runs the fd store's poll loop: one thread, one message at a time, for the newest agent only.

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bursar_protocol::fd_passing::{receive_payload, send_message};
use bursar_protocol::fdstore::{FdStoreRequest, FdStoreResponse, Refusal};
use bursar_protocol::messages::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fd_store::FdStore;
use crate::listener::Listener;
use crate::log;
use crate::request_handler::handle;

/// How long the rest of a message, or an answer, may take: agents read and write whole messages.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// How many connections may be open: the agent, its predecessor, and some before their hello.
const MAX_PEERS: usize = 8;

/// How long to wait after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

struct Peer {
    stream: UnixStream,
    /// Whether the peer has sent its hello.
    is_agent: bool,
}

/// Serves until a system call fails.
pub(crate) fn serve(
    listener: &Listener,
    store: &mut FdStore,
) -> Result<Infallible, Box<dyn std::error::Error>> {
    let mut peers: Vec<Peer> = Vec::new();
    let mut can_accept = true;
    loop {
        let (has_connection, ready_peer) = wait_for_input(listener, &peers)?;
        if has_connection {
            match listener.socket.accept() {
                Ok((stream, _)) => {
                    accept_peer(&mut peers, stream);
                    can_accept = true;
                    continue;
                }
                // The connection stays in the backlog, and must keep no peer from an answer.
                Err(error) => {
                    if can_accept {
                        log(format_args!("failed to accept a connection: {error}"));
                    }
                    can_accept = false;
                    if ready_peer.is_none() {
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
        if let Some(index) = ready_peer
            && let Err(end) = serve_message(store, &mut peers, index)
            && peers.remove(index).is_agent
        {
            log(format_args!("the agent disconnected: {end}"));
        }
    }
}

/// Returns whether a connection waits for accept, and the newest peer that has sent something.
fn wait_for_input(listener: &Listener, peers: &[Peer]) -> io::Result<(bool, Option<usize>)> {
    let mut fds: Vec<_> = peers
        .iter()
        .map(|peer| PollFd::new(&peer.stream, PollFlags::IN))
        .collect();
    fds.push(PollFd::new(&listener.socket, PollFlags::IN));
    loop {
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            done => break done.map(drop)?,
        };
    }
    let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let ready_peer = fds[..peers.len()].iter().rposition(ready);
    Ok((fds.last().is_some_and(ready), ready_peer))
}

fn has_input(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Accepts a connection; beyond the limit the oldest peer without a hello is closed. The folder's
/// mode is the only access check, because a peer outside of this PID namespace has no pid here.
fn accept_peer(peers: &mut Vec<Peer>, stream: UnixStream) {
    let bounded = stream
        .set_read_timeout(Some(MESSAGE_TIMEOUT))
        .and_then(|()| stream.set_write_timeout(Some(MESSAGE_TIMEOUT)));
    if bounded.is_err() {
        return;
    }
    if peers.len() == MAX_PEERS {
        let silent = peers.iter().position(|peer| !peer.is_agent);
        peers.remove(silent.unwrap_or(0));
    }
    peers.push(Peer {
        stream,
        is_agent: false,
    });
}

/// Reads one message and answers it.
fn serve_message(store: &mut FdStore, peers: &mut Vec<Peer>, index: usize) -> io::Result<()> {
    let (payload, fd) = receive_payload(&peers[index].stream)?;
    let message = FdStoreRequest::parse(&payload);
    let is_hello = matches!(message, Ok(FdStoreRequest::Hello { .. }));
    if is_hello
        && let Some(previous) = peers.iter().position(|peer| peer.is_agent)
        && previous != index
        && has_input(&peers[previous].stream)
    {
        // A killed agent may have sent a descriptor that a tenant has by now.
        if let Err(end) = serve_message(store, peers, previous) {
            peers[previous].is_agent = false;
            log(format_args!("the agent disconnected: {end}"));
        }
    }
    let may = peers[index].is_agent || is_hello;
    let (answer, fd) = match message {
        _ if !may => (FdStoreResponse::Refused(Refusal::NoHello), None),
        Ok(message) => handle(store, message, fd),
        // A later agent's message. A closed connection would make that agent connect again and
        // repeat it.
        Err(_) => (FdStoreResponse::Refused(Refusal::Unknown), None),
    };
    send_message(&peers[index].stream, &answer, fd)?;
    if matches!(answer, FdStoreResponse::Ready { .. }) && !peers[index].is_agent {
        log(format_args!("an agent connected: {answer:?}"));
        peers[index].is_agent = true;
        let mut indices = 0..;
        peers.retain(|peer| indices.next() == Some(index) || !peer.is_agent);
    }
    Ok(())
}
