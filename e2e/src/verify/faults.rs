//! Names the checks of the area `faults/`, each with the tests that show it.

use super::named::NamedCheck;

/// Every check of the area that runs without a cluster.
pub(super) const CHECKS: &[NamedCheck] = &[];
