//! Finds another node for a pod that waits on its node.

use std::time::Duration;

use super::{Planner, Unseen, Want};
use crate::placement::filters::may_be_on;

/// How long before the waiter itself is moved.
const MOVE_PATIENCE: Duration = Duration::from_secs(8);

impl<'a> Planner<'a> {
    /// Whether a waiter that is to be moved goes now, and not later.
    pub(super) fn may_go_now(&self, want: &Want<'_>, owner: &str) -> bool {
        let next = self.memory.next_move(owner);
        let another = self.moves.iter().any(|(other, ..)| *other == owner);
        self.waited(want) >= MOVE_PATIENCE
            && self.memory.may_ask(&want.pod.uid, self.now)
            && next.is_some_and(|next| next <= self.now)
            && !another
    }

    /// Another node for the waiter, where it may go there by the rules, now or soon, and there is room now: its owner, the
    /// node that it is on, and the other one.
    pub(super) fn elsewhere(&mut self, want: &Want<'a>) -> Option<(&'a str, &'a str, &'a str)> {
        let (at, uid) = (want.node?, &want.pod.uid);
        let owner = want.pod.owner.uid()?;
        let kept = self.memory.was_refused(uid);
        let too_often = self.memory.next_move(owner).is_none();
        let begun = self.scene.gpu_nodes.get(at)?.may_have_begun(want.pod);
        if !self.rules.move_waiters || kept || too_often || begun {
            return None;
        }
        let (to, _) = self.scene.nodes.iter().find(|(name, node)| {
            **name != at
                && may_be_on(&want.pod.wants, name, node)
                && !self.memory.moved_in_vain(owner, name)
                && self.has_room(name, want)
        })?;
        let unseen = match self.waited(want) >= MOVE_PATIENCE {
            true => Unseen::Keeps,
            false => Unseen::LetsGo,
        };
        let lets_go = self.lets_go(want.key, want.pod, unseen);
        lets_go.then_some((owner, at, to))
    }
}
