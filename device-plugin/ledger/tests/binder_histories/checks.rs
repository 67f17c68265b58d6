//! Checks the invariants after every step.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{AllocationId, GpuUuid, Quanta, Resource};
use bursar_ledger::{
    AGING_AFTER, BindRequest, Binding, BootTime, ClaimId, Health, LedgerView, Placement,
    QueuedClaim,
};

use crate::node::Node;

/// The queue after a step.
#[derive(Default)]
pub(crate) struct Queue {
    /// The first claim that could ever have memory.
    pub(crate) head: Option<Head>,
    claims: Vec<QueuedClaim>,
    /// The time at which a claim was first in the queue, even if the kubelet did not retry since.
    queued_at: BTreeMap<ClaimId, BootTime>,
    bound: BTreeSet<AllocationId>,
}

impl Queue {
    /// Whether the claim waited, and is not in the queue any more.
    pub(crate) fn may_be_granted(&self, claim: ClaimId) -> bool {
        self.queued_at.contains_key(&claim)
            && self
                .claims
                .iter()
                .all(|queued_claim| queued_claim.claim != claim)
    }
}

/// The first queued claim of device memory, if one GPU can hold it.
pub(crate) struct Head {
    claim: QueuedClaim,
    late: bool,
    /// The most unbound memory of one healthy GPU that could hold it.
    largest_free: Quanta,
}

/// Checks all invariants. Returns the queue for the next step.
pub(crate) fn check_all(node: &Node, before: Queue) -> Queue {
    let bindings: Vec<Binding> = node.ledger.bindings().collect();
    let view = node.ledger.view(node.now);
    check_bindings_are_reported(node, &bindings);
    check_no_overcommit(node, &bindings, &view);
    let queued_claims = node.ledger.queued_claims(node.now);
    check_queue_order(node, &queued_claims);
    let head = queue_head(node, &queued_claims, &view);
    if let (Some(before_head), Some(head)) = (&before.head, &head)
        && before_head.claim.claim == head.claim.claim
        && grants_since(node, &before, &bindings, &queued_claims)
            .all(|grant| is_lower_ranked(grant, before_head))
    {
        assert!(
            head.largest_free >= before_head.largest_free,
            "later claims took the memory that {:?} waits for: {} of {} left",
            head.claim,
            head.largest_free,
            before_head.largest_free,
        );
    }
    let mut queued = before.queued_at;
    for queued_claim in &queued_claims {
        queued
            .entry(queued_claim.claim)
            .or_insert(queued_claim.queued_at);
    }
    Queue {
        head,
        claims: queued_claims,
        queued_at: queued,
        bound: bindings
            .into_iter()
            .flat_map(|binding| binding.allocations)
            .collect(),
    }
}

fn check_bindings_are_reported(node: &Node, bindings: &[Binding]) {
    let mut count = 0;
    for binding in bindings {
        for id in &binding.allocations {
            count += 1;
            let (pod, placement) = &node.bound[id];
            assert_eq!(
                (pod, placement),
                (&binding.pod, &binding.placement),
                "{id} moved"
            );
        }
    }
    assert_eq!(
        count,
        node.bound.len(),
        "an allocation is bound twice, or lost its memory"
    );
}

fn check_no_overcommit(node: &Node, bindings: &[Binding], view: &LedgerView) {
    let mut used: BTreeMap<&GpuUuid, Quanta> = BTreeMap::new();
    let mut managed = Quanta::ZERO;
    for binding in bindings {
        match &binding.placement {
            Placement::Managed(quanta) => managed += *quanta,
            Placement::Device(shares) => {
                for share in shares {
                    *used.entry(&share.gpu).or_default() += share.quanta;
                }
            }
        }
    }
    for gpu in &node.gpus {
        let used = used.get(&gpu.uuid).copied().unwrap_or_default();
        assert!(
            used <= gpu.capacity,
            "{} has {used} of {} bound",
            gpu.uuid,
            gpu.capacity
        );
    }
    for gpu in view.gpus.iter().filter(|gpu| gpu.health == Health::Healthy) {
        let bound = used.get(&gpu.uuid).copied().unwrap_or_default();
        assert!(gpu.bound >= bound, "the view hides memory: {gpu:?}");
        assert_eq!(gpu.bound + gpu.free + gpu.reserved, gpu.capacity, "{gpu:?}");
    }
    assert!(
        managed <= view.managed.capacity,
        "managed memory is overcommitted"
    );
}

