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

use crate::agent_client::{Agent, Unheard, by_name};
use crate::driver::GpuUuid;
use crate::retained::Kept;

/// Why there is no token, or why one is worth nothing.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Nobody listens where the agent should, or it took too long, or it is one that knows no tokens.
    #[error("asking the agent at {path}: {source}; is this a container with Bursar's GPU memory?")]
    Agent {
        /// The socket.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The agent does not talk to this process.
    #[error("the agent refused to talk: {0:?}")]
    Goodbye(Reason),
    /// The agent answered something that is no answer to what it was asked.
    #[error("the agent's answer does not fit the question")]
    Unexpected,
    /// The agent said no.
    #[error(transparent)]
    Refused(#[from] TokenRefusal),
}

impl TokenError {
    /// Whether the same question may be answered otherwise later.
    pub fn retryable(&self) -> bool {
        match self {
            TokenError::Agent { .. } => true,
            TokenError::Goodbye(reason) => *reason == Reason::Busy,
            TokenError::Refused(why) => *why == TokenRefusal::Unavailable,
            TokenError::Unexpected => false,
        }
    }
}

impl From<Unheard> for TokenError {
    fn from(unheard: Unheard) -> TokenError {
        match unheard {
            Unheard::Away { path, source } => TokenError::Agent { path, source },
            Unheard::Goodbye(reason) => TokenError::Goodbye(reason),
        }
    }
}

/// Where a process gets tokens for its memory, and asks what those of others name.
#[derive(Clone, Debug)]
pub struct Tokens(Agent);

impl Tokens {
    /// Of the agent that serves this container.
    pub fn of_this_container() -> Tokens {
        Tokens(Agent::of_this_container())
    }

    /// The same, of an agent that listens elsewhere.
    pub fn at(socket: &Path) -> Tokens {
        Tokens(Agent::at(socket))
    }

    /// A token for memory of a GPU that this process allocated. `block` says which, by a number that it means something
    /// by: the agent seals it as it is.
    ///
    /// # Errors
    /// [`TokenRefusal::NoSession`] where the process allocated through no shim, and others.
    pub fn own(&self, gpu: GpuUuid, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(gpu, 0, block)
    }

    /// A token for a block of kept memory, an offset say. It ends with this process image, as every token; the next one
    /// that opens the lease gets others.
    ///
    /// # Errors
    /// [`TokenRefusal::NoLease`] where the lease was discarded, and others.
    pub fn kept(&self, kept: &Kept, block: u64) -> Result<GpuToken, TokenError> {
        self.seal(kept.context().uuid(), kept.lease(), block)
    }

    /// What a token names, if it is still there and is of this container's namespace.
    ///
    /// # Errors
    /// Why it is worth nothing; [`TokenRefusal::Fenced`] says what of it has ended.
    pub fn redeem(&self, token: &GpuToken) -> Result<MemoryId, TokenError> {
        let question = TokenQuestion::Redeem {
            version: VERSION,
            token: token.clone(),
        };
        match self.ask(question)? {
            TokenAnswer::Redeemed(id) => Ok(id),
            TokenAnswer::Refused(why) => Err(why.into()),
            TokenAnswer::Sealed(_) => Err(TokenError::Unexpected),
        }
    }

    fn seal(&self, gpu: GpuUuid, lease: u64, block: u64) -> Result<GpuToken, TokenError> {
        let seal = |account: Account| {
            let question = TokenQuestion::Seal {
                version: VERSION,
                account,
                lease,
                block,
            };
            match self.ask(question)? {
                TokenAnswer::Sealed(token) => Ok(token),
                TokenAnswer::Refused(why) => Err(why.into()),
                TokenAnswer::Redeemed(_) => Err(TokenError::Unexpected),
            }
        };
        by_name(gpu, seal, |error| {
            matches!(error, TokenError::Goodbye(Reason::Account))
        })
    }

    fn ask(&self, question: TokenQuestion) -> Result<TokenAnswer, TokenError> {
        let stream = self.0.say(&ToAgent::Token(question))?;
        match self.0.hear(&stream)? {
            (ToShim::Token(answer), _) => Ok(answer),
            _ => Err(TokenError::Unexpected),
        }
    }
}
