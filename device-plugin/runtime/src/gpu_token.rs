//! The identity of memory as it is told to others, sealed so that nobody can make one up.
//!
//! `{node, GPU UUID, G, P, L, block}` (design section 8) says which bytes are meant, and of which life of the GPU, the
//! process image and the lease. The node's key seals it: a [`GpuToken`] is redeemed by who has that key, and
//! only while nothing that it names has ended.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | the format, 1 |
//! | 1 + n | the node's name, with its length |
//! | 16 | the GPU's UUID |
//! | 4 x 8 | G, P, L and block, little endian |
//! | 32 | HMAC-SHA-256 of a label and all before |
#![forbid(unsafe_code)]

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::driver::GpuUuid;

/// The longest name of a node: what Kubernetes allows (RFC 1123 subdomain).
pub const MAX_NODE: usize = 253;

const FORMAT: u8 = 1;
const MAC: usize = 32;
/// Nothing else that the key may ever seal starts with this.
const LABEL: &[u8] = b"bursar.dev/gpu-token\0";

/// Which life of what memory is in (design section 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generations {
    /// G, of the GPU.
    pub gpu: u64,
    /// P, of the process image that has the memory.
    pub process: u64,
    /// L, of the kept lease; zero for memory that is none.
    pub lease: u64,
}

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    /// The node's name in the cluster, at most [`MAX_NODE`] bytes.
    pub node: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The lives that it belongs to.
    pub generations: Generations,
    /// The block, as who has it numbers them.
    pub block: u64,
}

/// Which generation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// G: the GPU lost its memory.
    Gpu,
    /// P: the process image has ended, or is poisoned.
    Process,
    /// L: the lease's memory was lost, or given up.
    Lease,
}

/// Why a token is worth nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefused {
    /// It is none, or of a format that this build does not know.
    #[error("not a memory token, or one of another version")]
    Malformed,
    /// It was not sealed with this node's key, or was changed.
    #[error("the memory token's seal is wrong: it was not issued by this node")]
    Forged,
    /// It names another node.
    #[error("the memory is on node {0}")]
    Elsewhere(String),
    /// There is no such memory.
    #[error("block {block} of {gpu} is not known any more; ask for a new token")]
    Unknown {
        /// The GPU.
        gpu: GpuUuid,
        /// The block.
        block: u64,
    },
    /// What it names has ended.
    #[error(
        "the memory token is fenced: {which:?} generation {token}, now {now}; ask for a new token"
    )]
    Fenced {
        /// The first generation that differs.
        which: Generation,
        /// The token's.
        token: u64,
        /// What it is now.
        now: u64,
    },
}

/// A node's name that is too long for a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node's name has {0} bytes, a token holds {MAX_NODE}")]
pub struct NameTooLong(usize);

/// Seals and redeems the tokens of one node. Whoever has the key can make tokens: it stays with the node's agent.
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

/// A sealed identity of memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuToken(Vec<u8>);

impl GpuToken {
    /// The bytes, for a wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl NodeKey {
    /// The key of a node: 32 random bytes that nobody else has.
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

    /// Seals what identifies memory of this node.
    pub fn seal(&self, gpu: GpuUuid, generations: Generations, block: u64) -> GpuToken {
        let mut bytes = vec![FORMAT];
        bytes.push(u8::try_from(self.node.len()).expect("`new` measured it"));
        bytes.extend(self.node.as_bytes());
        bytes.extend(gpu.bytes());
        let Generations {
            gpu,
            process,
            lease,
        } = generations;
        bytes.extend(
            [gpu, process, lease, block]
                .iter()
                .flat_map(|number| number.to_le_bytes()),
        );
        let seal = self.mac_of(&bytes).finalize().into_bytes();
        bytes.extend(seal);
        GpuToken(bytes)
    }

    /// What a token says, where it is this node's and what it names is still there. `now` is asked for the present
    /// generations of memory that the seal vouches for; none where there is no such memory.
    ///
    /// # Errors
    /// Why it is worth nothing.
    pub fn redeem(
        &self,
        token: &[u8],
        now: impl FnOnce(&MemoryId) -> Option<Generations>,
    ) -> Result<MemoryId, TokenRefused> {
        let (said, seal) = token
            .split_last_chunk::<MAC>()
            .ok_or(TokenRefused::Malformed)?;
        let id = parse(said).ok_or(TokenRefused::Malformed)?;
        // The name is not secret, and a token of another node's key cannot be verified here.
        if id.node != self.node {
            return Err(TokenRefused::Elsewhere(id.node));
        }
        // In constant time.
        let sealed = self.mac_of(said).verify_slice(seal);
        sealed.map_err(|_| TokenRefused::Forged)?;
        let MemoryId { gpu, block, .. } = id;
        let now = now(&id).ok_or(TokenRefused::Unknown { gpu, block })?;
        same(id.generations, now)?;
        Ok(id)
    }

    fn mac_of(&self, said: &[u8]) -> Hmac<Sha256> {
        self.mac.clone().chain_update(LABEL).chain_update(said)
    }
}

fn parse(bytes: &[u8]) -> Option<MemoryId> {
    let (&[FORMAT, length], rest) = bytes.split_first_chunk()? else {
        return None;
    };
    let (node, rest) = rest.split_at_checked(usize::from(length))?;
    let (gpu, rest) = rest.split_first_chunk()?;
    let (numbers, []) = rest.as_chunks() else {
        return None;
    };
    let [gpu_generation, process, lease, block] = <[[u8; 8]; 4]>::try_from(numbers)
        .ok()?
        .map(u64::from_le_bytes);
    Some(MemoryId {
        node: std::str::from_utf8(node).ok()?.to_owned(),
        gpu: GpuUuid::from_bytes(*gpu),
        generations: Generations {
            gpu: gpu_generation,
            process,
            lease,
        },
        block,
    })
}

