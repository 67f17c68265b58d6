//! Signs memory ids with the node's key: only its agent can make a token, and any program with the
//! public half can verify it.
//!
//! [`signed_token`](bursar_protocol::messages::signed_token) defines the layout.

use std::fmt;

use bursar_ledger::units::{AllocationId, GpuUuid};
use bursar_protocol::messages::signed_token::{NodePublicKey, SignedToken, UnsignedToken};
use bursar_protocol::messages::token::{Generations, GpuToken, MAX_NODE, MemoryId, TokenRefusal};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

/// The node's name is too long for a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node's name has {0} bytes; a token has room for {MAX_NODE}")]
pub struct NameTooLong(usize);

/// Seals and unseals the tokens of one node. The key can make any token, so it stays within the
/// agent.
pub struct NodeKey {
    node: String,
    pair: Ed25519KeyPair,
    public: NodePublicKey,
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
        let pair = Ed25519KeyPair::from_seed_unchecked(&secret).expect("any 32 bytes are a seed");
        let public: [u8; 32] = pair
            .public_key()
            .as_ref()
            .try_into()
            .expect("a public key has 32 bytes");
        Ok(NodeKey {
            node,
            pair,
            public: NodePublicKey(public),
        })
    }

    /// The public half.
    pub fn public(&self) -> NodePublicKey {
        self.public
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
        let unsigned = UnsignedToken::new(&self.public, &id);
        let signature = self.pair.sign(&unsigned.signed_bytes());
        let token = unsigned.with_signature(signature.as_ref());
        token.expect("both names are bounded")
    }

    /// Returns what a token of this node names.
    ///
    /// # Errors
    /// The token is malformed, another node's, or sealed with another key.
    pub fn unseal(&self, token: &GpuToken) -> Result<MemoryId, TokenRefusal> {
        let token = SignedToken::parse(token).map_err(|_| TokenRefusal::Malformed)?;
        if token.id.node != self.node {
            return Err(TokenRefusal::Elsewhere {
                node: token.id.node,
            });
        }
        let key = UnparsedPublicKey::new(&ED25519, self.public.0);
        let is_signed = key.verify(&token.signed_bytes(), token.signature()).is_ok();
        match is_signed && token.names_key(&self.public) {
            true => Ok(token.id),
            false => Err(TokenRefusal::Forged),
        }
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

    const PUBLIC: &str = "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c";
    const SIGNATURE: &str = "db17f4c94f73ca32563fd859cd128119d135d4e91ad1423e3ba917e07b2459cc\
        e2008267198546a4a0458e1fc119e6d5c0917d651a6ef7c4a6c32d110e952e0e";

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
        let on_other_node = unseal(&key("node-b", 1), token());
        assert_eq!(on_other_node, Err(TokenRefusal::Elsewhere { node }));
    }

    #[test]
    fn seal_is_an_ed25519_signature() {
        // Of RFC 8032's Python code, over the label and the token without its signature.
        let key = key("node-a", 1);
        assert_eq!(key.public().to_string(), PUBLIC);
        let token = token();
        let signature = &token[token.len() - 64..];
        let text: String = signature.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, SIGNATURE);
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
