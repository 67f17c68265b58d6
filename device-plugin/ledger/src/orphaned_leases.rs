//! Withholds memory of leases without an owner from binding. Their owner's pod has ended while
//! other pods have them open, so no quota covers them.

use std::collections::BTreeMap;

use super::Ledger;
use super::boot_time::BootTime;
use crate::units::{Bytes, GpuUuid, LeaseId, Quanta};

/// The leases of each GPU with their sizes. The ledger distinguishes them: when one ends while
/// another loses its owner, the memory of the first becomes unreclaimed.
pub(super) type OrphanedLeases = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

impl Ledger {
    /// Replaces the leases that no bound container owns. True where this changed them. Leases that
    /// ended leave their memory unreclaimed. A crash of the agent and the fd store may have ended
    /// them while other processes still map them.
    pub fn set_orphaned_leases(&mut self, leases: OrphanedLeases, now: BootTime) -> bool {
        let changed = self.orphaned_leases != leases;
        for (gpu, before) in self.orphaned_leases.clone() {
            let stays = |lease| {
                leases
                    .get(&gpu)
                    .is_some_and(|gpu_leases| gpu_leases.contains_key(lease))
            };
            let ended = before.iter().filter(|(lease, _)| !stays(lease));
            let ended = ended.map(|(_, bytes)| *bytes).sum();
            self.add_unreclaimed(gpu, ended, now);
        }
        self.orphaned_leases = leases;
        changed
    }

    /// Counts the bytes of an ended lease as unreclaimed. A lease that the ledger still lists
    /// counts already: its bytes become unreclaimed when the list loses it.
    pub fn end_lease(&mut self, lease: LeaseId, gpu: GpuUuid, bytes: Bytes, now: BootTime) {
        let gpu_leases = self.orphaned_leases.get(&gpu);
        if !gpu_leases.is_some_and(|gpu_leases| gpu_leases.contains_key(&lease)) {
            self.add_unreclaimed(gpu, bytes, now);
        }
    }

    /// The memory of leases without an owner on a GPU.
    pub(super) fn orphaned_leases_on(&self, gpu: &GpuUuid) -> Bytes {
        let leases = self.orphaned_leases.get(gpu).into_iter();
        leases.flat_map(BTreeMap::values).copied().sum()
    }

    /// The memory of a GPU that may be bound to no pod: unreclaimed, of leases without an owner, or
    /// withheld.
    pub(super) fn unavailable_on(&self, gpu: &GpuUuid) -> Quanta {
        self.unavailable_with(gpu, self.unreclaimed_on(gpu))
    }

    /// The unavailable memory of a GPU that lasts. Fresh unreclaimed memory is proven free soon.
    pub(super) fn unavailable_for_long(&self, gpu: &GpuUuid, now: BootTime) -> Quanta {
        self.unavailable_with(gpu, self.leaked_on(gpu, now))
    }

    fn unavailable_with(&self, gpu: &GpuUuid, unreclaimed: Bytes) -> Quanta {
        self.quanta_of(unreclaimed + self.orphaned_leases_on(gpu) + self.withheld_on(gpu))
    }

    /// The withheld memory of a GPU.
    pub(super) fn withheld_quanta(&self, gpu: &GpuUuid) -> Quanta {
        self.quanta_of(self.withheld_on(gpu))
    }

    fn quanta_of(&self, Bytes(bytes): Bytes) -> Quanta {
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
    fn orphaned_and_unreclaimed_bytes_stay_unbound_after_restart() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus([Gpu {
            uuid: gpu.clone(),
            capacity: Quanta(8),
            health: Health::Healthy,
        }]);
        let leases = |lease, bytes| {
            BTreeMap::from([(gpu.clone(), BTreeMap::from([(LeaseId(lease), bytes)]))])
        };
        assert!(ledger.set_orphaned_leases(leases(1, Bytes::mib(2_560)), BootTime(0)));
        assert!(
            !ledger.set_orphaned_leases(leases(1, Bytes::mib(2_560)), BootTime(0)),
            "unchanged"
        );
        ledger.add_unreclaimed(gpu.clone(), Bytes::mib(512), BootTime(0));
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, BootTime(0)).unwrap();
        let view = ledger.view(BootTime(0));
        assert_eq!(
            (view.gpus[0].free, view.gpus[0].orphaned_leases),
            (Quanta(5), Bytes::mib(2_560)),
            "together they take three quanta"
        );
        ledger.set_orphaned_leases(leases(2, Bytes::mib(2_560)), BootTime(0));
        let view = ledger.view(BootTime(0));
        assert_eq!(
            (view.gpus[0].orphaned_leases, view.gpus[0].unreclaimed),
            (Bytes::mib(2_560), Bytes::gib(3)),
            "one that ends is not made up for by another"
        );
        ledger.set_orphaned_leases(BTreeMap::new(), BootTime(0));
        let view = ledger.view(BootTime(0));
        assert_eq!(
            (view.gpus[0].free, view.gpus[0].unreclaimed),
            (Quanta(2), Bytes::mib(5_632)),
            "an ended lease is unreclaimed until proven free"
        );
    }
}
