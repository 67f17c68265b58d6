//! Keeps memory of leases without an owner from being bound. Their owner's pod has ended while
//! other pods have them open, so no quota covers them.

use std::collections::BTreeMap;

use super::Ledger;
use super::time::Moment;
use crate::units::{Bytes, GpuUuid, LeaseId, Quanta};

/// Leases of each GPU with their sizes. The leases are told apart: when one ends while another
/// loses its owner, the memory of the first is unreclaimed all the same.
pub(super) type Kept = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

fn sum<'a>(bytes: impl Iterator<Item = &'a Bytes>) -> Bytes {
    bytes.fold(Bytes::ZERO, |sum, bytes| {
        Bytes(sum.0.saturating_add(bytes.0))
    })
}

impl Ledger {
    /// Replaces the leases that no bound container owns. True where this changed them. Leases that
    /// ended leave their memory unreclaimed: they may be lost with an agent and the fd store, and
    /// still be mapped.
    pub fn set_kept(&mut self, kept: Kept, now: Moment) -> bool {
        let news = self.kept != kept;
        for (gpu, before) in self.kept.clone() {
            let stays = |lease| {
                kept.get(&gpu)
                    .is_some_and(|of_gpu| of_gpu.contains_key(lease))
            };
            let left = before.iter().filter(|(lease, _)| !stays(lease));
            let left = sum(left.map(|(_, bytes)| bytes));
            self.leak(gpu, left, now);
        }
        self.kept = kept;
        news
    }

    /// The memory of a GPU that leases without an owner have.
    pub(super) fn kept_on(&self, gpu: &GpuUuid) -> Bytes {
        sum(self.kept.get(gpu).into_iter().flat_map(BTreeMap::values))
    }

    /// The memory of a GPU that may be bound to no pod: unreclaimed, of leases without an owner,
    /// and withheld.
    pub(super) fn unowned_on(&self, gpu: &GpuUuid) -> Quanta {
        let bytes = self.left_on(gpu).0.saturating_add(self.kept_on(gpu).0);
        let bytes = bytes.saturating_add(self.withheld_on(gpu).0);
        let quanta = bytes.div_ceil(self.quantum.bytes());
        Quanta(u32::try_from(quanta).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Quantum;
    use crate::{Gpu, Health};

    #[test]
    fn what_is_kept_without_an_owner_and_what_was_left_are_bound_to_nobody_also_after_a_restart() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus([Gpu {
            uuid: gpu.clone(),
            capacity: Quanta(8),
            health: Health::Healthy,
        }]);
        let kept = |lease, bytes| {
            BTreeMap::from([(gpu.clone(), BTreeMap::from([(LeaseId(lease), bytes)]))])
        };
        assert!(ledger.set_kept(kept(1, Bytes::mib(2_560)), Moment(0)));
        assert!(
            !ledger.set_kept(kept(1, Bytes::mib(2_560)), Moment(0)),
            "no news"
        );
        ledger.leak(gpu.clone(), Bytes::mib(512), Moment(0));
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, Moment(0)).unwrap();
        let view = ledger.view(Moment(0));
        assert_eq!(
            (view.gpus[0].free, view.gpus[0].kept),
            (Quanta(5), Bytes::mib(2_560)),
            "together they take three quanta"
        );
        ledger.set_kept(kept(2, Bytes::mib(2_560)), Moment(0));
        let view = ledger.view(Moment(0));
        assert_eq!(
            (view.gpus[0].kept, view.gpus[0].left),
            (Bytes::mib(2_560), Bytes::gib(3)),
            "one that ends is not made up for by another"
        );
        ledger.set_kept(BTreeMap::new(), Moment(0));
        let view = ledger.view(Moment(0));
        assert_eq!(
            (view.gpus[0].free, view.gpus[0].left),
            (Quanta(2), Bytes::mib(5_632)),
            "what is kept no more is to be proven free"
        );
    }
}