fn check_queue_order(node: &Node, queued_claims: &[QueuedClaim]) {
    let key = |queued_claim: &QueuedClaim| {
        let late = node.now.since(queued_claim.queued_at) >= AGING_AFTER;
        let size = if late {
            Quanta(u32::MAX)
        } else {
            queued_claim.device_ids.quanta()
        };
        (
            queued_claim.reason.resource != Resource::DeviceMemory,
            std::cmp::Reverse((queued_claim.priority, late, size)),
        )
    };
    assert!(
        queued_claims.is_sorted_by_key(key),
        "out of order: {queued_claims:?}"
    );
}

fn queue_head(node: &Node, queued_claims: &[QueuedClaim], view: &LedgerView) -> Option<Head> {
    let satisfiable = |queued_claim: &&QueuedClaim| queued_claim.reason.gpus.is_some();
    let queued_claim = queued_claims.iter().find(satisfiable)?.clone();
    if queued_claim.reason.gpus.is_none_or(|gpus| gpus.get() > 1)
        || !queued_claim.reason.other_containers.is_empty()
    {
        return None;
    }
    let need = queued_claim.device_ids.quanta();
    let room = view
        .gpus
        .iter()
        .filter(|gpu| gpu.health == Health::Healthy && gpu.capacity >= need)
        .map(|gpu| gpu.capacity.saturating_sub(gpu.bound))
        .max()?;
    assert!(
        room < need,
        "{queued_claim:?} waits, and {room} is free on one GPU"
    );
    let late = node.now.since(queued_claim.queued_at) >= AGING_AFTER;
    Some(Head {
        claim: queued_claim,
        late,
        largest_free: room,
    })
}

/// The claims that were granted memory since `before`, bound or set aside: size, priority and
/// whether each had aged.
fn grants_since<'a>(
    node: &'a Node,
    before: &'a Queue,
    bindings: &'a [Binding],
    queued_claims: &'a [QueuedClaim],
) -> impl Iterator<Item = Grant> + 'a {
    let new = bindings.iter().filter(|binding| {
        !binding
            .allocations
            .iter()
            .any(|id| before.bound.contains(id))
    });
    let direct = new.map(move |binding| {
        let queued = before.queued_at.get(&binding.claim);
        Grant {
            quanta: binding.device_ids.quanta(),
            priority: node.priority_of(&binding.pod),
            late: queued.is_some_and(|&queued| node.now.since(queued) >= AGING_AFTER),
        }
    });
    let left = before
        .claims
        .iter()
        .filter(|queued_claim| {
            queued_claims
                .iter()
                .all(|now| now.claim != queued_claim.claim)
        })
        .map(move |queued_claim| Grant {
            quanta: queued_claim.device_ids.quanta(),
            priority: queued_claim.priority.0,
            late: node.now.since(queued_claim.queued_at) >= AGING_AFTER,
        });
    direct.chain(left)
}

struct Grant {
    quanta: Quanta,
    priority: i32,
    late: bool,
}

/// Whether the queue's rules rank the head before this claim, whatever the order of arrival.
fn is_lower_ranked(grant: Grant, head: &Head) -> bool {
    let priority = head.claim.priority.0;
    grant.priority < priority
        || (grant.priority == priority
            && !grant.late
            && (head.late || grant.quanta < head.claim.device_ids.quanta()))
}

