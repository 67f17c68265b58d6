//! Defines the requests and responses about memory tokens.
//!
//! Each request is a connection of its own on the allocation's socket: one request, one response.
//!
//! ```text
//! client                                      agent
//!   Seal {version, account, lease, block} ->    (lease 0: the process's own memory)
//!                                         <-  Sealed {token} or Refused {why}
//!   Redeem {version, token}               ->    (the token of any process of the namespace)
//!                                         <-  Redeemed {memory id} or Refused {why}
//! ```
//!
//! A process that asks for a token names its memory, but not the generations: only the agent knows
//! these. An invalid request is answered with `Rejected`, as every other message is.

mod encoding;

use super::codec::Decoder;
use super::{Account, DecodeError};
use encoding::{decode_memory, encode_memory};

pub(super) use encoding::{decode_request, decode_response, encode_request, encode_response};

/// The most bytes of a token: more than the longest names of a node and of a GPU need.
pub const MAX_TOKEN: usize = 512;

/// The longest name of a node: what Kubernetes allows (RFC 1123 subdomain).
pub const MAX_NODE: usize = 253;

/// A [`MemoryId`] that the issuing agent has signed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuToken(Vec<u8>);

impl GpuToken {
    /// Returns the bytes, to be sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for GpuToken {
    type Error = DecodeError;

    /// Wraps bytes, without a check that they are a token.
    ///
    /// # Errors
    /// [`DecodeError`] for more than [`MAX_TOKEN`] bytes.
    fn try_from(bytes: Vec<u8>) -> Result<GpuToken, DecodeError> {
        match bytes.len() {
            0..=MAX_TOKEN => Ok(GpuToken(bytes)),
            _ => Err(DecodeError::TooLong("token")),
        }
    }
}

/// Identifies memory across all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    /// The node's name in the cluster, at most [`MAX_NODE`] bytes.
    pub node: String,
    /// The UUID of the GPU or the MIG instance, as NVML prints it.
    pub gpu: String,
    /// The container whose process has the memory. Process generations count its images.
    pub container: u64,
    /// The generations that the memory belongs to.
    pub generations: Generations,
    /// The block's number in its process.
    pub block: u64,
}

/// The generations of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generations {
    /// The GPU generation.
    pub gpu: u64,
    /// The generation of the process image that has the memory.
    pub process: u64,
    /// The number of the lease. Zero for memory without a lease.
    pub lease: u64,
}

/// The kind of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// The GPU generation: ends when the GPU loses its memory.
    Gpu,
    /// The process generation: ends with the process image, when it is poisoned, or when its GPU is
    /// drained.
    Process,
    /// The lease: ends when its memory is lost or given up.
    Lease,
}

/// A request about tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenRequest {
    /// Requests a token for memory of the requesting process.
    Seal {
        /// The highest version that the process speaks.
        version: u16,
        /// The GPU.
        account: Account,
        /// The lease that its pod has open; zero for its own memory.
        lease: u64,
        /// The block, by the process's own number.
        block: u64,
    },
    /// Asks which memory a token names, if it still exists.
    Redeem {
        /// The highest version that the process speaks.
        version: u16,
        /// The token.
        token: GpuToken,
    },
}

impl TokenRequest {
    /// Returns the highest version that the client speaks.
    pub fn version(&self) -> u16 {
        match self {
            TokenRequest::Seal { version, .. } | TokenRequest::Redeem { version, .. } => *version,
        }
    }

    /// Returns the GPU that the request names.
    pub fn account(&self) -> Option<&Account> {
        match self {
            TokenRequest::Seal { account, .. } => Some(account),
            TokenRequest::Redeem { .. } => None,
        }
    }
}

/// A response about tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenResponse {
    /// The token.
    Sealed(GpuToken),
    /// The token's memory. At the time of the response all of its generations were current.
    Redeemed(MemoryId),
    /// The request was refused.
    Refused(TokenRefusal),
}

