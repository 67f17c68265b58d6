//! Accounts for unreclaimed memory, which ended pods left on a GPU and which is not proven free
//! yet.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::boot_time::BootTime;
use crate::units::{Bytes, GpuUuid};

/// The age from which unreclaimed memory counts as leaked; the proof takes about half a second.
pub const LEAKED_AFTER: Duration = Duration::from_secs(5);

/// The unreclaimed memory of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Unreclaimed {
    bytes: Bytes,
    /// The time since which the GPU has unreclaimed memory.
    since: BootTime,
    /// A number that changes with each addition. A proof covers only additions before it.
    version: u64,
}

impl Ledger {
    /// Adds memory of ended pods that other processes may map.
    pub fn add_unreclaimed(&mut self, gpu: GpuUuid, bytes: Bytes, now: BootTime) {
        if bytes == Bytes::ZERO {
            return;
        }
        let number = self.next_id();
        let unreclaimed = self.unreclaimed.entry(gpu).or_insert(Unreclaimed {
            bytes: Bytes::ZERO,
            since: now,
            version: number,
        });
        unreclaimed.bytes = Bytes(unreclaimed.bytes.0.saturating_add(bytes.0));
        unreclaimed.version = number;
    }

    /// The GPUs with unreclaimed memory, each with its version.
    pub fn unreclaimed_versions(&self) -> BTreeMap<GpuUuid, u64> {
        let unreclaimed = self.unreclaimed.iter();
        unreclaimed
            .map(|(gpu, unreclaimed)| (gpu.clone(), unreclaimed.version))
            .collect()
    }

    /// Lowers the unreclaimed memory of a GPU to `held`, as proven at this version. The rest can be
    /// bound again. True where this changed it.
    pub fn lower_unreclaimed(&mut self, gpu: &GpuUuid, number: u64, held: Bytes) -> bool {
        let unreclaimed = self.unreclaimed.get_mut(gpu);
        let Some(unreclaimed) = unreclaimed
            .filter(|unreclaimed| unreclaimed.version == number && unreclaimed.bytes > held)
        else {
            return false;
        };
        unreclaimed.bytes = held;
        self.unreclaimed
            .retain(|_, unreclaimed| unreclaimed.bytes > Bytes::ZERO);
        true
    }

    /// Subtracts memory that is charged to a container again.
    pub fn subtract_unreclaimed(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        if let Some(unreclaimed) = self.unreclaimed.get_mut(gpu) {
            unreclaimed.bytes = Bytes(unreclaimed.bytes.0.saturating_sub(bytes.0));
        }
        self.unreclaimed
            .retain(|_, unreclaimed| unreclaimed.bytes > Bytes::ZERO);
    }

    /// The unreclaimed memory of a GPU.
    pub(super) fn unreclaimed_on(&self, gpu: &GpuUuid) -> Bytes {
        self.unreclaimed
            .get(gpu)
            .map_or(Bytes::ZERO, |unreclaimed| unreclaimed.bytes)
    }

