//! Passes descriptors of exported GPU memory between programs and holds them, so that the memory
//! outlives its exporter.

use std::io::Read as _;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bursar_protocol::fd_passing::{receive_with_fd, send_with_fd};
use serde_json::json;

/// How long a sender waits until the holder listens.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Holds each descriptor that arrives at a socket until this process is killed.
pub(crate) fn hold_descriptors(socket: &Path) -> anyhow::Result<ExitCode> {
    let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
    let mut parked = Vec::new();
    loop {
        let (stream, _) = listener.accept()?;
        let (_, descriptor) = receive_with_fd(&stream, &mut [0])?;
        parked.extend(descriptor);
        println!("{}", json!({ "event": "parked", "count": parked.len() }));
        // The closed connection tells the sender that this process has the descriptor.
    }
}

/// Sends a descriptor to the process that listens at a socket, and returns once that process has
/// it.
pub(crate) fn send_descriptor(descriptor: &impl AsFd, socket: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Err(_) if start.elapsed() < CONNECT_TIMEOUT => std::thread::sleep(RETRY_INTERVAL),
            connected => break connected.with_context(|| socket.display().to_string())?,
        }
    };
    send_with_fd(&stream, &[0], descriptor.as_fd())?;
    stream.read_to_end(&mut Vec::new())?;
    Ok(())
}
