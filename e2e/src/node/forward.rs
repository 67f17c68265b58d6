//! Forwards connections from the host's loopback to the API server in the node's network.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

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
