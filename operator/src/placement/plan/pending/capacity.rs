//! Checks whether a node has what a pod asks for.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::{Planner, Unseen, Want};
use crate::cluster::Key;
use crate::placement::plan::victims::Candidate;
use crate::placement::pod::PodFacts;
use crate::quanta::Quanta;

impl<'a> Planner<'a> {
    /// The node has the pod's memory free, on one GPU and among its tokens, and all else that it asks for.
    pub(super) fn has_room(&self, node: &str, want: &Want<'_>) -> bool {
        let pod = want.pod;
        let planned = self.moves.iter().filter(|(_, to, _)| *to == node);
        let planned: Quanta = planned.map(|(.., room)| *room).sum();
        let promised = self.memory.promised(node).plus(planned);
        let gpus = self.scene.gpu_nodes.get(node);
        let largest = gpus.and_then(|gpus| gpus.gpus.iter().map(|gpu| gpu.largest_free).max());
        largest.unwrap_or_default().minus(promised) >= pod.asks
            && self.scene.unasked(node).minus(promised) >= pod.asks
            && self.scene.takes(node, want.key, &[])
    }

    /// The scheduler could put the waiter on the node if those went who go for it, beside those that are `taken` care
    /// of there and those that it keeps room for: pods that are nominated to the same node keep each other off.
    pub(super) fn tokens_suffice(
        &mut self,
        node: &str,
        held: &Reservation,
        taken: &[Reservation],
    ) -> bool {
        let waiter = self.scene.pod(&held.waiter);
        let Some(waiter) = waiter.filter(|pod| pod.node().is_none()) else {
            return true;
        };
        // Who goes from several GPUs makes room in the node's quanta once.
        let mut counted = BTreeSet::new();
        let mut theirs = Quanta::ZERO;
        for held in taken {
            theirs = theirs.plus(self.needs(node, held, &mut counted));
        }
        let needs = self.needs(node, held, &mut counted);
        if needs == Quanta::ZERO {
            return true;
        }
        let is_ours = |uid: &String| taken.iter().chain([held]).any(|held| held.waiter == *uid);
        let nominated = self.nominated.get(node).into_iter().flatten();
        let others = nominated.filter(|pod| pod.priority >= waiter.priority && !is_ours(&pod.uid));
        let others: Vec<&PodFacts> = others.copied().collect();
        let gpus = self.scene.gpu_nodes.get(node);
        let written = gpus.map(|gpus| gpus.reservations.as_slice());
        let written = written.unwrap_or_default();
        for pod in others {
            theirs = theirs.plus(match written.iter().find(|held| held.waiter == pod.uid) {
                // Somebody goes here for this one too, and its turn comes later.
                Some(later) => self.needs(node, later, &mut counted),
                None => pod.asks,
            });
        }
        let coming = self.going.get(node).copied().unwrap_or_default();
        self.scene.unasked(node).plus(coming) >= needs.plus(theirs)
    }

    /// The same of all else that the waiter asks for, without anybody gone: where others would have to go for that, the
    /// scheduler asks them itself.
    pub(super) fn rest_suffices(&self, node: &str, waiter: &str, taken: &[Reservation]) -> bool {
        let Some((key, waiter)) = self.scene.pods.get(waiter) else {
            return false;
        };
        if waiter.node().is_some() {
            return true;
        }
        let nominated = self.nominated.get(node).into_iter().flatten();
        let nominated = nominated.filter(|pod| pod.priority >= waiter.priority);
        let others = nominated.map(|pod| pod.uid.as_str());
        let others = others.chain(taken.iter().map(|held| held.waiter.as_str()));
        // Who is both counts once.
        let others: BTreeSet<&str> = others.filter(|uid| *uid != waiter.uid).collect();
        let others = others.iter().filter_map(|uid| self.scene.pods.get(uid));
        let others = others.filter(|(_, pod)| pod.node().is_none());
        let others: Vec<&Key> = others.map(|(key, _)| *key).collect();
        self.scene.takes(node, key, &others)
    }

    /// What a waiter takes of what nobody on the node asks for, beside what those ask for who go for it and were not
    /// `counted` before. Who is on the node has its share.
    pub(super) fn needs(
        &mut self,
        node: &str,
        held: &Reservation,
        counted: &mut BTreeSet<&'a str>,
    ) -> Quanta {
        let Some(pod) = self
            .scene
            .pod(&held.waiter)
            .filter(|pod| pod.node().is_none())
        else {
            return Quanta::ZERO;
        };
        let want = self.wants.get(held.waiter.as_str()).copied();
        let gpu = self.scene.gpu(node, &held.gpu);
        let room = want
            .zip(gpu)
            .and_then(|(want, gpu)| self.room_on(node, gpu, &want, Unseen::LetsGo));
        let room = room.unwrap_or_default().into_iter();
        let news = room.filter(|one| counted.insert(one.uid));
        let of = |one: Candidate<'_>| self.scene.pod(one.uid).map(|pod| pod.asks);
        pod.asks.minus(news.filter_map(of).sum())
    }
}
