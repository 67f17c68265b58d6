//! Fuzzes memory tokens, made from valid ones.

use bursar_ledger::units::AllocationId;
use bursar_protocol::messages::token::{Generations, GpuToken};
use bursar_retained::tokens::seal::NodeKey;

use crate::mutate::edits;

/// Only tokens that the node sealed are unsealed, and each to the content that was sealed.
#[test]
fn changed_token_is_never_unsealed() {
    let key = |secret| NodeKey::new("node-a".to_owned(), [secret; 32]).unwrap();
    let seal = |key: &NodeKey, block| {
        let generations = Generations {
            gpu: 3,
            process: 14,
            lease: 2,
        };
        let gpu = "GPU-00000000-0000-0000-0000-000000000001".parse().unwrap();
        let token = key.seal(&gpu, AllocationId::from_bits(5), generations, block);
        token.as_bytes().to_vec()
    };
    let (own, foreign) = (key(1), key(2));
    let samples = [seal(&own, 1), seal(&own, u64::MAX), seal(&foreign, 1)];
    let valid = &samples[..2];
    bolero::check!().with_generator(edits()).for_each(|edits| {
        let bytes = edits.apply(&samples);
        let is_valid = valid.contains(&bytes);
        let token = GpuToken::try_from(bytes);
        let unsealed = token.ok().and_then(|token| own.unseal(&token).ok());
        assert_eq!(unsealed.is_some(), is_valid);
        if let Some(id) = unsealed {
            assert_eq!((id.node.as_str(), id.container), ("node-a", 5));
        }
    });
}
