//! The identity of memory as it is told to others, sealed by the node so that nobody can make one up.
//!
//! ```text
//! process A -- own, kept --> agent     a token: node, GPU, container, G, P, L, block, and a seal
//!     |
//!     |  the token's bytes, by any channel
//!     v
//! process B -- redeem -----> agent     what it names; or why that is not there any more
//! ```
//!
//! Which generations a token has the agent says, of what it knows of the process that asks. It redeems one for processes
//! of the same namespace, and only while the GPU, the process image and the lease are those of the time at which it was
//! sealed. Its answer is true of the moment at which it is given. A token is no right: it opens nothing.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use bursar_protocol::VERSION;
use bursar_protocol::wire::token::{TokenAnswer, TokenQuestion};
use bursar_protocol::wire::{Account, Reason, ToAgent, ToShim};

pub use bursar_protocol::wire::token::{
    Generation, Generations, GpuToken, MAX_TOKEN, MemoryId, TokenRefusal,
};

use crate::agent_client::{AgentClient, ClientError, with_gpu_or_mig_account};
use crate::driver::GpuUuid;
use crate::retained::RetainedLease;

/// Why there is no token, or why one is worth nothing.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Nobody listens where the agent should, or it took too long, or it is one that knows no tokens.
    #[error("asking the agent at {path}: {source}; is this a container with Bursar's GPU memory?")]
    AgentUnreachable {
        /// The socket.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The agent does not talk to this process.
    #[error("the agent refused to talk: {0:?}")]
    Rejected(Reason),
    /// The agent answered something that is no answer to what it was asked.
    #[error("the agent's answer does not fit the question")]
    UnexpectedResponse,
    /// The agent said no.
    #[error(transparent)]
    Refused(#[from] TokenRefusal),
}

impl TokenError {
    /// Whether the same question may be answered otherwise later.
    pub fn retryable(&self) -> bool {
        match self {
            TokenError::AgentUnreachable { .. } => true,
            TokenError::Rejected(reason) => *reason == Reason::Busy,
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

/// Where a process gets tokens for its memory, and asks what those of others name.
#[derive(Clone, Debug)]
pub struct TokenClient(AgentClient);

impl TokenClient {
    /// Of the agent that serves this container.
    pub fn in_container() -> TokenClient {
        TokenClient(AgentClient::in_container())
    }

    /// The same, of an agent that listens elsewhere.
    pub fn with_socket(socket: &Path) -> TokenClient {
        TokenClient(AgentClient::with_socket(socket))
    }

    /// A token for memory of a GPU that this process allocated. `block` says which, by a number that it means something
    /// by: the agent seals it as it is.
    ///
    /// # Errors
    /// [`TokenRefusal::NoSession`] where the process allocated through no shim, and others.
    pub fn seal_allocation(&self, gpu: GpuUuid, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(gpu, 0, block)
    }

    /// A token for a block of kept memory, an offset say. It ends with this process image, as every token; the next one
    /// that opens the lease gets others.
    ///
    /// # Errors
    /// [`TokenRefusal::NoLease`] where the lease was discarded, and others.
    pub fn seal_retained(&self, lease: &RetainedLease, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(lease.context().uuid(), lease.lease(), block)
    }

    /// What a token names, if it is still there and is of this container's namespace.
    ///
    /// # Errors
    /// Why it is worth nothing; [`TokenRefusal::Fenced`] says what of it has ended.
    pub fn redeem(&self, token: &GpuToken) -> Result<MemoryId, TokenError> {
        let request = TokenQuestion::Redeem {
            version: VERSION,
            token: token.clone(),
        };
        match self.request(request)? {
            TokenAnswer::Redeemed(id) => Ok(id),
            TokenAnswer::Refused(reason) => Err(reason.into()),
            TokenAnswer::Sealed(_) => Err(TokenError::UnexpectedResponse),
        }
    }

    fn seal(&self, gpu: GpuUuid, lease: u64, block: u64) -> Result<GpuToken, TokenError> {
        let seal = |account: Account| {
            let request = TokenQuestion::Seal {
                version: VERSION,
                account,
                lease,
                block,
            };
            match self.request(request)? {
                TokenAnswer::Sealed(token) => Ok(token),
                TokenAnswer::Refused(reason) => Err(reason.into()),
                TokenAnswer::Redeemed(_) => Err(TokenError::UnexpectedResponse),
            }
        };
        with_gpu_or_mig_account(gpu, seal, |error| {
            matches!(error, TokenError::Rejected(Reason::Account))
        })
    }

    fn request(&self, request: TokenQuestion) -> Result<TokenAnswer, TokenError> {
        let stream = self.0.send(&ToAgent::Token(request))?;
        match self.0.recv(&stream)? {
            (ToShim::Token(answer), _) => Ok(answer),
            _ => Err(TokenError::UnexpectedResponse),
        }
    }
}
