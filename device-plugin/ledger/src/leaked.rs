//! Accounts for unreclaimed memory: ended pods left it on a GPU, and it is not proven free yet.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::time::Moment;
use crate::units::{Bytes, GpuUuid};

/// The age from which unreclaimed memory counts as leaked; the proof takes about half a second.
pub const SETTLING: Duration = Duration::from_secs(5);

/// The unreclaimed memory of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Leaked {
    bytes: Bytes,
    /// The time since which there is any.
    since: Moment,
    /// A number that changes with each addition: a proof covers additions before it.
    number: u64,
}

impl Ledger {
    /// Adds memory of ended pods that other processes may hold.
    pub fn leak(&mut self, gpu: GpuUuid, bytes: Bytes, now: Moment) {
        if bytes == Bytes::ZERO {
            return;
        }
        let number = self.number();
        let leaked = self.leaked.entry(gpu).or_insert(Leaked {
            bytes: Bytes::ZERO,
            since: now,
            number,
        });
        leaked.bytes = Bytes(leaked.bytes.0.saturating_add(bytes.0));
        leaked.number = number;
    }

    /// The GPUs with unreclaimed memory, each with its number.
    pub fn leaks(&self) -> BTreeMap<GpuUuid, u64> {
        let leaked = self.leaked.iter();
        leaked
            .map(|(gpu, leaked)| (gpu.clone(), leaked.number))
            .collect()
    }

    /// Lowers the unreclaimed memory of a GPU to `held`, as proven when it had this number; the
    /// rest can be bound again. True where this changed it.
    pub fn held_at_most(&mut self, gpu: &GpuUuid, number: u64, held: Bytes) -> bool {
        let leaked = self.leaked.get_mut(gpu);
        let Some(leaked) = leaked.filter(|leaked| leaked.number == number && leaked.bytes > held)
        else {
            return false;
        };
        leaked.bytes = held;
        self.leaked.retain(|_, leaked| leaked.bytes > Bytes::ZERO);
        true
    }

    /// Subtracts memory that is charged to a container again.
    pub fn charge_leak(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        if let Some(leaked) = self.leaked.get_mut(gpu) {
            leaked.bytes = Bytes(leaked.bytes.0.saturating_sub(bytes.0));
        }
        self.leaked.retain(|_, leaked| leaked.bytes > Bytes::ZERO);
    }

    /// The unreclaimed memory of a GPU.
    pub(super) fn left_on(&self, gpu: &GpuUuid) -> Bytes {
        self.leaked
            .get(gpu)
            .map_or(Bytes::ZERO, |leaked| leaked.bytes)
    }