/// Fails with the first generation that differs: an older one has ended, a newer one was never there.
fn same(token: Generations, now: Generations) -> Result<(), TokenRefused> {
    let pairs = [
        (Generation::Gpu, token.gpu, now.gpu),
        (Generation::Process, token.process, now.process),
        (Generation::Lease, token.lease, now.lease),
    ];
    match pairs.into_iter().find(|(_, token, now)| token != now) {
        None => Ok(()),
        Some((which, token, now)) => Err(TokenRefused::Fenced { which, token, now }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU: GpuUuid = GpuUuid::from_bytes([7; 16]);
    const NOW: Generations = Generations {
        gpu: 3,
        process: 14,
        lease: 2,
    };

    fn key(node: &str, secret: u8) -> NodeKey {
        NodeKey::new(node.to_owned(), [secret; 32]).expect("a short name")
    }

    fn token() -> Vec<u8> {
        key("node-a", 1).seal(GPU, NOW, 99).as_bytes().to_vec()
    }

    fn redeem(token: &[u8], now: Option<Generations>) -> Result<MemoryId, TokenRefused> {
        key("node-a", 1).redeem(token, |_| now)
    }

    #[test]
    fn what_was_sealed_is_redeemed_while_nothing_has_ended() {
        let id = redeem(&token(), Some(NOW)).expect("it is good");
        assert_eq!(
            (id.node.as_str(), id.gpu, id.generations, id.block),
            ("node-a", GPU, NOW, 99)
        );
    }

    #[test]
    fn each_generation_fences_by_itself_whichever_way_it_differs() {
        for step in [-1i64, 1] {
            let moved = |number: u64| number.wrapping_add_signed(step);
            let lives = [
                (
                    Generation::Gpu,
                    Generations {
                        gpu: moved(3),
                        ..NOW
                    },
                ),
                (
                    Generation::Process,
                    Generations {
                        process: moved(14),
                        ..NOW
                    },
                ),
                (
                    Generation::Lease,
                    Generations {
                        lease: moved(2),
                        ..NOW
                    },
                ),
            ];
            for (expected, now) in lives {
                let refused = redeem(&token(), Some(now));
                assert!(
                    matches!(refused, Err(TokenRefused::Fenced { which, .. }) if which == expected)
                );
            }
        }
    }

    #[test]
    fn another_key_another_node_and_memory_that_is_gone_are_told_apart() {
        let forged = key("node-a", 2).redeem(&token(), |_| Some(NOW));
        assert_eq!(forged, Err(TokenRefused::Forged));
        let elsewhere = key("node-b", 1).redeem(&token(), |_| Some(NOW));
        assert_eq!(elsewhere, Err(TokenRefused::Elsewhere("node-a".to_owned())));
        assert_eq!(
            redeem(&token(), None),
            Err(TokenRefused::Unknown {
                gpu: GPU,
                block: 99
            })
        );
    }

    #[test]
    fn nobody_is_asked_about_memory_that_the_seal_does_not_vouch_for() {
        let mut forged = token();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        let answer = key("node-a", 1).redeem(&forged, |_| unreachable!("it is forged"));
        assert_eq!(answer, Err(TokenRefused::Forged));
    }

    #[test]
    fn the_seal_is_hmac_sha_256_as_others_compute_it() {
        // python3: hmac.new(bytes([1])*32, b"bursar.dev/gpu-token\0" + token[:-32], "sha256")
        let expected = [
            0xa3, 0xe1, 0xfe, 0xf1, 0xe8, 0x82, 0x1a, 0x8c, 0x2c, 0xeb, 0x5f, 0x8c, 0x04, 0xa5,
            0xdc, 0xc7, 0x83, 0x5b, 0x98, 0xb3, 0x37, 0x59, 0x59, 0x71, 0xaa, 0xcb, 0xc9, 0x4d,
            0xef, 0x50, 0xd2, 0x4f,
        ];
        assert_eq!(token().last_chunk(), Some(&expected));
    }

    #[test]
    fn a_name_that_no_node_can_have_has_no_key() {
        assert!(NodeKey::new("n".repeat(MAX_NODE), [0; 32]).is_ok());
        assert!(NodeKey::new("n".repeat(MAX_NODE + 1), [0; 32]).is_err());
    }

    #[test]
    fn a_key_shows_no_secret() {
        assert_eq!(
            format!("{:?}", key("node-a", 1)),
            "NodeKey { node: \"node-a\", .. }"
        );
    }

    proptest! {
        #[test]
        fn no_changed_bit_is_redeemed(place: prop::sample::Index, bit in 0..8u8) {
            let mut bytes = token();
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
            let refused = redeem(&bytes, Some(NOW));
            prop_assert!(matches!(
                refused,
                Err(TokenRefused::Forged | TokenRefused::Malformed | TokenRefused::Elsewhere(_))
            ));
        }

        #[test]
        fn any_bytes_are_refused_and_none_panics(bytes in prop::collection::vec(any::<u8>(), 0..400), cut: prop::sample::Index) {
            prop_assert!(redeem(&bytes, Some(NOW)).is_err());
            let whole = token();
            prop_assert!(redeem(&whole[..cut.index(whole.len())], Some(NOW)).is_err());
            let longer = [whole, bytes].concat();
            prop_assert_eq!(redeem(&longer, Some(NOW)).is_ok(), longer.len() == token().len());
        }
    }
}
