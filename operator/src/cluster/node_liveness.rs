//! Decides which nodes have been down for so long that their memory does not count. Pure.
//!
//! ```text
//!   alive --not Ready, or no agent--> suspected --DEAD_AFTER by the monotonic clock--> dead
//!     ^                                   |                                             |
//!     +-----------------------------------+------------- alive again -------------------+
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Key;

/// How long a node may be down before it counts as dead. An upgrade of the agent takes less, so
/// that it changes no budget's `Covered` condition.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(60);

/// The nodes with GPUs that are down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeLiveness {
    /// Nodes that may recover, each with the first clock reading after they went down.
    suspected: BTreeMap<Key, Option<Instant>>,
    dead: BTreeSet<Key>,
}

impl NodeLiveness {
    /// Records whether a node is alive now.
    pub(super) fn observe(&mut self, node: &Key, is_alive: bool) {
        if is_alive {
            self.suspected.remove(node);
            self.dead.remove(node);
        } else if !self.dead.contains(node) {
            self.suspected.entry(node.clone()).or_default();
        }
    }

    /// Advances the clock. Returns the nodes that have just become dead.
    pub(super) fn advance_clock(&mut self, now: Instant) -> Vec<Key> {
        let mut newly_dead = Vec::new();
        self.suspected.retain(|node, since| {
            let since = *since.get_or_insert(now);
            let is_within_grace = now.saturating_duration_since(since) < DEAD_AFTER;
            if !is_within_grace {
                newly_dead.push(node.clone());
            }
            is_within_grace
        });
        self.dead.extend(newly_dead.iter().cloned());
        newly_dead
    }

    /// Whether any node awaits its deadline.
    pub(super) fn has_deadlines(&self) -> bool {
        !self.suspected.is_empty()
    }

    /// The nodes that count as dead.
    pub(super) fn dead(&self) -> impl Iterator<Item = &Key> {
        self.dead.iter()
    }

    pub(super) fn is_dead(&self, node: &Key) -> bool {
        self.dead.contains(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_dead_after_its_grace_and_alive_at_once() {
        let (mut liveness, start) = (NodeLiveness::default(), Instant::now());
        let node = Key::cluster_scoped("n");
        let at = |seconds| start + Duration::from_secs(seconds);
        liveness.observe(&node, false);
        assert!(liveness.has_deadlines());
        for second in [100, 130, 159] {
            assert!(liveness.advance_clock(at(second)).is_empty(), "{second}");
            liveness.observe(&node, false);
        }
        assert_eq!(liveness.advance_clock(at(160)), std::slice::from_ref(&node));
        assert!(liveness.is_dead(&node) && !liveness.has_deadlines());
        liveness.observe(&node, false);
        assert_eq!(liveness.advance_clock(at(900)), [], "once");
        liveness.observe(&node, true);
        assert_eq!(liveness, NodeLiveness::default());
    }

    #[test]
    fn node_that_recovers_in_time_is_never_dead() {
        let (mut liveness, start) = (NodeLiveness::default(), Instant::now());
        let node = Key::cluster_scoped("n");
        for second in (0..600).step_by(50) {
            liveness.observe(&node, false);
            let now = start + Duration::from_secs(second);
            assert!(liveness.advance_clock(now).is_empty());
            let now = now + Duration::from_secs(40);
            assert!(liveness.advance_clock(now).is_empty());
            liveness.observe(&node, true);
        }
    }
}
