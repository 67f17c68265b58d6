//! Finds a GPU to reserve for a pod, and the pods of lower priority that make room there.

use super::{AT_ONCE, Planner, Reserved, Unseen, Want, pod, reservation};
use crate::cluster::pod_request::Class;
use crate::placement::filters::may_be_on;
use crate::placement::history::RESERVED_AT_MOST;
use crate::placement::node::Gpu;
use crate::placement::plan::victims::{Candidate, fewest};
use crate::placement::plan::{Step, Victim};
use crate::placement::pod::{Owner, Place};
use crate::quanta::Quanta;
use bursar_crds::gpu_node::Reservation;

impl<'a> Planner<'a> {
    /// A GPU to reserve for the waiter: where that has not come to nothing, or most seldom, and then where the fewest go.
    pub(super) fn here(
        &mut self,
        want: &Want<'a>,
        reserved: &Reserved,
    ) -> Option<(String, Reservation)> {
        if !want.pod.preempts || self.memory.is_left_alone(&want.pod.uid, self.now) {
            return None;
        }
        let nodes: Vec<&str> = match want.node {
            Some(node) => vec![node],
            None => self.nodes_for(want)?,
        };
        let kind = |want: &Want<'a>| {
            let Want { key, pod, .. } = *want;
            let rest = self.scene.load(key).map(|load| &load.asks);
            (pod.priority, pod.asks, &pod.wants, rest)
        };
        let mut hopeless = self.hopeless.iter();
        if want.node.is_none() && hopeless.any(|other| kind(other) == kind(want)) {
            return None;
        }
        let mut choices = Vec::new();
        for node in nodes {
            let Some(gpus) = self.scene.gpu_nodes.get(node) else {
                continue;
            };
            let taken = reserved.get(node).map(Vec::as_slice).unwrap_or_default();
            if !self.rest_suffices(node, &want.pod.uid, taken) {
                continue;
            }
            for gpu in &gpus.gpus {
                if gpu.held_for.is_some() || taken.iter().any(|held| held.gpu == gpu.uuid) {
                    continue;
                }
                let Some(room) = self.room_on(node, gpu, want, Unseen::Keeps) else {
                    continue;
                };
                if room.is_empty() && want.node.is_some() {
                    // Who is leaving anyway will do.
                    return None;
                }
                let reservation = reservation(want, gpu)?;
                if !self.tokens_suffice(node, &reservation, taken) {
                    continue;
                }
                let highest = room.iter().map(|one| one.priority).max();
                let freed: Quanta = room.iter().map(|one| one.quanta).sum();
                let in_vain = self.memory.in_vain(&want.pod.uid, &gpu.uuid);
                let rank = (in_vain, room.len(), highest, freed, node, gpu.uuid.as_str());
                choices.push((rank, reservation));
            }
        }
        if want.node.is_none() && choices.is_empty() {
            self.hopeless.push(*want);
        }
        let best = choices.into_iter().min_by_key(|(rank, _)| *rank);
        best.map(|((.., node, _), reservation)| (node.to_owned(), reservation))
    }

    /// The nodes that a pod without one may be on; none where it is for the scheduler to do: it keeps room for the
    /// pod, or some node has room.
    pub(super) fn nodes_for(&self, want: &Want<'a>) -> Option<Vec<&'a str>> {
        let Place::Nowhere {
            nominated: None, ..
        } = want.pod.place
        else {
            return None;
        };
        let may = self.scene.nodes.iter();
        let may = may.filter(|(name, node)| may_be_on(&want.pod.wants, name, node));
        let may: Vec<&'a str> = may.map(|(name, _)| *name).collect();
        let some = may.iter().any(|name| self.has_room(name, want));
        (!some).then_some(may)
    }

    /// Who has to go from a GPU for the waiter, besides those who leave soon; none where that would not help.
    pub(super) fn room_on(
        &mut self,
        node: &str,
        gpu: &Gpu,
        want: &Want<'a>,
        unseen: Unseen,
    ) -> Option<Vec<Candidate<'a>>> {
        if gpu.capacity < want.quanta {
            return None;
        }
        let (mut coming, mut candidates) = (self.memory.settling(node, gpu), Vec::new());
        for (uid, quanta) in &gpu.pods {
            // Who has ended is there until the agent sees that.
            let there = self.scene.pods.get_key_value(uid.as_str());
            let lives = there.filter(|(uid, (_, pod))| !self.is_ending(uid, pod));
            let Some((uid, (key, pod))) = lives else {
                if !self.memory.overstays(uid, self.now) {
                    coming = coming.plus(*quanta);
                }
                continue;
            };
            if pod.priority < want.pod.priority
                && want.pod.preempts
                && pod.owner != Owner::Node
                && (pod.class == Class::Borrowed || self.lets_go(key, pod, unseen))
            {
                candidates.push(Candidate {
                    uid,
                    priority: pod.priority,
                    quanta: *quanta,
                });
            }
        }
        fewest(&candidates, want.quanta.minus(gpu.free).minus(coming))
    }

    /// Who goes from a GPU that the agent holds.
    pub(super) fn make_room(&mut self, node: &str, held: &Reservation) -> Option<Step> {
        let want = *self.wants.get(held.waiter.as_str())?;
        let gpu = self.scene.gpu(node, &held.gpu)?;
        if gpu.held_for.as_ref() != Some(&held.waiter) {
            return None;
        }
        let nominate = match &want.pod.place {
            Place::Nowhere { nominated, .. } => nominated.as_deref() != Some(node),
            Place::On(_) => false,
        };
        let room = self.room_on(node, gpu, &want, Unseen::Keeps)?;
        let victims: Vec<Victim> = room
            .iter()
            .filter(|one| self.memory.may_ask(one.uid, self.now))
            .filter_map(|one| self.victim(one))
            .take(AT_ONCE)
            .collect();
        (nominate || !victims.is_empty()).then(|| Step::MakeRoom {
            waiter: pod(want.key, want.pod),
            node: node.to_owned(),
            gpu: held.gpu.clone(),
            nominate,
            victims,
        })
    }

    pub(super) fn victim(&self, one: &Candidate<'_>) -> Option<Victim> {
        let (key, facts) = self.scene.pods.get(one.uid)?;
        let refused = self.memory.refused_for(one.uid, self.now);
        // The reservation must live to see the end of it.
        let grace = self.rules.disruption_grace.min(RESERVED_AT_MOST / 2);
        // A Job takes a pod that was deleted, and not evicted, for a failed one whatever its policy
        // says. A borrower has agreed to that by its class.
        let stays = matches!(facts.owner, Owner::Job(_)) && facts.class == Class::Guaranteed;
        Some(Victim {
            pod: pod(key, facts),
            overdue: !stays && refused.is_some_and(|refused| refused >= grace),
        })
    }
}
