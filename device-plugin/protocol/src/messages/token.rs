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

use super::{Account, DecodeError, Decoder, encode_account};

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

pub(super) fn encode_request(out: &mut Vec<u8>, question: &TokenRequest) {
    match question {
        TokenRequest::Seal {
            version,
            account,
            lease,
            block,
        } => {
            out.push(1);
            out.extend_from_slice(&version.to_le_bytes());
            encode_account(out, account);
            encode_numbers(out, &[*lease, *block]);
        }
        TokenRequest::Redeem { version, token } => {
            out.push(2);
            out.extend_from_slice(&version.to_le_bytes());
            encode_token(out, token);
        }
    }
}

pub(super) fn decode_request(decoder: &mut Decoder<'_>) -> Result<TokenRequest, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenRequest::Seal {
            version: decoder.u16()?,
            account: decoder.account()?,
            lease: decoder.u64()?,
            block: decoder.u64()?,
        },
        2 => TokenRequest::Redeem {
            version: decoder.u16()?,
            token: decode_token(decoder)?,
        },
        _ => return Err(DecodeError::BadValue("question about tokens")),
    })
}

pub(super) fn encode_response(out: &mut Vec<u8>, answer: &TokenResponse) {
    match answer {
        TokenResponse::Sealed(token) => {
            out.push(1);
            encode_token(out, token);
        }
        TokenResponse::Redeemed(id) => {
            out.push(2);
            encode_memory(out, id);
        }
        TokenResponse::Refused(why) => {
            out.push(3);
            encode_refusal(out, why);
        }
    }
}

pub(super) fn decode_response(decoder: &mut Decoder<'_>) -> Result<TokenResponse, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenResponse::Sealed(decode_token(decoder)?),
        2 => TokenResponse::Redeemed(decode_memory(decoder)?),
        3 => TokenResponse::Refused(decode_refusal(decoder)?),
        _ => return Err(DecodeError::BadValue("answer about tokens")),
    })
}

fn encode_refusal(out: &mut Vec<u8>, why: &TokenRefusal) {
    match why {
        TokenRefusal::Malformed => out.push(1),
        TokenRefusal::Forged => out.push(2),
        TokenRefusal::Elsewhere { node } => {
            out.push(3);
            encode_text(out, node);
        }
        TokenRefusal::Unknown => out.push(4),
        TokenRefusal::Fenced { which, generation } => {
            let which = match which {
                Generation::Gpu => 1,
                Generation::Process => 2,
                Generation::Lease => 3,
            };
            out.extend_from_slice(&[5, which]);
            encode_numbers(out, &[*generation]);
        }
        TokenRefusal::AskerFenced => out.push(6),
        TokenRefusal::NoSession => out.push(7),
        TokenRefusal::NoLease => out.push(8),
        TokenRefusal::Unavailable => out.push(9),
    }
}

fn decode_refusal(decoder: &mut Decoder<'_>) -> Result<TokenRefusal, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenRefusal::Malformed,
        2 => TokenRefusal::Forged,
        3 => TokenRefusal::Elsewhere {
            node: decode_text(decoder)?,
        },
        4 => TokenRefusal::Unknown,
        5 => TokenRefusal::Fenced {
            which: match decoder.u8()? {
                1 => Generation::Gpu,
                2 => Generation::Process,
                3 => Generation::Lease,
                _ => return Err(DecodeError::BadValue("generation")),
            },
            generation: decoder.u64()?,
        },
        6 => TokenRefusal::AskerFenced,
        7 => TokenRefusal::NoSession,
        8 => TokenRefusal::NoLease,
        9 => TokenRefusal::Unavailable,
        _ => return Err(DecodeError::BadValue("refusal")),
    })
}

fn encode_memory(out: &mut Vec<u8>, id: &MemoryId) {
    let MemoryId {
        node,
        gpu,
        container,
        generations,
        block,
    } = id;
    encode_text(out, node);
    encode_text(out, gpu);
    let Generations {
        gpu,
        process,
        lease,
    } = generations;
    encode_numbers(out, &[*container, *gpu, *process, *lease, *block]);
}

fn decode_memory(decoder: &mut Decoder<'_>) -> Result<MemoryId, DecodeError> {
    Ok(MemoryId {
        node: decode_text(decoder)?,
        gpu: decode_text(decoder)?,
        container: decoder.u64()?,
        generations: Generations {
            gpu: decoder.u64()?,
            process: decoder.u64()?,
            lease: decoder.u64()?,
        },
        block: decoder.u64()?,
    })
}

fn encode_token(out: &mut Vec<u8>, GpuToken(bytes): &GpuToken) {
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn decode_token(decoder: &mut Decoder<'_>) -> Result<GpuToken, DecodeError> {
    let length = usize::from(decoder.u16()?);
    GpuToken::try_from(decoder.take(length)?.to_vec())
}

/// A node's name may be longer than [`MAX_NAME`](super::MAX_NAME).
fn encode_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(usize::from(u8::MAX))];
    out.push(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn decode_text(decoder: &mut Decoder<'_>) -> Result<String, DecodeError> {
    let length = usize::from(decoder.u8()?);
    let text = std::str::from_utf8(decoder.take(length)?);
    text.map(str::to_owned)
        .map_err(|_| DecodeError::BadValue("text"))
}

fn encode_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
pub(super) mod tests {
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
        let mut told = u16::try_from(MAX_TOKEN + 1).unwrap().to_le_bytes().to_vec();
        told.extend([0; MAX_TOKEN + 1]);
        assert_eq!(decode_token(&mut Decoder(&told)), long);
    }
}
