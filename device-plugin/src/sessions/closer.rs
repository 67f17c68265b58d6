//! Closes what tenant processes shaped, on a thread that may take as long as it likes.
//!
//! ```text
//!   task of the runtime --hand over, shut down--> queue of one container --its thread--> close
//! ```
//!
//! A thread is there while its container has something to close: one that is stuck is stuck for
//! that container only.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::sync::Notify;

use super::lock;
use crate::units::AllocationId;

/// Sockets that may wait to be closed before no further one is accepted.
pub(super) const MAX_UNCLOSED: usize = 64;

/// For how long none of as many is closed before that is told.
const WARN_AFTER: Duration = Duration::from_secs(1);

/// What closes the sockets of one container.
#[derive(Debug)]
pub(super) struct SocketCloser {
    allocation: AllocationId,
    queue: Mutex<CloseQueue>,
    /// Notified each time that a socket was closed.
    closed: Notify,
}

#[derive(Debug, Default)]
struct CloseQueue {
    waiting: VecDeque<OwnedFd>,
    /// Sockets that are not closed yet: those that wait, and the one that the thread is at.
    unclosed: usize,
    /// Whether there is a thread.
    has_thread: bool,
    /// Whether it was told that too many wait.
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

    /// Closes a socket. Its peer is told at once, and can send nothing more.
    pub(super) fn close(self: &Arc<SocketCloser>, socket: OwnedFd) {
        // A listener has no peer.
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
            // The next socket tries again.
            queue.has_thread = false;
            tracing::warn!(%error, "failed to start a thread that closes sockets");
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

    /// Sockets that are not closed yet.
    pub(super) fn unclosed(&self) -> usize {
        lock(&self.queue).unclosed
    }

    /// Waits until few enough wait to be closed.
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
            tracing::info!(%allocation, waiting, "connections are accepted again");
        }
        has_room
    }

    fn warn_once(&self) {
        let (allocation, waiting) = (self.allocation, self.unclosed());
        if !std::mem::replace(&mut lock(&self.queue).has_warned, true) {
            tracing::warn!(%allocation, waiting, "no connection is accepted: sockets do not close");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    fn wait_until(what: impl Fn() -> bool) {
        let begun = Instant::now();
        while !what() {
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn socket_is_closed_when_it_is_handed_over() {
        let closer = SocketCloser::new(AllocationId::from_bits(1));
        for _ in 0..3 {
            for _ in 0..10 {
                let (here, there) = UnixStream::pair().unwrap();
                closer.close(here.into());
                let read = rustix::net::recv(&there, &mut [0; 1], rustix::net::RecvFlags::empty());
                assert_eq!(read.unwrap().0, 0, "its peer is told");
            }
            wait_until(|| closer.unclosed() == 0);
        }
    }
}
