//! The vault's loop: one thread, one message at a time, the newest agent only.

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::fdstore::{FdStoreRequest, FdStoreResponse, Refusal};
use rustix::event::{PollFd, PollFlags, poll};

use crate::answer::handle;
use crate::held::FdStore;
use crate::log;
use crate::place::Listener;

/// How long the rest of a message may take, and room for an answer: agents write and read whole ones.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections at a time: the agent, its predecessor, and some that said nothing yet.
const MAX_PEERS: usize = 8;

/// How long to wait after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// One connection.
struct Peer {
    stream: UnixStream,
    /// Whether it said hello.
    is_agent: bool,
}

/// Serves until the system fails it.
pub(crate) fn serve(
    place: &Listener,
    held: &mut FdStore,
) -> Result<Infallible, Box<dyn std::error::Error>> {
    let mut peers: Vec<Peer> = Vec::new();
    loop {
        let (knock, speaking) = wait_for_input(place, &peers)?;
        if knock {
            match place.listener.accept() {
                Ok((stream, _)) => accept_peer(&mut peers, stream),
                Err(error) => {
                    log(format_args!("accept failed: {error}"));
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        } else if let Some(place) = speaking
            && let Err(end) = serve_message(held, &mut peers, place)
            && peers.remove(place).is_agent
        {
            log(format_args!("the agent is gone: {end}"));
        }
    }
}

/// Whether somebody wants in, and the newest connection that something is to be read from.
fn wait_for_input(place: &Listener, peers: &[Peer]) -> io::Result<(bool, Option<usize>)> {
    let mut fds: Vec<_> = peers
        .iter()
        .map(|peer| PollFd::new(&peer.stream, PollFlags::IN))
        .collect();
    fds.push(PollFd::new(&place.listener, PollFlags::IN));
    loop {
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            done => break done.map(drop)?,
        };
    }
    let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let speaking = fds[..peers.len()].iter().rposition(ready);
    Ok((fds.last().is_some_and(ready), speaking))
}

/// Takes a connection in; where there are too many, the oldest that said nothing goes. Who may enter the socket's folder
/// may talk: no look at who it is, which nobody can tell of a process outside this one's PID namespace.
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
fn serve_message(held: &mut FdStore, peers: &mut Vec<Peer>, place: usize) -> io::Result<()> {
    let (message, fd) = receive_message::<FdStoreRequest>(&peers[place].stream)?;
    let may = peers[place].is_agent || matches!(message, FdStoreRequest::Hello { .. });
    let (answer, fd) = if may {
        handle(held, message, fd)
    } else {
        (FdStoreResponse::Refused(Refusal::NoHello), None)
    };
    send_message(&peers[place].stream, &answer, fd)?;
    if matches!(answer, FdStoreResponse::Ready { .. }) && !peers[place].is_agent {
        log(format_args!("a new agent: {answer:?}"));
        peers[place].is_agent = true;
        let mut at = 0..;
        peers.retain(|peer| at.next() == Some(place) || !peer.is_agent);
    }
    Ok(())
}