    /// The part of a GPU that has been unreclaimed for so long that a process must hold it.
    pub(super) fn leaked_by(&self, gpu: &GpuUuid, now: Moment) -> Bytes {
        let leaked = self.leaked.get(gpu);
        let lasts = leaked.is_some_and(|leaked| now.since(leaked.since) >= SETTLING);
        if lasts {
            self.left_on(gpu)
        } else {
            Bytes::ZERO
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{AllocationId, Quanta, Quantum, Resource, TokenSet};
    use crate::{Answer, Gpu, Health, Shape, Start};

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

    fn start(ledger: &mut Ledger, quanta: u16, now: Moment) -> Answer {
        let tokens = TokenSet::from_indexes(0..quanta).unwrap();
        let (id, resource) = (AllocationId::from_bits(1), Resource::DeviceMemory);
        ledger.book(id, resource, tokens.clone(), now);
        let start = Start {
            resource,
            tokens,
            containers: Vec::new(),
            pod: "p".parse().unwrap(),
            shape: Shape::default(),
            priority: Default::default(),
        };
        ledger.start(start, now).unwrap().answer
    }

    #[test]
    fn what_is_left_on_a_gpu_is_bound_to_nobody_until_it_is_proven_free() {
        let now = Moment(0);
        let mut ledger = ledger();
        ledger.leak(gpu(), Bytes::mib(2_500), now);
        let Answer::Wait(ticket, reason) = start(&mut ledger, 6, now) else {
            panic!("five quanta are free");
        };
        assert_eq!(reason.largest_free, Bytes::gib(5));
        assert_eq!(
            reason.gpus.map(u16::from),
            Some(1),
            "it waits, for the GPU is as large as before"
        );
        let number = ledger.leaks()[&gpu()];
        assert!(
            !ledger.held_at_most(&gpu(), number, Bytes::gib(3)),
            "no news"
        );
        assert_eq!(ledger.advance(now), []);
        assert!(ledger.held_at_most(&gpu(), number, Bytes::gib(2)));
        let bound = ledger.advance(now);
        assert_eq!(bound[0].claim, ticket.claim);
        assert_eq!(ledger.view(now).gpus[0].free, Quanta::ZERO);
        assert!(ledger.held_at_most(&gpu(), number, Bytes::ZERO));
        assert_eq!(
            (ledger.leaks(), ledger.view(now).gpus[0].free),
            (BTreeMap::new(), Quanta(2))
        );
    }

    #[test]
    fn a_proof_is_of_what_was_left_before_it() {
        let mut ledger = ledger();
        ledger.leak(gpu(), Bytes::gib(1), Moment(0));
        let number = ledger.leaks()[&gpu()];
        ledger.leak(gpu(), Bytes::gib(1), Moment(1));
        assert!(!ledger.held_at_most(&gpu(), number, Bytes::ZERO));
        assert_eq!(ledger.unowned_on(&gpu()), Quanta(2));
    }

    #[test]
    fn it_is_called_leaked_once_it_has_not_been_proven_free_for_a_while() {
        let mut ledger = ledger();
        ledger.leak(gpu(), Bytes::gib(1), Moment(0));
        let shown = |ledger: &Ledger, at: Duration| {
            let view = ledger.view(Moment(0) + at);
            (view.gpus[0].leaked, view.gpus[0].free)
        };
        let short = SETTLING - Duration::from_millis(1);
        assert_eq!(shown(&ledger, short), (Bytes::ZERO, Quanta(7)));
        assert_eq!(shown(&ledger, SETTLING), (Bytes::gib(1), Quanta(7)));
        ledger.leak(gpu(), Bytes::gib(1), Moment(1));
        assert_eq!(
            shown(&ledger, SETTLING),
            (Bytes::gib(2), Quanta(6)),
            "one leak lasts"
        );
    }

    proptest! {
        /// Pods end and leave something, holders go one by one; each proof is late by some steps.
        #[test]
        fn nothing_held_is_bound_again_and_nothing_is_kept_once_nobody_holds_it(
            steps in prop::collection::vec((0..4_u8, 0..3_000_u64), 0..60),
        ) {
            let (mut ledger, mut held) = (ledger(), 0_u64);
            let mut proof = None;
            for (step, mib) in steps {
                match step {
                    // What is left is at most what had been exported, and may be less.
                    0 => {
                        held += mib / 2;
                        ledger.leak(gpu(), Bytes::mib(mib), Moment(0));
                    }
                    1 => held -= mib.min(held),
                    2 => proof = ledger.leaks().get(&gpu()).map(|number| (*number, Bytes::mib(held))),
                    _ => if let Some((number, held)) = proof {
                        ledger.held_at_most(&gpu(), number, held);
                    },
                }
                let left = ledger.leaked.get(&gpu()).map_or(0, |leaked| leaked.bytes.0);
                prop_assert!(left >= held << 20);
                let restored = Ledger::restore(ledger.snapshot(), Quantum::Gib1, Moment(9)).unwrap();
                prop_assert_eq!(restored.unowned_on(&gpu()), ledger.unowned_on(&gpu()));
                prop_assert_eq!(restored.leaks(), ledger.leaks());
            }
            for (gpu, number) in ledger.leaks() {
                ledger.held_at_most(&gpu, number, Bytes::ZERO);
            }
            prop_assert_eq!(ledger.view(Moment(0)).gpus[0].free, Quanta(8));
        }
    }
}
