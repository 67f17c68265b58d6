//! Forwards connections from the host's loopback to the API server in the node's network, and from
//! the node's loopback to a port of the host.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A port of the host that the node has on its loopback too, until this value is dropped.
#[derive(Debug)]
pub struct HostPort(Arc<TcpListener>);

impl HostPort {
    /// Forwards connections to `port` of the loopback in the network of `process` to the same port
    /// of the caller's loopback.
    ///
    /// # Errors
    /// When the network cannot be entered, or the port is in use there.
    pub(crate) fn open(process: u32, port: u16) -> io::Result<Self> {
        let network = File::open(format!("/proc/{process}/ns/net"))?;
        // Only a thread of its own enters the network. The listener stays there, whatever thread
        // accepts its connections.
        let bind = move || {
            move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?;
            TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        };
        let panicked = |_| io::Error::other("the thread in the node's network panicked");
        let listener = Arc::new(thread::spawn(bind).join().map_err(panicked)??);
        let accepts = Arc::clone(&listener);
        thread::spawn(move || {
            for client in accepts.incoming().map_while(Result::ok) {
                thread::spawn(move || {
                    if let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                        let _ = join(client, server);
                    }
                });
            }
        });
        Ok(Self(listener))
    }
}

impl Drop for HostPort {
    fn drop(&mut self) {
        // This ends the accepting thread.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

/// Accepts on `listener`, which was opened in the host's network. Each connection is joined to the
/// API server in the network of the calling thread.
pub(super) fn serve(listener: TcpListener) {
    for client in listener.incoming().flatten() {
        thread::spawn(move || {
            // Without a server the client's connection closes, as it would without a forwarder.
            if let Ok(server) = TcpStream::connect((super::ADDRESS, super::API_PORT)) {
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
