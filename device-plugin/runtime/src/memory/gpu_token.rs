//! Requests and redeems tokens: identities of memory that the node's agent seals against forgery.
//!
//! ```text
//! process A -- seal ---> agent     a token: node, GPU, container, generations, lease, block, MAC
//!     |
//!     |  the token's bytes, by any channel
//!     v
//! process B -- redeem -> agent     the identity, or the reason for which the token is void
//! ```
//!
//! The agent sets the generations of a token from its own records of the calling process. The agent
//! redeems a token for processes of the same namespace, while GPU, process image and lease are the
//! same as when the token was sealed. The answer is true only at the moment of the response. A
//! token grants no access.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use bursar_protocol::VERSION;
use bursar_protocol::messages::token::{TokenRequest, TokenResponse};
use bursar_protocol::messages::{Account, RejectReason, Request, Response};

pub use bursar_protocol::messages::token::{
    Generation, Generations, GpuToken, MAX_TOKEN, MemoryId, TokenRefusal,
};

use crate::agent_client::{AgentClient, ClientError, with_gpu_or_mig_account};
use crate::driver::GpuUuid;
use crate::retained::RetainedLease;

/// Reason for which the agent issued or redeemed no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The agent does not listen at the socket, did not respond in time, or does not support
    /// tokens.
    #[error(
        "failed to reach the agent at {path}: {source}; run in a container with Bursar's GPU memory"
    )]
    AgentUnreachable {
        /// Path of the socket.
        path: String,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The agent refused the connection.
    #[error(
        "failed to connect to the agent: it rejected this process ({0:?}); see the agent's log"
    )]
    Rejected(RejectReason),
    /// The agent's response does not match the request.
    #[error(
        "failed to read the agent's response: it does not match the request; use one version of library and agent"
    )]
    UnexpectedResponse,
    /// The agent refused the request.
    #[error(transparent)]
    Refused(#[from] TokenRefusal),
}

impl TokenError {
    /// Returns whether the same request may succeed later.
    pub fn retryable(&self) -> bool {
        match self {
            TokenError::AgentUnreachable { .. } => true,
            TokenError::Rejected(reason) => *reason == RejectReason::Busy,
            TokenError::Refused(reason) => *reason == TokenRefusal::Unavailable,
            TokenError::UnexpectedResponse => false,
        }
    }
}

impl From<ClientError> for TokenError {
    fn from(unheard: ClientError) -> TokenError {
        match unheard {
            ClientError::Unreachable { path, source } => {
                TokenError::AgentUnreachable { path, source }
            }
            ClientError::Rejected(reason) => TokenError::Rejected(reason),
        }
    }
}

/// Client of the agent's token service.
#[derive(Clone, Debug)]
pub struct TokenClient(AgentClient);

impl TokenClient {
    /// Connects to the agent of this container.
    pub fn in_container() -> TokenClient {
        TokenClient(AgentClient::in_container())
    }

    /// Connects to an agent at another socket.
    pub fn with_socket(socket: &Path) -> TokenClient {
        TokenClient(AgentClient::with_socket(socket))
    }

    /// Seals a token for memory that this process allocated.
    ///
    /// `block` is a number of the caller's choice that identifies the memory; the agent seals it as
    /// is.
    ///
    /// # Errors
    /// [`TokenRefusal::NoSession`] if the process did not allocate through the shim, and others.
    pub fn seal_allocation(&self, gpu: GpuUuid, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(gpu, 0, block)
    }

    /// Seals a token for a part of a retained lease; `block` may be an offset.
    ///
    /// The token ends with this process image. The next image that opens the lease requests new
    /// tokens.
    ///
    /// # Errors
    /// [`TokenRefusal::NoLease`] if the lease was discarded, and others.
    pub fn seal_retained(&self, lease: &RetainedLease, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(lease.context().uuid(), lease.lease(), block)
    }

    /// Returns the identity that a token seals, if the memory still exists and is of this
    /// container's namespace.
    ///
    /// # Errors
    /// The reason for which the token is void; [`TokenRefusal::Fenced`] says which generation has
    /// ended.
    pub fn redeem(&self, token: &GpuToken) -> Result<MemoryId, TokenError> {
        let request = TokenRequest::Redeem {
            version: VERSION,
            token: token.clone(),
        };
        match self.request(request)? {
            TokenResponse::Redeemed(id) => Ok(id),
            TokenResponse::Refused(reason) => Err(reason.into()),
            TokenResponse::Sealed(_) => Err(TokenError::UnexpectedResponse),
        }
    }

    fn seal(&self, gpu: GpuUuid, lease: u64, block: u64) -> Result<GpuToken, TokenError> {
        let seal = |account: Account| {
            let request = TokenRequest::Seal {
                version: VERSION,
                account,
                lease,
                block,
            };
            match self.request(request)? {
                TokenResponse::Sealed(token) => Ok(token),
                TokenResponse::Refused(reason) => Err(reason.into()),
                TokenResponse::Redeemed(_) => Err(TokenError::UnexpectedResponse),
            }
        };
        with_gpu_or_mig_account(gpu, seal, |error| {
            matches!(error, TokenError::Rejected(RejectReason::Account))
        })
    }

    fn request(&self, request: TokenRequest) -> Result<TokenResponse, TokenError> {
        match self.0.request(&Request::Token(request))? {
            (Response::Token(answer), _) => Ok(answer),
            _ => Err(TokenError::UnexpectedResponse),
        }
    }
}
