//! Reaches the node's agent: one connection for each question, every wait bounded.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_protocol::dial::dial_at;
use bursar_protocol::socket::{receive_message, send_message};
use bursar_protocol::wire::{Account, Reason, ToAgent, ToShim};
use bursar_protocol::{CONTAINER_RUN_DIR, SOCKET_NAME};

use crate::driver::GpuUuid;

/// How long an answer may take. The driver makes 64 GiB in a fifth of a second at worst (design F6), and a worker that
/// hangs is replaced meanwhile.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// An agent.
#[derive(Clone, Debug)]
pub(crate) struct AgentClient {
    socket: PathBuf,
}

/// Why the agent said nothing to the point.
#[derive(Debug)]
pub(crate) enum ClientError {
    /// Nobody listens there, or it took too long.
    Unreachable { path: String, source: io::Error },
    /// It does not talk to this process.
    Rejected(Reason),
}

impl AgentClient {
    pub(crate) fn in_container() -> AgentClient {
        AgentClient::with_socket(&Path::new(CONTAINER_RUN_DIR).join(SOCKET_NAME))
    }

    pub(crate) fn with_socket(socket: &Path) -> AgentClient {
        AgentClient {
            socket: socket.to_owned(),
        }
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks; the answers come from where this says.
    pub(crate) fn send(&self, question: &ToAgent) -> Result<UnixStream, ClientError> {
        let failed = |source| self.failed(source);
        let stream = dial_at(&self.socket, RESPONSE_TIMEOUT).map_err(failed)?;
        send_message(&stream, question, None).map_err(failed)?;
        Ok(stream)
    }

    /// The next answer, and what descriptor came with it.
    pub(crate) fn recv(
        &self,
        stream: &UnixStream,
    ) -> Result<(ToShim, Option<OwnedFd>), ClientError> {
        match receive_message(stream).map_err(|source| self.failed(source))? {
            (ToShim::Goodbye { reason }, _) => Err(ClientError::Rejected(reason)),
            answer => Ok(answer),
        }
    }

    fn failed(&self, source: io::Error) -> ClientError {
        ClientError::Unreachable {
            path: self.socket.display().to_string(),
            source,
        }
    }
}

/// Asks about a GPU by the name that the agent has for it: the driver does not say whether a UUID is a MIG instance's, and
/// the agent has an account of one of both names.
pub(crate) fn with_gpu_or_mig_account<T, E>(
    gpu: GpuUuid,
    ask: impl Fn(Account) -> Result<T, E>,
    is_unknown: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let of_gpu = gpu.to_string();
    let of_instance = of_gpu.replacen("GPU-", "MIG-", 1);
    match ask(Account::Device(of_gpu)) {
        Err(error) if is_unknown(&error) => ask(Account::Device(of_instance)),
        done => done,
    }
}
