//! Closes sockets of tenant processes on a thread of their container, because the close may block.
//!
//! ```text
//!   task of the runtime --shut down--> queue of one container --its thread--> close
//! ```
//!
//! A container has a thread while its queue is not empty, so that a blocked close delays no other
//! container.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bursar_ledger::units::AllocationId;
use rustix::net::Shutdown;
use tokio::sync::Notify;

use super::lock;

/// The sockets that may wait to be closed before the agent accepts no further one.
pub(super) const MAX_UNCLOSED: usize = 64;

/// How long a full queue stays full before the agent logs a warning.
const WARN_AFTER: Duration = Duration::from_secs(1);

/// Closes the sockets of one container.
#[derive(Debug)]
pub(super) struct SocketCloser {
    allocation: AllocationId,
    queue: Mutex<CloseQueue>,
    /// Notified each time that the thread has closed a socket.
    closed: Notify,
}

#[derive(Debug, Default)]
struct CloseQueue {
    waiting: VecDeque<OwnedFd>,
    /// The sockets in the queue, and the socket that the thread is closing.
    unclosed: usize,
    has_thread: bool,
    /// Whether the agent has logged that the queue is full.
    has_warned: bool,
}

impl SocketCloser {
    pub(super) fn new(allocation: AllocationId) -> Arc<SocketCloser> {
        Arc::new(SocketCloser {
            allocation,
            queue: Mutex::default(),
            closed: Notify::new(),
        })
    }

    /// Closes a socket. The shutdown informs the peer at once, which can then send nothing more.
    pub(super) fn close(self: &Arc<SocketCloser>, socket: OwnedFd) {
        // A listener has no peer, so its shutdown fails.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(socket);
        queue.unclosed += 1;
        if queue.has_thread {
            return;
        }
        queue.has_thread = true;
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name("closer".to_owned());
        if let Err(error) = thread.spawn(move || closer.close_queued()) {
            // The next socket starts a thread.
            queue.has_thread = false;
            tracing::warn!(%error, "failed to start the thread that closes sockets; the next close tries again");
        }
    }

    fn close_queued(&self) {
        loop {
            let next = {
                let mut queue = lock(&self.queue);
                let next = queue.waiting.pop_front();
                queue.has_thread = next.is_some();
                next
            };
            let Some(socket) = next else {
                return;
            };
            drop(socket);
            lock(&self.queue).unclosed -= 1;
            self.closed.notify_waiters();
        }
    }

    /// The number of sockets that are not closed yet.
    pub(super) fn unclosed(&self) -> usize {
        lock(&self.queue).unclosed
    }

    /// Waits until the queue has room.
    pub(super) async fn wait_for_room(&self) {
        loop {
            let closed = self.closed.notified();
            if self.has_room() {
                return;
            }
            if tokio::time::timeout(WARN_AFTER, closed).await.is_err() {
                self.warn_once();
            }
        }
    }

    fn has_room(&self) -> bool {
        let (allocation, waiting) = (self.allocation, self.unclosed());
        let has_room = waiting < MAX_UNCLOSED;
        if has_room && std::mem::take(&mut lock(&self.queue).has_warned) {
            tracing::info!(%allocation, waiting, "accepting connections again");
        }
        has_room
    }

    fn warn_once(&self) {
        let (allocation, waiting) = (self.allocation, self.unclosed());
        if !std::mem::replace(&mut lock(&self.queue).has_warned, true) {
            tracing::warn!(%allocation, waiting, "accepting no connection until sockets of the container are closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    fn wait_until(what: impl Fn() -> bool) {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn socket_is_closed_when_it_is_handed_over() {
        let closer = SocketCloser::new(AllocationId::from_bits(1));
        for _ in 0..3 {
            for _ in 0..10 {
                let (socket, peer) = UnixStream::pair().unwrap();
                closer.close(socket.into());
                let read = rustix::net::recv(&peer, &mut [0; 1], rustix::net::RecvFlags::empty());
                assert_eq!(read.unwrap().0, 0, "the peer is informed");
            }
            wait_until(|| closer.unclosed() == 0);
        }
    }
}