/// Why no token is issued, or a token is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// The bytes are no token, or of a format that this agent does not know.
    #[error("not a memory token, or one of another version")]
    Malformed,
    /// The token was changed, or sealed with another key than the node's present one.
    #[error(
        "the memory token's seal is not of this node's present key; ask its issuer for a new token"
    )]
    Forged,
    /// The token names another node: ask there.
    #[error("the memory is on node {node}: redeem the token there")]
    Elsewhere {
        /// The node.
        node: String,
    },
    /// The token's container has ended, or is not of the asking namespace.
    #[error("no container of this namespace has such memory")]
    Unknown,
    /// A generation of the token has ended.
    #[error("{which:?} generation {generation} of the memory token has ended; ask for a new token")]
    Fenced {
        /// The first ended generation.
        which: Generation,
        /// The token's generation.
        generation: u64,
    },
    /// The asking process image is poisoned, or its GPU is drained.
    #[error("this process image is fenced: end it")]
    AskerFenced,
    /// The asking process has no session, so the agent knows of no memory.
    #[error("this process has no memory here: allocate through the shim first")]
    NoSession,
    /// The pod has no such lease open.
    #[error("this pod has no such lease open")]
    NoLease,
    /// The agent is starting, or the fd store is down: try again later.
    #[error("tokens are not available now")]
    Unavailable,
}

impl MemoryId {
    /// Encodes the id. Names of more than 255 bytes are cut.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        encode_memory(&mut out, self);
        out
    }

    /// Decodes what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`DecodeError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<MemoryId, DecodeError> {
        let mut decoder = Decoder(bytes);
        let id = decode_memory(&mut decoder)?;
        decoder.finish(id)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use crate::messages::token::encoding::decode_token;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn tokens() -> impl Strategy<Value = GpuToken> {
        vec(any::<u8>(), 0..=MAX_TOKEN).prop_map(|bytes| GpuToken::try_from(bytes).unwrap())
    }

    fn memories() -> impl Strategy<Value = MemoryId> {
        let numbers = any::<(u64, u64, u64, u64, u64)>();
        ("[ -~]{0,253}", "[ -~]{0,100}", numbers).prop_map(
            |(node, gpu, (container, of_gpu, process, lease, block))| MemoryId {
                node,
                gpu,
                container,
                generations: Generations {
                    gpu: of_gpu,
                    process,
                    lease,
                },
                block,
            },
        )
    }

    pub(in super::super) fn questions(
        account: impl Strategy<Value = Account>,
    ) -> impl Strategy<Value = TokenRequest> {
        prop_oneof![
            (any::<(u16, u64, u64)>(), account).prop_map(|((version, lease, block), account)| {
                TokenRequest::Seal {
                    version,
                    account,
                    lease,
                    block,
                }
            }),
            (any::<u16>(), tokens())
                .prop_map(|(version, token)| TokenRequest::Redeem { version, token }),
        ]
    }

    pub(in super::super) fn answers() -> impl Strategy<Value = TokenResponse> {
        let which = prop_oneof![
            Just(Generation::Gpu),
            Just(Generation::Process),
            Just(Generation::Lease),
        ];
        let refusal = prop_oneof![
            Just(TokenRefusal::Malformed),
            Just(TokenRefusal::Forged),
            "[ -~]{0,253}".prop_map(|node| TokenRefusal::Elsewhere { node }),
            Just(TokenRefusal::Unknown),
            (which, any::<u64>())
                .prop_map(|(which, generation)| TokenRefusal::Fenced { which, generation }),
            Just(TokenRefusal::AskerFenced),
            Just(TokenRefusal::NoSession),
            Just(TokenRefusal::NoLease),
            Just(TokenRefusal::Unavailable),
        ];
        prop_oneof![
            tokens().prop_map(TokenResponse::Sealed),
            memories().prop_map(TokenResponse::Redeemed),
            refusal.prop_map(TokenResponse::Refused),
        ]
    }

    proptest! {
        #[test]
        fn memory_id_round_trips(id in memories(), more: u8) {
            let mut bytes = id.encode();
            prop_assert_eq!(MemoryId::decode(&bytes), Ok(id));
            bytes.push(more);
            prop_assert_eq!(MemoryId::decode(&bytes), Err(DecodeError::Trailing(1)));
        }
    }

    #[test]
    fn token_longer_than_the_bound_is_rejected() {
        assert!(GpuToken::try_from(vec![0; MAX_TOKEN]).is_ok());
        let long = Err(DecodeError::TooLong("token"));
        assert_eq!(GpuToken::try_from(vec![0; MAX_TOKEN + 1]), long);
        let mut encoded = u16::try_from(MAX_TOKEN + 1).unwrap().to_le_bytes().to_vec();
        encoded.extend([0; MAX_TOKEN + 1]);
        assert_eq!(decode_token(&mut Decoder(&encoded)), long);
    }
}
