//! Sends requests to the node's agent: one connection for each request, with bounded waits.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_protocol::connect::connect_to;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::messages::{Account, RejectReason, Request, Response};
use bursar_protocol::{CONTAINER_RUN_DIR, SOCKET_NAME};

use crate::driver::GpuUuid;

/// Longest wait of each step: the connection, each send and each receive. The driver needs at most
/// 0.2 s to create 64 GiB (F6 in `docs/internals/facts.md`); the rest leaves the agent time to
/// replace a hung provisioner.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(crate) struct AgentClient {
    socket: PathBuf,
}

/// Reason for which the agent gave no response.
#[derive(Debug)]
pub(crate) enum ClientError {
    /// The agent does not listen at the socket, did not respond in time, or sent bytes that are no
    /// response.
    Unreachable { path: String, source: io::Error },
    /// The agent refused the connection.
    Rejected(RejectReason),
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

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request and returns the response and its file descriptor.
    pub(crate) fn request(
        &self,
        request: &Request,
    ) -> Result<(Response, Option<OwnedFd>), ClientError> {
        self.request_while(request, || ())
    }

    /// Sends a request, runs `meanwhile`, and returns the response and its file descriptor.
    pub(crate) fn request_while(
        &self,
        request: &Request,
        meanwhile: impl FnOnce(),
    ) -> Result<(Response, Option<OwnedFd>), ClientError> {
        let exchange = || {
            let stream = connect_to(&self.socket, STEP_TIMEOUT)?;
            send_message(&stream, request, None)?;
            meanwhile();
            receive_message(&stream)
        };
        match exchange() {
            Ok((Response::Rejected { reason }, _)) => Err(ClientError::Rejected(reason)),
            Ok(response) => Ok(response),
            Err(source) => Err(ClientError::Unreachable {
                path: self.socket.display().to_string(),
                source,
            }),
        }
    }
}

/// Calls `ask` with the account of a GPU, and then with that of a MIG instance if the agent does
/// not know the first.
///
/// The driver does not say whether a UUID is a MIG instance's, and the agent knows the account
/// under only one of both names. `is_unknown` recognizes the agent's answer to the other.
pub(crate) fn with_gpu_or_mig_account<T, E>(
    gpu: GpuUuid,
    mut ask: impl FnMut(Account) -> Result<T, E>,
    is_unknown: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let of_gpu = gpu.to_string();
    let of_instance = of_gpu.replacen("GPU-", "MIG-", 1);
    match ask(Account::Device(of_gpu)) {
        Err(error) if is_unknown(&error) => ask(Account::Device(of_instance)),
        done => done,
    }
}
