//! Keeps the reservations that are still of use, and writes those that differ.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::{Planner, Reserved, Unseen, reservation};
use crate::nodes::ssa_diff::has_to_be_written;
use crate::placement::plan::{Step, gpu_node};
use crate::placement::pod::Place;

impl<'a> Planner<'a> {
    /// The reservations that there are, without those that came to their end: one for each waiter, for nobody goes
    /// from two nodes for the same one.
    pub(super) fn still_reserved(&mut self) -> Reserved {
        let mut held = Vec::new();
        for (node, gpus) in &self.scene.gpu_nodes {
            // What was written last a watch may tell late.
            let written = self.memory.reservations.get(*node).into_iter().flatten();
            let late = written.filter(|held| !gpus.reservations.contains(held));
            let told = gpus.reservations.iter().map(|held| (false, held));
            for (late, one) in told.chain(late.map(|held| (true, held))) {
                if self.is_of_use(node, one) {
                    held.push((late, *node, one));
                }
            }
        }
        let scene = self.scene;
        let is_nominated = |waiter: &str, node: &str| match scene.pod(waiter).map(|pod| &pod.place)
        {
            Some(Place::Nowhere { nominated, .. }) => nominated.as_deref() == Some(node),
            Some(Place::On(_)) | None => false,
        };
        held.sort_by_key(|(late, node, held)| {
            let gpu = scene.gpu(node, &held.gpu);
            let answered = gpu.is_some_and(|gpu| gpu.held_for.as_ref() == Some(&held.waiter));
            (!is_nominated(&held.waiter, node), !answered, *late)
        });
        let (mut waiters, mut gpus) = (BTreeSet::new(), BTreeSet::new());
        let mut kept = Reserved::new();
        for (_, node, held) in held {
            let taken = kept.entry(node.to_owned()).or_default();
            if !gpus.contains(&(node, &held.gpu))
                && !waiters.contains(&held.waiter)
                && self.tokens_suffice(node, held, taken)
                // Seen to before it was nominated: others that come by now make room for themselves.
                && (is_nominated(&held.waiter, node)
                    || self.rest_suffices(node, &held.waiter, taken))
            {
                gpus.insert((node, &held.gpu));
                waiters.insert(&held.waiter);
                // Another container of the waiter may have got memory there since.
                let again = self
                    .wants
                    .get(held.waiter.as_str())
                    .zip(self.scene.gpu(node, &held.gpu));
                let again = again.and_then(|(want, gpu)| reservation(want, gpu));
                taken.push(again.unwrap_or_else(|| held.clone()));
            }
        }
        kept
    }

    /// Its waiter is still to be bound, and would be if those went who may.
    pub(super) fn is_of_use(&mut self, node: &str, held: &Reservation) -> bool {
        let (Some(pod), Some(gpu)) = (
            self.scene.pod(&held.waiter),
            self.scene.gpu(node, &held.gpu),
        ) else {
            return false;
        };
        let elsewhere = match &pod.place {
            Place::On(at) => at != node,
            // Another operator, or the scheduler itself, has room made there.
            Place::Nowhere { nominated, .. } => nominated.as_ref().is_some_and(|at| at != node),
        };
        let given_up = self.memory.is_left_alone(&held.waiter, self.now);
        if pod.ending || !pod.pending || elsewhere || given_up {
            return false;
        }
        match self.wants.get(held.waiter.as_str()).copied() {
            Some(want) => self.room_on(node, gpu, &want, Unseen::LetsGo).is_some(),
            // Bound; or scheduled and not started, or between two looks of the scheduler.
            None => !gpu.pods.contains_key(&held.waiter),
        }
    }

    /// The writes of reservations that differ.
    pub(super) fn writes(&self, reserved: &Reserved) -> Vec<Step> {
        let mut steps = Vec::new();
        for (node, gpus) in &self.scene.gpu_nodes {
            let wanted = reserved.get(*node).map(Vec::as_slice).unwrap_or_default();
            let written = self.memory.reservations.get(*node);
            if has_to_be_written(&gpus.reservations, wanted, written) {
                steps.push(Step::Reserve {
                    node: gpu_node(self.scene, node),
                    over: gpus.reservations.clone(),
                    reservations: wanted.to_vec(),
                });
            }
        }
        steps
    }
}
