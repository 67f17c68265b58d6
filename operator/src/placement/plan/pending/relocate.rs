//! Finds another node for a pod that waits on its node.

use std::time::Duration;

use super::{JobAssumption, PendingPod, Planner};
use crate::placement::filters::passes_filters;

/// How long a pod waits before its relocation.
const RELOCATION_DELAY: Duration = Duration::from_secs(8);

impl<'a> Planner<'a> {
    /// Whether a relocatable pod is due for its relocation.
    pub(super) fn may_relocate_now(&self, pending: &PendingPod<'_>, owner: &str) -> bool {
        let next = self.history.next_relocation(owner);
        let another = self.relocations.iter().any(|(other, ..)| *other == owner);
        self.waited(pending) >= RELOCATION_DELAY
            && self.history.may_evict(&pending.pod.uid, self.now)
            && next.is_some_and(|next| next <= self.now)
            && !another
    }

    /// Another node with room for a relocatable pod, now or soon: the owner, the pod's node and the
    /// other node.
    pub(super) fn find_relocation(
        &mut self,
        pending: &PendingPod<'a>,
    ) -> Option<(&'a str, &'a str, &'a str)> {
        let (at, uid) = (pending.node?, &pending.pod.uid);
        let owner = pending.pod.owner.relocatable_uid()?;
        let refused = self.history.was_blocked(uid);
        let too_often = self.history.next_relocation(owner).is_none();
        let started = self
            .snapshot
            .gpu_nodes
            .get(at)?
            .has_possibly_started(pending.pod);
        if !self.options.relocate_pending_pods || refused || too_often || started {
            return None;
        }
        let (to, _) = self.snapshot.nodes.iter().find(|(name, node)| {
            **name != at
                && passes_filters(&pending.pod.constraints, name, node)
                && !self.history.relocation_failed(owner, name)
                && self.has_room(name, pending)
        })?;
        let assumption = match self.waited(pending) >= RELOCATION_DELAY {
            true => JobAssumption::FailsOnDisruption,
            false => JobAssumption::IgnoresDisruption,
        };
        let ignores_disruption = self.ignores_disruption(pending.key, pending.pod, assumption);
        ignores_disruption.then_some((owner, at, to))
    }
}
