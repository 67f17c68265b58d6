//! What a process and the agent say to each other about tokens of memory.
//!
//! Each question is a connection of its own on the allocation's socket: one message, one answer.
//!
//! ```text
//! client                                      agent
//!   Seal {version, account, lease, block} ->    (lease 0: the process's own memory)
//!                                         <-  Sealed {token} or Refused {why}
//!   Redeem {version, token}               ->    (the token of any process of the namespace)
//!                                         <-  Redeemed {what it names} or Refused {why}
//! ```
//!
//! Who asks for a token says which memory it means, and nothing of its generations: those are the agent's to know.
//! What cannot be asked at all is answered with `Goodbye`, as every other message is.

use super::{Account, DecodeError, Decoder, encode_account};

/// The most bytes of a token: more than the longest name of a node and of a GPU make.
pub const MAX_TOKEN: usize = 512;

/// The longest name of a node: what Kubernetes allows (RFC 1123 subdomain).
pub const MAX_NODE: usize = 253;

/// A sealed [`MemoryId`]: bytes that only the agent that made them can read anything from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuToken(Vec<u8>);

impl GpuToken {
    /// The bytes, for a wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for GpuToken {
    type Error = DecodeError;

    /// Whether they are a token is the agent's to say.
    ///
    /// # Errors
    /// [`WireError`] where they are more than [`MAX_TOKEN`].
    fn try_from(bytes: Vec<u8>) -> Result<GpuToken, DecodeError> {
        match bytes.len() {
            0..=MAX_TOKEN => Ok(GpuToken(bytes)),
            _ => Err(DecodeError::TooLong("token")),
        }
    }
}

/// Which memory of all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    /// The node's name in the cluster, at most [`MAX_NODE`] bytes.
    pub node: String,
    /// The GPU, or the MIG instance, as NVML prints its UUID.
    pub gpu: String,
    /// The container whose process has the memory: its images are what P counts.
    pub container: u64,
    /// The lives that it belongs to.
    pub generations: Generations,
    /// The block, as who has it numbers them.
    pub block: u64,
}

/// Which life of what memory is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generations {
    /// G, of the GPU.
    pub gpu: u64,
    /// P, of the process image that has the memory.
    pub process: u64,
    /// L, of the kept lease: its number. Zero for memory that is none.
    pub lease: u64,
}

/// A generation by what it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// G: the GPU lost its memory.
    Gpu,
    /// P: the process image has ended, or is poisoned, or its GPU is drained.
    Process,
    /// L: the lease's memory was lost, or given up.
    Lease,
}

/// What a process asks about tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenRequest {
    /// A token for memory of the process that asks.
    Seal {
        /// The highest version that the process speaks.
        version: u16,
        /// The GPU.
        account: Account,
        /// The lease that its pod has open; zero for its own memory.
        lease: u64,
        /// The block, by a number that means something to the process.
        block: u64,
    },
    /// What a token names, if that is still there.
    Redeem {
        /// The highest version that the process speaks.
        version: u16,
        /// The token.
        token: GpuToken,
    },
}

impl TokenRequest {
    /// The highest version that who asks speaks.
    pub fn version(&self) -> u16 {
        match self {
            TokenRequest::Seal { version, .. } | TokenRequest::Redeem { version, .. } => *version,
        }
    }

    /// The GPU that it asks for by name.
    pub fn account(&self) -> Option<&Account> {
        match self {
            TokenRequest::Seal { account, .. } => Some(account),
            TokenRequest::Redeem { .. } => None,
        }
    }
}

/// What the agent answers about tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenResponse {
    /// The token.
    Sealed(GpuToken),
    /// When this was said the token named this memory, and all of its generations were the present ones.
    Redeemed(MemoryId),
    /// No.
    Refused(TokenRefusal),
}

/// Why there is no token, or why one is worth nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// It is none, or of a format that this agent does not know.
    #[error("not a memory token, or one of another version")]
    Malformed,
    /// It was changed, or not sealed with the key that the node has had since its boot.
    #[error("the memory token's seal is wrong: this node did not issue it since its boot")]
    Forged,
    /// It names another node: ask there.
    #[error("the memory is on node {node}: redeem the token there")]
    Elsewhere {
        /// The node.
        node: String,
    },
    /// Its container has ended, or is none of the namespace that asks.
    #[error("no container of this namespace has such memory")]
    Unknown,
    /// What it names has ended.
    #[error("{which:?} generation {generation} of the memory token has ended; ask for a new token")]
    Fenced {
        /// The first that has.
        which: Generation,
        /// The token's.
        generation: u64,
    },
    /// The image that asks is poisoned, or its GPU is drained: it gets nothing more.
    #[error("this process image is fenced: end it")]
    AskerFenced,
    /// The process that asks for a token has no session, so no memory that the agent knows of.
    #[error("this process has no memory here: allocate through the shim first")]
    NoSession,
    /// Its pod has no such lease open.
    #[error("this pod has no such lease open")]
    NoLease,
    /// The part of the node that would know is starting, or the vault is away: ask again later.
    #[error("tokens are not available now")]
    Unavailable,
}

impl MemoryId {
    /// Its bytes. Names of more than 255 bytes are cut.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        encode_memory(&mut out, self);
        out
    }

    /// What [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`WireError`] for anything else.
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

/// A node's name is longer than other names.
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