    /// The part of a GPU that has been unreclaimed for so long that a process must hold it.
    pub(super) fn leaked_on(&self, gpu: &GpuUuid, now: BootTime) -> Bytes {
        let unreclaimed = self.unreclaimed.get(gpu);
        let is_leaked =
            unreclaimed.is_some_and(|unreclaimed| now.since(unreclaimed.since) >= LEAKED_AFTER);
        if is_leaked {
            self.unreclaimed_on(gpu)
        } else {
            Bytes::ZERO
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{AllocationId, DeviceIdSet, Quanta, Quantum, Resource};
    use crate::{BindOutcome, BindRequest, Gpu, GpuSpread, Health};

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus([Gpu {
            uuid: gpu(),
            capacity: Quanta(8),
            health: Health::Healthy,
        }]);
        ledger
    }

    fn start(ledger: &mut Ledger, quanta: u16, now: BootTime) -> BindOutcome {
        let device_ids = DeviceIdSet::from_indexes(0..quanta).unwrap();
        let (id, resource) = (AllocationId::from_bits(1), Resource::DeviceMemory);
        ledger.add_pending(id, resource, device_ids.clone(), now);
        let start = BindRequest {
            resource,
            device_ids,
            containers: Vec::new(),
            pod: "p".parse().unwrap(),
            spread: GpuSpread::default(),
            priority: Default::default(),
        };
        ledger.bind(start, now).unwrap().outcome
    }

    #[test]
    fn unreclaimed_memory_is_not_bound_until_proven_free() {
        let now = BootTime(0);
        let mut ledger = ledger();
        ledger.add_unreclaimed(gpu(), Bytes::mib(2_500), now);
        let BindOutcome::Queued(ticket, reason) = start(&mut ledger, 6, now) else {
            panic!("five quanta are free");
        };
        assert_eq!(reason.largest_free, Bytes::gib(5));
        assert_eq!(
            reason.gpus.map(u16::from),
            Some(1),
            "it waits, for the GPU is as large as before"
        );
        let number = ledger.unreclaimed_versions()[&gpu()];
        assert!(
            !ledger.lower_unreclaimed(&gpu(), number, Bytes::gib(3)),
            "unchanged"
        );
        assert_eq!(ledger.advance(now), []);
        assert!(ledger.lower_unreclaimed(&gpu(), number, Bytes::gib(2)));
        let bound = ledger.advance(now);
        assert_eq!(bound[0].claim, ticket.claim);
        assert_eq!(ledger.view(now).gpus[0].free, Quanta::ZERO);
        assert!(ledger.lower_unreclaimed(&gpu(), number, Bytes::ZERO));
        assert_eq!(
            (ledger.unreclaimed_versions(), ledger.view(now).gpus[0].free),
            (BTreeMap::new(), Quanta(2))
        );
    }

    #[test]
    fn proof_covers_only_bytes_added_before_it() {
        let mut ledger = ledger();
        ledger.add_unreclaimed(gpu(), Bytes::gib(1), BootTime(0));
        let number = ledger.unreclaimed_versions()[&gpu()];
        ledger.add_unreclaimed(gpu(), Bytes::gib(1), BootTime(1));
        assert!(!ledger.lower_unreclaimed(&gpu(), number, Bytes::ZERO));
        assert_eq!(ledger.unavailable_on(&gpu()), Quanta(2));
    }

    #[test]
    fn unreclaimed_memory_is_leaked_when_proof_is_overdue() {
        let mut ledger = ledger();
        ledger.add_unreclaimed(gpu(), Bytes::gib(1), BootTime(0));
        let shown = |ledger: &Ledger, at: Duration| {
            let view = ledger.view(BootTime(0) + at);
            (view.gpus[0].leaked, view.gpus[0].free)
        };
        let short = LEAKED_AFTER - Duration::from_millis(1);
        assert_eq!(shown(&ledger, short), (Bytes::ZERO, Quanta(7)));
        assert_eq!(shown(&ledger, LEAKED_AFTER), (Bytes::gib(1), Quanta(7)));
        ledger.add_unreclaimed(gpu(), Bytes::gib(1), BootTime(1));
        assert_eq!(
            shown(&ledger, LEAKED_AFTER),
            (Bytes::gib(2), Quanta(6)),
            "one leak lasts"
        );
    }

    proptest! {
        /// Random pods end and leave memory, and holders release it one by one. Each proof is late
        /// by some steps.
        #[test]
        fn unreclaimed_memory_is_bound_again_only_when_released(
            steps in prop::collection::vec((0..4_u8, 0..3_000_u64), 0..60),
        ) {
            let (mut ledger, mut held) = (ledger(), 0_u64);
            let mut proof = None;
            for (step, mib) in steps {
                match step {
                    // Unreclaimed memory is at most the exported memory, and may be less.
                    0 => {
                        held += mib / 2;
                        ledger.add_unreclaimed(gpu(), Bytes::mib(mib), BootTime(0));
                    }
                    1 => held -= mib.min(held),
                    2 => proof = ledger.unreclaimed_versions().get(&gpu()).map(|number| (*number, Bytes::mib(held))),
                    _ => if let Some((number, held)) = proof {
                        ledger.lower_unreclaimed(&gpu(), number, held);
                    },
                }
                let left = ledger.unreclaimed.get(&gpu()).map_or(0, |unreclaimed| unreclaimed.bytes.0);
                prop_assert!(left >= held << 20);
                let restored = Ledger::restore(ledger.snapshot(), Quantum::Gib1, BootTime(9)).unwrap();
                prop_assert_eq!(restored.unavailable_on(&gpu()), ledger.unavailable_on(&gpu()));
                prop_assert_eq!(restored.unreclaimed_versions(), ledger.unreclaimed_versions());
            }
            for (gpu, number) in ledger.unreclaimed_versions() {
                ledger.lower_unreclaimed(&gpu, number, Bytes::ZERO);
            }
            prop_assert_eq!(ledger.view(BootTime(0)).gpus[0].free, Quanta(8));
        }
    }
}
