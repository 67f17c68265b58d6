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

use super::{Account, Fields, WireError, put_account};

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
    type Error = WireError;

    /// Whether they are a token is the agent's to say.
    ///
    /// # Errors
    /// [`WireError`] where they are more than [`MAX_TOKEN`].
    fn try_from(bytes: Vec<u8>) -> Result<GpuToken, WireError> {
        match bytes.len() {
            0..=MAX_TOKEN => Ok(GpuToken(bytes)),
            _ => Err(WireError::TooLong("token")),
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
pub enum TokenQuestion {
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

impl TokenQuestion {
    /// The highest version that who asks speaks.
    pub fn version(&self) -> u16 {
        match self {
            TokenQuestion::Seal { version, .. } | TokenQuestion::Redeem { version, .. } => *version,
        }
    }

    /// The GPU that it asks for by name.
    pub fn account(&self) -> Option<&Account> {
        match self {
            TokenQuestion::Seal { account, .. } => Some(account),
            TokenQuestion::Redeem { .. } => None,
        }
    }
}

/// What the agent answers about tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenAnswer {
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
        put_memory(&mut out, self);
        out
    }

    /// What [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`WireError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<MemoryId, WireError> {
        let mut fields = Fields(bytes);
        let id = memory(&mut fields)?;
        fields.end(id)
    }
}

pub(super) fn put_question(out: &mut Vec<u8>, question: &TokenQuestion) {
    match question {
        TokenQuestion::Seal {
            version,
            account,
            lease,
            block,
        } => {
            out.push(1);
            out.extend_from_slice(&version.to_le_bytes());
            put_account(out, account);
            put_numbers(out, &[*lease, *block]);
        }
        TokenQuestion::Redeem { version, token } => {
            out.push(2);
            out.extend_from_slice(&version.to_le_bytes());
            put_token(out, token);
        }
    }
}

pub(super) fn question(fields: &mut Fields<'_>) -> Result<TokenQuestion, WireError> {
    Ok(match fields.u8()? {
        1 => TokenQuestion::Seal {
            version: fields.u16()?,
            account: fields.account()?,
            lease: fields.u64()?,
            block: fields.u64()?,
        },
        2 => TokenQuestion::Redeem {
            version: fields.u16()?,
            token: token(fields)?,
        },
        _ => return Err(WireError::BadValue("question about tokens")),
    })
}

pub(super) fn put_answer(out: &mut Vec<u8>, answer: &TokenAnswer) {
    match answer {
        TokenAnswer::Sealed(token) => {
            out.push(1);
            put_token(out, token);
        }
        TokenAnswer::Redeemed(id) => {
            out.push(2);
            put_memory(out, id);
        }
        TokenAnswer::Refused(why) => {
            out.push(3);
            put_refusal(out, why);
        }
    }
}

pub(super) fn answer(fields: &mut Fields<'_>) -> Result<TokenAnswer, WireError> {
    Ok(match fields.u8()? {
        1 => TokenAnswer::Sealed(token(fields)?),
        2 => TokenAnswer::Redeemed(memory(fields)?),
        3 => TokenAnswer::Refused(refusal(fields)?),
        _ => return Err(WireError::BadValue("answer about tokens")),
    })
}

fn put_refusal(out: &mut Vec<u8>, why: &TokenRefusal) {
    match why {
        TokenRefusal::Malformed => out.push(1),
        TokenRefusal::Forged => out.push(2),
        TokenRefusal::Elsewhere { node } => {
            out.push(3);
            put_text(out, node);
        }
        TokenRefusal::Unknown => out.push(4),
        TokenRefusal::Fenced { which, generation } => {
            let which = match which {
                Generation::Gpu => 1,
                Generation::Process => 2,
                Generation::Lease => 3,
            };
            out.extend_from_slice(&[5, which]);
            put_numbers(out, &[*generation]);
        }
        TokenRefusal::AskerFenced => out.push(6),
        TokenRefusal::NoSession => out.push(7),
        TokenRefusal::NoLease => out.push(8),
        TokenRefusal::Unavailable => out.push(9),
    }
}

