//! Fixes the seeds of random tests by the tree, so that a check passes or fails by what a commit
//! changed. The long tier draws new seeds, and a failure prints its seed in either.

use super::tree;
use crate::cargo;

/// The variables from which the random tests take their seeds: fuzz targets, the adversaries, the
/// soak and the properties.
const VARIABLES: [&str; 4] = [
    "BOLERO_RANDOM_SEED",
    "BURSAR_ADVERSARY_SEED",
    "BURSAR_SOAK_SEED",
    "PROPTEST_RNG_SEED",
];

/// Sets the variables for all commands of cargo, except those that the user has set. Returns the
/// seed; `None` outside of a git repository, where the tests draw seeds.
pub(super) fn fix() -> Option<u64> {
    let seed = of_tree(&tree::hash()?)?;
    let open = VARIABLES.into_iter();
    let open = open.filter(|variable| std::env::var_os(variable).is_none());
    cargo::set_variables(open.map(|variable| (variable, seed.to_string())).collect());
    Some(seed)
}

/// Returns the seed of a tree: the first digits of its hash.
fn of_tree(hash: &str) -> Option<u64> {
    u64::from_str_radix(hash.get(..8)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_follows_from_the_tree() {
        assert_eq!(
            of_tree("00c0ffee4b825dc642cb6eb9a060e54bf8d69288"),
            Some(0x00c0_ffee)
        );
        assert_eq!(of_tree("fatal: not a git repository"), None);
        assert_eq!(of_tree(""), None);
    }
}