/// Checks a binding that the ledger reports.
pub(crate) fn check_placement(node: &Node, binding: &Binding) {
    let quanta = binding.device_ids.quanta();
    let Placement::Device(shares) = &binding.placement else {
        assert_eq!(binding.placement, Placement::Managed(quanta));
        return;
    };
    assert_eq!(
        shares.iter().map(|share| share.quanta).sum::<Quanta>(),
        quanta
    );
    assert!(
        shares.is_sorted_by(|a, b| a.gpu < b.gpu),
        "a GPU twice: {shares:?}"
    );
    if node.bound.contains_key(&binding.allocations[0]) || node.queue.may_be_granted(binding.claim)
    {
        // The claim was placed in an earlier step, when the GPUs had other amounts.
        return;
    }
    let healthy: Vec<_> = node
        .gpus
        .iter()
        .filter(|gpu| gpu.health == Health::Healthy)
        .collect();
    for share in shares {
        assert!(
            healthy.iter().any(|gpu| gpu.uuid == share.gpu),
            "bound to a dead GPU: {share:?}"
        );
    }
    if node.has_several_containers(&binding.pod) {
        // The claim may have been placed with another container, in an earlier step.
        return;
    }
    let requested = usize::from(node.shape_of(&binding.pod).gpus.get()).min(quanta.0 as usize);
    assert!(
        shares.len() >= requested,
        "{requested} GPUs requested, {shares:?} given"
    );
    let largest = healthy
        .iter()
        .map(|gpu| gpu.capacity)
        .max()
        .unwrap_or_default();
    assert!(
        shares.len() == 1 || requested > 1 || quanta > largest,
        "spread without need: {shares:?}"
    );
    if healthy.iter().all(|gpu| gpu.capacity == largest) {
        let parts = || shares.iter().map(|share| share.quanta.0);
        let (most, least) = (parts().max().unwrap_or(0), parts().min().unwrap_or(0));
        assert!(most - least <= 1, "not even: {shares:?}");
        let fewest = (quanta.0.div_ceil(largest.0) as usize).max(requested);
        assert_eq!(shares.len(), fewest, "not the fewest: {shares:?}");
    }
}

/// Checks the allocations that a start ended: those of the same pod's containers that shared a
/// device id, or those of other pods without memory.
pub(crate) fn check_ended(node: &Node, start: &BindRequest, ended: &[AllocationId]) {
    for id in ended {
        match node.bound.get(id) {
            Some((pod, _)) => assert_eq!(*pod, start.pod, "took the memory of {pod}"),
            None => assert!(!node.is_live(*id), "forgot a living pod's {id}"),
        }
    }
    for binding in node
        .ledger
        .bindings()
        .filter(|binding| binding.pod == start.pod)
    {
        assert!(
            binding.resource != start.resource
                || binding.device_ids == start.device_ids
                || !binding.device_ids.overlaps(&start.device_ids),
            "{binding:?} runs together with a container that shares its device ids"
        );
    }
}

/// Checks that no claim waits that could have memory, and no waiting pod has any. So pods do not
/// block each other.
pub(crate) fn check_no_claim_is_blocked(node: &Node) {
    let queued_claims = node.ledger.queued_claims(node.now);
    let satisfiable = queued_claims
        .iter()
        .find(|queued_claim| queued_claim.reason.gpus.is_some());
    assert!(
        satisfiable.is_none(),
        "{satisfiable:?} waits with {:?} bound",
        node.bound
    );
    assert!(
        node.bound.is_empty(),
        "{:?} wait with {:?}",
        queued_claims,
        node.bound
    );
}

pub(crate) fn check_some_memory_is_bound(node: &Node) {
    let queued_claims = node.ledger.queued_claims(node.now);
    let satisfiable = queued_claims
        .iter()
        .any(|queued_claim| queued_claim.reason.gpus.is_some());
    assert!(
        !satisfiable || !node.bound.is_empty(),
        "{queued_claims:?} wait for an empty node"
    );
}
