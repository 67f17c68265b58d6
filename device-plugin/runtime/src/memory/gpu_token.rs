//! Requests, redeems and verifies tokens: identities of memory that the node's agent signs.
//!
//! ```text
//! process A -- seal ---> agent     a token: node, GPU, container, generations, lease, block
//!     |                            and the signature of the node's key
//!     |  the token's bytes, by any channel
//!     v
//! process B -- redeem -> agent     the identity, or the reason for which the token is void
//! program C -- verify              the same identity, anywhere, by the node's public key
//! ```
//!
//! The agent sets the generations of a token from its own records of the calling process. The agent
//! redeems a token for processes of the same namespace only. GPU, process image and lease must be
//! the same as when the token was sealed. The answer is true only at the moment of the response. A
//! token grants no access.
//!
//! A program without the agent of the token's node, on another node or in no container, calls
//! [`verify`]. The program learns which node signed the token and what the token names. Of the
//! generations it can check only that of the GPU: [`is_current`] compares it with the node's
//! present one. If they differ, the memory is lost. If they are equal, its process or its lease may
//! still have ended, which only the agent knows.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use bursar_protocol::VERSION;
use bursar_protocol::messages::signed_token::SignedToken;
use bursar_protocol::messages::token::{TokenRequest, TokenResponse};
use bursar_protocol::messages::{Account, RejectReason, Request, Response};
use ring::signature::{ED25519, UnparsedPublicKey};

pub use bursar_protocol::messages::signed_token::NodePublicKey;
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
    fn from(error: ClientError) -> TokenError {
        match error {
            ClientError::Unreachable { path, source } => {
                TokenError::AgentUnreachable { path, source }
            }
            ClientError::Rejected(reason) => TokenError::Rejected(reason),
        }
    }
}

/// Reason for which a token is not of the node with a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The bytes are no token, or one of another version.
    #[error(
        "failed to verify the token: it is not a memory token of this version; use one version of \
         library and agent"
    )]
    Malformed,
    /// Another key signed the token: of another node, or of this node before its key was replaced.
    #[error(
        "failed to verify the token: another key signed it; compare its node with the GpuNode, or \
         ask for a new token if the node has restarted"
    )]
    OtherKey,
    /// The token was changed or forged.
    #[error("failed to verify the token: its signature is wrong; do not use it")]
    Forged,
}

/// Returns the identity in a token that the node with this public key has signed. Needs neither an
/// agent nor a GPU.
///
/// The result is what was true when the token was sealed. Compare its node with the name of the
/// `GpuNode` that has the key, and ask [`is_current`] about its GPU.
///
/// # Errors
/// [`VerifyError`] for a token that the key has not signed.
pub fn verify(token: &GpuToken, key: &NodePublicKey) -> Result<MemoryId, VerifyError> {
    let token = SignedToken::parse(token).map_err(|_| VerifyError::Malformed)?;
    if !token.names_key(key) {
        return Err(VerifyError::OtherKey);
    }
    UnparsedPublicKey::new(&ED25519, key.0)
        .verify(&token.signed_bytes(), token.signature())
        .map_err(|_| VerifyError::Forged)?;
    Ok(token.id)
}

/// Returns whether the GPU still has the memory that a token names.
///
/// `gpus` are the UUID and the generation of each GPU in `status.gpus` of the node's `GpuNode`.
///
/// - `Some(true)`: the GPU's generation is the token's. The process or the lease may have ended,
///   which only the node's agent knows.
/// - `Some(false)`: the generation is another one, so the memory is lost.
/// - `None`: the `GpuNode` does not list the GPU, so nothing is known.
pub fn is_current<'a>(
    memory: &MemoryId,
    gpus: impl IntoIterator<Item = (&'a str, u64)>,
) -> Option<bool> {
    let mut gpus = gpus.into_iter();
    let (_, generation) = gpus.find(|(uuid, _)| *uuid == memory.gpu)?;
    Some(generation == memory.generations.gpu)
}

/// Client of the agent's token service. Each call makes a connection of its own and blocks until
/// the agent responds. The call fails after 30 s without progress.
#[derive(Clone, Debug)]
pub struct TokenClient(AgentClient);

impl TokenClient {
    /// Returns a client of the agent that serves this container.
    pub fn in_container() -> TokenClient {
        TokenClient(AgentClient::in_container())
    }

    /// Returns a client of an agent at another socket.
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

    /// Seals a token; a `lease` of 0 means memory without a lease.
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
            (Response::Token(response), _) => Ok(response),
            _ => Err(TokenError::UnexpectedResponse),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key, and a token that it signed, by the Python code of RFC 8032.
    const KEY: &str = "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c";
    const TOKEN: &str = "028a88e3dd7409f195066e6f64652d61284750552d30303030303030302d303030302d303030302d3030\
        30302d303030303030303030303031050000000000000003000000000000000e00000000000000020000\
        00000000006300000000000000db17f4c94f73ca32563fd859cd128119d135d4e91ad1423e3ba917e07b\
        2459cce2008267198546a4a0458e1fc119e6d5c0917d651a6ef7c4a6c32d110e952e0e";

    fn token_bytes() -> Vec<u8> {
        let (pairs, _) = TOKEN.as_bytes().as_chunks::<2>();
        let digits = pairs.iter().map(|pair| std::str::from_utf8(pair).unwrap());
        digits
            .map(|pair| u8::from_str_radix(pair, 16).unwrap())
            .collect()
    }

    fn verified(bytes: Vec<u8>, key: &NodePublicKey) -> Result<MemoryId, VerifyError> {
        verify(&GpuToken::try_from(bytes).unwrap(), key)
    }

    #[test]
    fn token_is_verified_anywhere_by_the_public_key() {
        let id = verified(token_bytes(), &KEY.parse().unwrap()).unwrap();
        let expected = MemoryId {
            node: "node-a".to_owned(),
            gpu: "GPU-00000000-0000-0000-0000-000000000001".to_owned(),
            container: 5,
            generations: Generations {
                gpu: 3,
                process: 14,
                lease: 2,
            },
            block: 99,
        };
        assert_eq!(id, expected);
    }

    #[test]
    fn memory_is_current_while_its_gpu_generation_is() {
        let id = verified(token_bytes(), &KEY.parse().unwrap()).unwrap();
        let current = |uuid, generation| is_current(&id, [("GPU-other", 9), (uuid, generation)]);
        assert_eq!(current(&*id.gpu, 3), Some(true));
        assert_eq!(current(&*id.gpu, 4), Some(false));
        assert_eq!(current(&*id.gpu, 2), Some(false));
        assert_eq!(current("GPU-unlisted", 3), None);
    }

    #[test]
    fn changed_token_and_other_key_are_distinguished() {
        let key: NodePublicKey = KEY.parse().unwrap();
        let mut other = key;
        other.0[0] ^= 1;
        assert_eq!(verified(token_bytes(), &other), Err(VerifyError::OtherKey));
        other = key;
        other.0[31] ^= 1;
        assert_eq!(verified(token_bytes(), &other), Err(VerifyError::Forged));
        for place in 0..token_bytes().len() {
            for bit in 0..8 {
                let mut bytes = token_bytes();
                bytes[place] ^= 1 << bit;
                assert!(verified(bytes, &key).is_err(), "byte {place}, bit {bit}");
            }
        }
    }
}
