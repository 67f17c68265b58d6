//! Seals memory ids, so that only the node's agent can produce a token.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the format, 1 |
//! | 1 + n | the node's name, after its length |
//! | 1 + n | the GPU's UUID as NVML prints it, after its length |
//! | 5 x 8 | the container, the GPU, process and lease generations, and the block, little endian |
//! | 32 | HMAC-SHA-256 of a label and all bytes before |

use std::fmt;

use bursar_ledger::units::{AllocationId, GpuUuid};
use bursar_protocol::messages::token::{
    Generations, GpuToken, MAX_NODE, MAX_TOKEN, MemoryId, TokenRefusal,
};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

const FORMAT: u8 = 1;
const MAC_LENGTH: usize = 32;
/// Separates tokens from anything else that the key may seal later.
const LABEL: &[u8] = b"bursar.dev/gpu-token\0";

// The longest UUID that the parser accepts has 100 bytes.
const _: () = assert!(1 + 1 + MAX_NODE + 1 + 100 + 5 * 8 + MAC_LENGTH <= MAX_TOKEN);

/// The node's name is too long for a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node's name has {0} bytes; a token has room for {MAX_NODE}")]
pub struct NameTooLong(usize);

/// Seals and unseals the tokens of one node. The key can make any token, so it stays within the
/// agent.
#[derive(Clone)]
pub struct NodeKey {
    node: String,
    mac: Hmac<Sha256>,
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeKey")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl NodeKey {
    /// A key from the node's name and 32 secret random bytes.
    ///
    /// # Errors
    /// [`NameTooLong`].
    pub fn new(node: String, secret: [u8; 32]) -> Result<NodeKey, NameTooLong> {
        if node.len() > MAX_NODE {
            return Err(NameTooLong(node.len()));
        }
        let mac = Hmac::new_from_slice(&secret).expect("HMAC takes keys of any length");
        Ok(NodeKey { node, mac })
    }

    /// Seals memory of this node.
    pub fn seal(
        &self,
        gpu: &GpuUuid,
        container: AllocationId,
        generations: Generations,
        block: u64,
    ) -> GpuToken {
        let id = MemoryId {
            node: self.node.clone(),
            gpu: gpu.as_str().to_owned(),
            container: container.bits(),
            generations,
            block,
        };
        let mut bytes = vec![FORMAT];
        bytes.extend(id.encode());
        let seal = self.keyed_mac(&bytes).finalize().into_bytes();
        bytes.extend(seal);
        GpuToken::try_from(bytes).expect("both names are bounded")
    }

    /// Returns what a token of this node names.
    ///
    /// # Errors
    /// The token is malformed, another node's, or sealed with another key.
    pub fn unseal(&self, token: &GpuToken) -> Result<MemoryId, TokenRefusal> {
        let malformed = TokenRefusal::Malformed;
        let Some((message, seal)) = token.as_bytes().split_last_chunk::<MAC_LENGTH>() else {
            return Err(malformed);
        };
        let [FORMAT, body @ ..] = message else {
            return Err(malformed);
        };
        let id = MemoryId::decode(body).map_err(|_| malformed)?;
        // The node's name is not secret, and this node cannot verify tokens of other nodes.
        if id.node != self.node {
            return Err(TokenRefusal::Elsewhere { node: id.node });
        }
        // The comparison takes constant time.
        let sealed = self.keyed_mac(message).verify_slice(seal);
        sealed.map_err(|_| TokenRefusal::Forged)?;
        Ok(id)
    }

    fn keyed_mac(&self, message: &[u8]) -> Hmac<Sha256> {
        self.mac.clone().chain_update(LABEL).chain_update(message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Generations = Generations {
        gpu: 3,
        process: 14,
        lease: 2,
    };

    fn key(node: &str, secret: u8) -> NodeKey {
        NodeKey::new(node.to_owned(), [secret; 32]).expect("a short name")
    }

    fn token() -> Vec<u8> {
        let gpu = "GPU-00000000-0000-0000-0000-000000000001".parse().unwrap();
        let sealed = key("node-a", 1).seal(&gpu, AllocationId::from_bits(5), NOW, 99);
        sealed.as_bytes().to_vec()
    }

    fn unseal(key: &NodeKey, bytes: Vec<u8>) -> Result<MemoryId, TokenRefusal> {
        key.unseal(&GpuToken::try_from(bytes).unwrap())
    }

    #[test]
    fn token_unseals_to_what_was_sealed() {
        let id = unseal(&key("node-a", 1), token()).expect("it is good");
        assert_eq!(
            (id.node.as_str(), id.container, id.generations, id.block),
            ("node-a", 5, NOW, 99)
        );
    }

    #[test]
    fn unseal_distinguishes_forged_from_elsewhere() {
        let forged = unseal(&key("node-a", 2), token());
        assert_eq!(forged, Err(TokenRefusal::Forged));
        let node = "node-a".to_owned();
        let elsewhere = unseal(&key("node-b", 1), token());
        assert_eq!(elsewhere, Err(TokenRefusal::Elsewhere { node }));
    }

    #[test]
    fn seal_is_hmac_sha_256() {
        // python3: hmac.new(bytes([1])*32, b"bursar.dev/gpu-token\0" + token[:-32], "sha256")
        let expected = [
            0x80, 0x18, 0xef, 0x95, 0x4e, 0x5a, 0xa3, 0x80, 0x8f, 0x13, 0x4f, 0xa5, 0xe9, 0x9b,
            0xf7, 0xf8, 0xb5, 0x9e, 0xc5, 0xf3, 0xc8, 0x57, 0x48, 0x10, 0xcd, 0xb9, 0xef, 0xe4,
            0x9a, 0xf2, 0x97, 0x3e,
        ];
        assert_eq!(token().last_chunk(), Some(&expected));
    }

    #[test]
    fn longest_names_fit_and_longer_ones_are_refused() {
        let longest = NodeKey::new("n".repeat(MAX_NODE), [0; 32]).unwrap();
        let gpu = format!("MIG-{}", "a".repeat(96)).parse().unwrap();
        let sealed = longest.seal(&gpu, AllocationId::from_bits(1), NOW, 0);
        assert_eq!(longest.unseal(&sealed).unwrap().gpu, gpu.as_str());
        assert!(NodeKey::new("n".repeat(MAX_NODE + 1), [0; 32]).is_err());
    }

    #[test]
    fn debug_of_a_key_hides_the_secret() {
        assert_eq!(
            format!("{:?}", key("node-a", 1)),
            "NodeKey { node: \"node-a\", .. }"
        );
    }

    proptest! {
        #[test]
        fn no_changed_bit_is_unsealed(place: prop::sample::Index, bit in 0..8u8) {
            let mut bytes = token();
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
            let refused = unseal(&key("node-a", 1), bytes);
            let is_refused = matches!(
                refused,
                Err(TokenRefusal::Forged | TokenRefusal::Malformed | TokenRefusal::Elsewhere { .. })
            );
            prop_assert!(is_refused);
        }

        #[test]
        fn any_bytes_are_refused_and_none_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), cut: prop::sample::Index) {
            let key = key("node-a", 1);
            prop_assert!(unseal(&key, bytes.clone()).is_err());
            let whole = token();
            prop_assert!(unseal(&key, whole[..cut.index(whole.len())].to_vec()).is_err());
            let longer = [whole, bytes].concat();
            let is_longer = longer.len() != token().len();
            prop_assert_eq!(unseal(&key, longer).is_err(), is_longer);
        }
    }
}
