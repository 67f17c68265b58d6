//! Forwards TCP connections from one network namespace to another.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The pause after a connection that could not be accepted.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The network namespace of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// That of the calling thread.
    Own,
    /// That of this process.
    Of(u32),
}

impl Network {
    /// Runs `act` on a thread of its own in this network.
    fn run<T: Send + 'static>(
        self,
        act: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<thread::JoinHandle<io::Result<T>>> {
        let network = match self {
            Self::Own => None,
            Self::Of(process) => Some(File::open(format!("/proc/{process}/ns/net"))?),
        };
        Ok(thread::spawn(move || {
            if let Some(network) = network {
                move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            act()
        }))
    }
}

/// Forwards the connections to a port, until this value is dropped.
#[derive(Debug)]
pub struct PortForward(Arc<TcpListener>);

impl PortForward {
    /// Forwards connections to `address` in the network `from` to `target` in the network `to`.
    ///
    /// # Errors
    /// When a network cannot be entered, or the address is in use.
    pub(crate) fn open(
        (from, address): (Network, SocketAddrV4),
        (to, target): (Network, SocketAddrV4),
    ) -> io::Result<Self> {
        let panicked = |_| io::Error::other("the thread in the other network panicked");
        // The listener stays in its network, whatever thread accepts its connections.
        let bound = from.run(move || TcpListener::bind(address))?;
        let listener = Arc::new(bound.join().map_err(panicked)??);
        let accepts = Arc::clone(&listener);
        to.run(move || {
            forward(accepts.incoming(), target);
            Ok(())
        })?;
        Ok(Self(listener))
    }
}

impl Drop for PortForward {
    fn drop(&mut self) {
        // This ends the accepting thread.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

/// Accepts on `listener`, which was opened in the host's network. Each connection is joined to the
/// API server in the network of the calling thread.
pub(super) fn serve(listener: TcpListener) {
    let server = SocketAddrV4::new(super::ADDRESS, super::API_PORT);
    forward(listener.incoming(), server);
}

/// Joins each connection to `target` in the network of the calling thread, until the listener is
/// shut down.
fn forward(clients: impl Iterator<Item = io::Result<TcpStream>>, target: SocketAddrV4) {
    for client in clients {
        let client = match client {
            Ok(client) => client,
            // accept(2) returns EINVAL once the listener is shut down.
            Err(error) if error.kind() == ErrorKind::InvalidInput => return,
            // The client has left, or descriptors are short for a moment.
            Err(_) => {
                thread::sleep(RETRY_PAUSE);
                continue;
            }
        };
        thread::spawn(move || {
            // Without a server the client's connection closes, as it would without a forwarder.
            if let Ok(server) = TcpStream::connect(target) {
                let _ = join(client, server);
            }
        });
    }
}

fn join(client: TcpStream, server: TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from, to) = (client.try_clone()?, server.try_clone()?);
    let up = thread::spawn(move || copy(from, to));
    copy(server, client);
    let _ = up.join();
    Ok(())
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    fn listener() -> (TcpListener, SocketAddrV4) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else {
            unreachable!("it was bound to an address of IPv4")
        };
        (listener, address)
    }

    #[test]
    fn forward_goes_on_after_a_connection_that_was_aborted() {
        let (near, address) = listener();
        let (far, target) = listener();
        let mut client = TcpStream::connect(address).unwrap();
        let aborted = io::Error::from(ErrorKind::ConnectionAborted);
        let clients = [Err(aborted), near.accept().map(|(client, _)| client)];
        forward(clients.into_iter(), target);
        // The forwarded client sees the end of the server's connection.
        drop(far.accept().unwrap());
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn forward_ends_when_its_listener_is_shut_down() {
        let (near, _) = listener();
        let (_far, target) = listener();
        rustix::net::shutdown(&near, rustix::net::Shutdown::Both).unwrap();
        forward(near.incoming(), target);
    }
}