fn refusal(fields: &mut Fields<'_>) -> Result<TokenRefusal, WireError> {
    Ok(match fields.u8()? {
        1 => TokenRefusal::Malformed,
        2 => TokenRefusal::Forged,
        3 => TokenRefusal::Elsewhere {
            node: text(fields)?,
        },
        4 => TokenRefusal::Unknown,
        5 => TokenRefusal::Fenced {
            which: match fields.u8()? {
                1 => Generation::Gpu,
                2 => Generation::Process,
                3 => Generation::Lease,
                _ => return Err(WireError::BadValue("generation")),
            },
            generation: fields.u64()?,
        },
        6 => TokenRefusal::AskerFenced,
        7 => TokenRefusal::NoSession,
        8 => TokenRefusal::NoLease,
        9 => TokenRefusal::Unavailable,
        _ => return Err(WireError::BadValue("refusal")),
    })
}

fn put_memory(out: &mut Vec<u8>, id: &MemoryId) {
    let MemoryId {
        node,
        gpu,
        container,
        generations,
        block,
    } = id;
    put_text(out, node);
    put_text(out, gpu);
    let Generations {
        gpu,
        process,
        lease,
    } = generations;
    put_numbers(out, &[*container, *gpu, *process, *lease, *block]);
}

fn memory(fields: &mut Fields<'_>) -> Result<MemoryId, WireError> {
    Ok(MemoryId {
        node: text(fields)?,
        gpu: text(fields)?,
        container: fields.u64()?,
        generations: Generations {
            gpu: fields.u64()?,
            process: fields.u64()?,
            lease: fields.u64()?,
        },
        block: fields.u64()?,
    })
}

fn put_token(out: &mut Vec<u8>, GpuToken(bytes): &GpuToken) {
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn token(fields: &mut Fields<'_>) -> Result<GpuToken, WireError> {
    let length = usize::from(fields.u16()?);
    GpuToken::try_from(fields.take(length)?.to_vec())
}

/// A node's name is longer than other names.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(usize::from(u8::MAX))];
    out.push(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn text(fields: &mut Fields<'_>) -> Result<String, WireError> {
    let length = usize::from(fields.u8()?);
    let text = std::str::from_utf8(fields.take(length)?);
    text.map(str::to_owned)
        .map_err(|_| WireError::BadValue("text"))
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
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
    ) -> impl Strategy<Value = TokenQuestion> {
        prop_oneof![
            (any::<(u16, u64, u64)>(), account).prop_map(|((version, lease, block), account)| {
                TokenQuestion::Seal {
                    version,
                    account,
                    lease,
                    block,
                }
            }),
            (any::<u16>(), tokens())
                .prop_map(|(version, token)| TokenQuestion::Redeem { version, token }),
        ]
    }

    pub(in super::super) fn answers() -> impl Strategy<Value = TokenAnswer> {
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
            tokens().prop_map(TokenAnswer::Sealed),
            memories().prop_map(TokenAnswer::Redeemed),
            refusal.prop_map(TokenAnswer::Refused),
        ]
    }

    proptest! {
        #[test]
        fn memory_id_round_trips(id in memories(), more: u8) {
            let mut bytes = id.encode();
            prop_assert_eq!(MemoryId::decode(&bytes), Ok(id));
            bytes.push(more);
            prop_assert_eq!(MemoryId::decode(&bytes), Err(WireError::Trailing(1)));
        }
    }

    #[test]
    fn token_longer_than_the_bound_is_rejected() {
        assert!(GpuToken::try_from(vec![0; MAX_TOKEN]).is_ok());
        let long = Err(WireError::TooLong("token"));
        assert_eq!(GpuToken::try_from(vec![0; MAX_TOKEN + 1]), long);
        let mut told = u16::try_from(MAX_TOKEN + 1).unwrap().to_le_bytes().to_vec();
        told.extend([0; MAX_TOKEN + 1]);
        assert_eq!(token(&mut Fields(&told)), long);
    }
}
