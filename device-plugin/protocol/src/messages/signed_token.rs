//! Defines the layout of a memory token: what it names, and the signature of the node's key.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the format, 2 |
//! | 8 | the first bytes of the node's public key |
//! | 1 + n | the node's name, after its length |
//! | 1 + n | the GPU's UUID as NVML prints it, after its length |
//! | 5 x 8 | the container, the GPU, process and lease generations, and the block, little endian |
//! | 64 | Ed25519 signature (RFC 8032) of a label and all bytes before |
//!
//! The agent signs and redeems. Any other program verifies with the public key, which the node's
//! `GpuNode` has in `status.tokenKey`.

use std::fmt;
use std::str::FromStr;

use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};

use super::DecodeError;
use super::token::{GpuToken, MAX_NODE, MAX_TOKEN, MemoryId};

const FORMAT: u8 = 2;
const KEY_ID_LENGTH: usize = 8;
const SIGNATURE_LENGTH: usize = 64;
/// Separates tokens from anything else that the key may sign later.
const LABEL: &[u8] = b"bursar.dev/gpu-token/2\0";

// The longest UUID that the agent's parser accepts has 100 bytes.
const _: () =
    assert!(1 + KEY_ID_LENGTH + 1 + MAX_NODE + 1 + 100 + 5 * 8 + SIGNATURE_LENGTH <= MAX_TOKEN);

/// The public half of a node's key for memory tokens (Ed25519).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodePublicKey(pub [u8; 32]);

impl NodePublicKey {
    fn id(&self) -> [u8; KEY_ID_LENGTH] {
        std::array::from_fn(|index| self.0[index])
    }
}

impl fmt::Display for NodePublicKey {
    /// Formats the key as 64 hex digits, as `GpuNode` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl FromStr for NodePublicKey {
    type Err = DecodeError;

    /// Parses 64 hex digits.
    ///
    /// # Errors
    /// [`DecodeError`] for anything else.
    fn from_str(text: &str) -> Result<NodePublicKey, DecodeError> {
        let key = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok();
        let key = key.and_then(|key| key.try_into().ok());
        key.map(NodePublicKey)
            .ok_or(DecodeError::BadValue("public key (64 hex digits)"))
    }
}

/// A token before its signature.
#[derive(Clone, Debug)]
pub struct UnsignedToken(Vec<u8>);

impl UnsignedToken {
    /// A token of the node with this key.
    pub fn new(key: &NodePublicKey, id: &MemoryId) -> UnsignedToken {
        let mut bytes = vec![FORMAT];
        bytes.extend(key.id());
        bytes.extend(id.encode());
        UnsignedToken(bytes)
    }

    /// Returns the bytes to sign.
    pub fn signed_bytes(&self) -> Vec<u8> {
        [LABEL, &self.0].concat()
    }

    /// Returns the token with its signature.
    ///
    /// # Errors
    /// [`DecodeError`] for names that are too long.
    pub fn with_signature(self, signature: &[u8]) -> Result<GpuToken, DecodeError> {
        GpuToken::try_from([&self.0, signature].concat())
    }
}

/// The parts of a token with an unverified signature.
#[derive(Clone, Debug)]
pub struct SignedToken<'a> {
    /// The memory that the token claims to name.
    pub id: MemoryId,
    key_id: [u8; KEY_ID_LENGTH],
    message: &'a [u8],
    signature: &'a [u8; SIGNATURE_LENGTH],
}

impl<'a> SignedToken<'a> {
    /// Parses a token.
    ///
    /// # Errors
    /// [`DecodeError`] for bytes that no agent signs, and for tokens of another version.
    pub fn parse(token: &'a GpuToken) -> Result<SignedToken<'a>, DecodeError> {
        let malformed = DecodeError::BadValue("token");
        let (message, signature) = token
            .as_bytes()
            .split_last_chunk::<SIGNATURE_LENGTH>()
            .ok_or(malformed)?;
        let [FORMAT, rest @ ..] = message else {
            return Err(malformed);
        };
        let (key_id, body) = rest.split_first_chunk::<KEY_ID_LENGTH>().ok_or(malformed)?;
        Ok(SignedToken {
            id: MemoryId::decode(body)?,
            key_id: *key_id,
            message,
            signature,
        })
    }

    /// Returns whether the token names this key as the one that signed it.
    pub fn names_key(&self, key: &NodePublicKey) -> bool {
        self.key_id == key.id()
    }

    /// Returns the bytes that the signature covers.
    pub fn signed_bytes(&self) -> Vec<u8> {
        [LABEL, self.message].concat()
    }

    /// Returns the signature.
    pub fn signature(&self) -> &[u8] {
        self.signature
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::token::Generations;

    fn id(node: String, gpu: String) -> MemoryId {
        MemoryId {
            node,
            gpu,
            container: 5,
            generations: Generations {
                gpu: 3,
                process: 14,
                lease: 2,
            },
            block: 99,
        }
    }

    #[test]
    fn token_parses_to_what_was_signed() {
        let (key, other) = (NodePublicKey([7; 32]), NodePublicKey([8; 32]));
        let id = id("n".repeat(MAX_NODE), "M".repeat(100));
        let unsigned = UnsignedToken::new(&key, &id);
        let covered = unsigned.signed_bytes();
        let token = unsigned.with_signature(&[9; SIGNATURE_LENGTH]).unwrap();
        let parsed = SignedToken::parse(&token).unwrap();
        assert_eq!((&parsed.id, parsed.signed_bytes()), (&id, covered));
        assert_eq!(parsed.signature(), [9; SIGNATURE_LENGTH]);
        assert!(parsed.names_key(&key) && !parsed.names_key(&other));
        for length in 0..token.as_bytes().len() {
            let cut = GpuToken::try_from(token.as_bytes()[..length].to_vec()).unwrap();
            assert!(SignedToken::parse(&cut).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn public_key_is_written_as_hex() {
        let key = NodePublicKey(std::array::from_fn(|index| {
            u8::try_from(index * 8).unwrap()
        }));
        let text = key.to_string();
        assert!(text.starts_with("00081018"), "{text}");
        assert_eq!(text.parse(), Ok(key));
        assert_eq!(text.to_uppercase().parse(), Ok(key));
        for wrong in [
            "",
            "00",
            &text[1..],
            &format!("{text}0"),
            &text.replace("00", "+0"),
        ] {
            assert!(wrong.parse::<NodePublicKey>().is_err(), "{wrong}");
        }
    }
}
