//! Bounds the exports of exited processes that other processes may still hold: pure.
//!
//! While only a descriptor holds such memory, the driver charges it to no process. Afterwards the
//! driver charges it to each process that maps it, on top of that process's own memory (F4, F5, F13
//! in docs/internals/facts.md). So the bound is the used memory of a GPU without the own memory of
//! its live processes. All of this memory may be orphaned.
//!
//! Exports of live processes may be charged to no process as well, at most what they use and the
//! driver does not list for them. These bytes do not count for the exited processes of other
//! containers, so that no tenant delays the refund of a neighbour. They do count for exited
//! processes of the same container. Otherwise a process could report an exited sibling's exports as
//! its own, and both would be free.
//!
//! A single sample can be wrong, since the driver reports the used bytes and the processes one
//! after the other. A process that frees before the first answer and allocates before the second
//! hides as much. So the most bytes in use before and after the list count, and [`WINDOW`] samples
//! in a row must agree. The largest used figure counts, and the least of each process. Memory that
//! moves meanwhile, such as that of a context that is torn down, then counts as orphaned. Bytes
//! stay hidden only if a process hides them in every sample.
//!
//! Managed memory on a GPU is charged to no process either, so it counts as orphaned. The bound
//! never subtracts it, because no figure separates it from memory that a descriptor holds.

use std::collections::{BTreeMap, VecDeque};

use bursar_gpu::memory_sample::{GpuMemorySample, unlisted_overhead};
use bursar_ledger::units::{AllocationId, Bytes, LeaseId};

/// The samples in a row that prove a bound.
pub(super) const WINDOW: usize = 10;

/// A smaller bound counts as zero. A process without a context has 3.3 MiB that the driver does not
/// list, and a context may take slightly more than measured.
const NOISE_FLOOR: u64 = 16 << 20;

/// The bytes of a GPU that a live process itself has allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnMemory {
    /// The allocation of its container.
    pub(super) allocation: AllocationId,
    /// The bytes that the process charges.
    pub(super) charged: Bytes,
    /// The part of these bytes that the process reports as exported.
    pub(super) exported: Bytes,
    /// The bytes that the process may have without a charge.
    pub(super) uncharged_margin: Bytes,
}

impl OwnMemory {
    /// The own part of the bytes that the driver charges. Beyond charge and margin the process maps
    /// memory of others, so that only its charge surely is its own.
    pub(super) fn own_part(self, listed: Bytes) -> Bytes {
        let limit = self.charged.0.saturating_add(self.uncharged_margin.0);
        if listed.0 <= limit {
            listed
        } else {
            self.charged
        }
    }

    /// The part of its exports that the driver may charge to no process, when the driver charges
    /// the process these bytes.
    fn unlisted(self, listed: Bytes) -> Bytes {
        let rest = self.charged.0.saturating_sub(self.own_part(listed).0);
        self.exported.min(Bytes(rest))
    }
}

/// The largest amount of orphaned exports on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OrphanBound {
    /// The bound before exports of live processes are subtracted.
    total: u64,
    /// The bytes that live processes have exported and the driver charges to no process, by
    /// container.
    exported: BTreeMap<AllocationId, u64>,
}

impl OrphanBound {
    /// The bound for a container's orphaned exports; without a container, for memory that ended
    /// pods left.
    pub(super) fn for_container(&self, container: Option<&AllocationId>) -> Bytes {
        let others = self.exported.iter();
        let others = others.filter(|(other, _)| Some(*other) != container);
        let bound = others.fold(self.total, |rest, (_, bytes)| rest.saturating_sub(*bytes));
        Bytes(if bound > NOISE_FLOOR { bound } else { 0 })
    }
}

/// The last samples of one GPU, each with the candidates that were read before the sample.
#[derive(Debug)]
pub(super) struct SampleWindow<T>(VecDeque<(T, Sample)>);

/// The figures of one sample.
#[derive(Debug)]
struct Sample {
    used: u64,
    /// The own bytes of live processes, by pid.
    own: BTreeMap<u32, u64>,
    /// The exported bytes of live processes that the driver does not charge to them, by pid.
    exported: BTreeMap<u32, (AllocationId, u64)>,
    /// The bytes of the leases that existed before and after the sample.
    leases: BTreeMap<LeaseId, u64>,
}

impl<T> Default for SampleWindow<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> SampleWindow<T> {
    /// Adds a sample. The caller read `candidates` and the own memory of live processes before the
    /// sample. The leases existed before and after it.
    pub(super) fn push(
        &mut self,
        candidates: T,
        sample: &GpuMemorySample,
        own: &BTreeMap<u32, OwnMemory>,
        leases: &BTreeMap<LeaseId, Bytes>,
    ) {
        let own_part =
            |(pid, bytes): (u32, Option<Bytes>)| Some((pid, own.get(&pid)?.own_part(bytes?).0));
        let unlisted = |(pid, own): (&u32, &OwnMemory)| {
            let bytes = own.unlisted(sample.charges.bytes_of(*pid)?).0;
            (bytes > 0).then_some((*pid, (own.allocation, bytes)))
        };
        let sample = Sample {
            used: sample.most_used().0,
            exported: own.iter().filter_map(unlisted).collect(),
            own: sample.charges.iter().filter_map(own_part).collect(),
            leases: leases.iter().map(|(id, bytes)| (*id, bytes.0)).collect(),
        };
        self.0.push_back((candidates, sample));
        if self.0.len() > WINDOW {
            self.0.pop_front();
        }
    }

    /// Forgets all samples.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The bound on the candidates that were read before the first sample; `None` while the window
    /// is not full.
    pub(super) fn bound(&self) -> Option<(&T, OrphanBound)> {
        let (candidates, first) = self.0.front().filter(|_| self.0.len() == WINDOW)?;
        let samples = || self.0.iter().map(|(_, sample)| sample);
        let used = samples().map(|sample| sample.used).max()?;
        let least = |pid| {
            samples()
                .map(|sample| sample.own.get(pid).copied().unwrap_or_default())
                .min()
        };
        let own = first
            .own
            .keys()
            .filter_map(least)
            .filter(|bytes| *bytes > 0);
        let own: Vec<u64> = own.collect();
        let known = own.iter().fold(unlisted_overhead(own.len()), |sum, bytes| {
            sum.saturating_add(*bytes)
        });
        // The driver charges leases to no process as long as the fd store holds them (F5 in
        // docs/internals/facts.md).
        let stayed = first
            .leases
            .iter()
            .filter(|(lease, _)| samples().all(|sample| sample.leases.contains_key(lease)));
        let known = stayed.fold(known, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let mut exported = BTreeMap::new();
        for (pid, (allocation, _)) in &first.exported {
            let in_each =
                samples().map(|sample| sample.exported.get(pid).filter(|(of, _)| of == allocation));
            let least = in_each
                .map(|bytes| bytes.map_or(0, |(_, bytes)| *bytes))
                .min();
            *exported.entry(*allocation).or_default() += least.unwrap_or_default();
        }
        let total = used.saturating_sub(known);
        Some((candidates, OrphanBound { total, exported }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn sample_of(used: u64, charged: &[(u32, u64)]) -> GpuMemorySample {
        let charged = charged.iter();
        GpuMemorySample {
            used: Bytes(used),
            charges: charged
                .map(|(pid, bytes)| (*pid, Some(Bytes(*bytes))))
                .collect(),
            ..GpuMemorySample::default()
        }
    }

    /// Each process has an uncharged margin of 64 MiB.
    fn own(processes: &[(u32, u64)]) -> BTreeMap<u32, OwnMemory> {
        let own = |uses: u64| OwnMemory {
            allocation: AllocationId::from_bits(1),
            charged: Bytes(uses),
            exported: Bytes::ZERO,
            uncharged_margin: Bytes::mib(64),
        };
        let processes = processes.iter();
        processes.map(|(pid, uses)| (*pid, own(*uses))).collect()
    }

    fn bound_of(
        samples: impl IntoIterator<Item = GpuMemorySample>,
        own: &BTreeMap<u32, OwnMemory>,
    ) -> Option<Bytes> {
        let mut all = SampleWindow::default();
        let none = BTreeMap::new();
        samples
            .into_iter()
            .for_each(|sample| all.push((), &sample, own, &none));
        all.bound().map(|(_, bound)| bound.for_container(None))
    }

    #[test]
    fn unexplained_bytes_count_as_orphaned() {
        let own = own(&[(1, 512 * MIB)]);
        let same = |sample: GpuMemorySample| vec![sample; WINDOW];
        let parked = sample_of(1_551 * MIB, &[(1, 518 * MIB)]);
        assert_eq!(
            bound_of(same(parked.clone()), &own),
            Some(Bytes::mib(1_551 - 518 - 9))
        );
        assert_eq!(
            bound_of(vec![parked; WINDOW - 1], &own),
            None,
            "too few samples"
        );
        let mapped = sample_of(1_551 * MIB, &[(1, 1_542 * MIB)]);
        assert_eq!(
            bound_of(same(mapped), &own),
            Some(Bytes::mib(1_551 - 512 - 9)),
            "its importer"
        );
        let other_pids = sample_of(1_551 * MIB, &[(1, 518 * MIB), (2, 1_024 * MIB)]);
        assert_eq!(
            bound_of(same(other_pids), &own),
            Some(Bytes::mib(1_551 - 518 - 9)),
            "a stranger"
        );
        let little = sample_of(1_551 * MIB, &[(1, 576 * MIB)]);
        assert_eq!(
            bound_of(same(little), &own),
            Some(Bytes::mib(1_551 - 576 - 9)),
            "its kernels"
        );
        assert_eq!(
            bound_of(same(sample_of(527 * MIB, &[(1, 518 * MIB)])), &own),
            Some(Bytes::ZERO)
        );
    }

    #[test]
    fn held_memory_is_not_free_when_calls_and_answers_alternate() {
        let own = own(&[(1, 25 << 30)]);
        let (context, held, churned) = (518 * MIB, 5 << 30, 24_u64 << 30);
        for first in [0, 1] {
            // A process allocates or frees 24 GiB between each two answers of the driver.
            let own_at = |answer: u64| context + churned * ((first + answer) % 2);
            let used_at = |answer| Bytes(own_at(answer) + held);
            let sample = GpuMemorySample {
                used_beside: used_at(1).max(used_at(4)),
                used_after: Some(used_at(5)),
                ..sample_of(used_at(0).0, &[(1, own_at(3))])
            };
            let bound = bound_of(vec![sample; WINDOW], &own).unwrap();
            assert!(bound.0 > held - 16 * MIB, "{bound}");
        }
    }

    #[test]
    fn leases_explain_their_bytes_only_while_they_stay() {
        let kept = sample_of(3_072 * MIB, &[]);
        let leases = |ids: &[u64]| {
            let ids = ids.iter();
            ids.map(|id| (LeaseId(*id), Bytes::gib(1))).collect()
        };
        let bound_with = |last: BTreeMap<LeaseId, Bytes>| {
            let mut samples = SampleWindow::default();
            for _ in 1..WINDOW {
                samples.push((), &kept, &BTreeMap::new(), &leases(&[1, 2]));
            }
            samples.push((), &kept, &BTreeMap::new(), &last);
            samples.bound().map(|(_, bound)| bound.for_container(None))
        };
        assert_eq!(bound_with(leases(&[1, 2])), Some(Bytes::gib(1)));
        assert_eq!(
            bound_with(leases(&[1, 3])),
            Some(Bytes::gib(2)),
            "lease 2 has ended"
        );
        assert_eq!(
            bound_with(leases(&[])),
            Some(Bytes::gib(3)),
            "the fd store is away"
        );
    }

    /// A live process of container 1 that uses 3 GiB and has exported 2 GiB.
    fn living_exporter() -> BTreeMap<u32, OwnMemory> {
        let mut own = own(&[(1, 3 << 30)]);
        own.values_mut()
            .for_each(|own| own.exported = Bytes::gib(2));
        own
    }

    fn bound_for(samples: impl IntoIterator<Item = GpuMemorySample>, container: u64) -> Bytes {
        let mut all = SampleWindow::default();
        let own = living_exporter();
        samples
            .into_iter()
            .for_each(|sample| all.push((), &sample, &own, &BTreeMap::new()));
        let (_, held) = all.bound().unwrap();
        held.for_container(Some(&AllocationId::from_bits(container)))
    }

    #[test]
    fn live_exports_delay_reclaim_of_their_container_alone() {
        let samples = || vec![sample_of(3 << 30, &[(1, 1 << 30)]); WINDOW];
        assert_eq!(bound_for(samples(), 2), Bytes::ZERO);
        let own = Bytes((2 << 30) - 9 * MIB);
        assert_eq!(
            bound_for(samples(), 1),
            own,
            "the bytes may be those of an exited sibling"
        );
    }

    #[test]
    fn live_exports_explain_nothing_that_is_listed() {
        let listed = vec![sample_of(5 << 30, &[(1, 3 << 30)]); WINDOW];
        let parked = Bytes((2 << 30) - 9 * MIB);
        assert_eq!(
            bound_for(listed, 2),
            parked,
            "an exited process of a neighbour left the bytes"
        );
        let once = (0..WINDOW).map(|number| match number {
            5 => sample_of(5 << 30, &[(1, 3 << 30)]),
            _ => sample_of(5 << 30, &[(1, 1 << 30)]),
        });
        assert!(bound_for(once, 2) >= parked, "the bytes were listed once");
    }

    #[test]
    fn process_explains_nothing_when_its_bytes_are_unknown() {
        let mut unknown = sample_of(100 * MIB, &[]);
        unknown.charges = [(1, None)].into_iter().collect();
        assert_eq!(
            bound_of(vec![unknown; WINDOW], &own(&[(1, 100 * MIB)])),
            Some(Bytes::mib(100))
        );
    }

    #[test]
    fn process_hides_nothing_when_it_moves_within_a_sample() {
        let own = own(&[(1, 4 << 30), (2, 4 << 30)]);
        // In every second sample a process frees before the first answer and allocates before the
        // second.
        let samples = (0..WINDOW).map(|number| match number % 2 {
            0 => sample_of(2 << 30, &[(1, 2 << 30)]),
            _ => sample_of(4 << 30, &[(1, 2 << 30)]),
        });
        assert!(bound_of(samples, &own).unwrap() > Bytes::gib(1));
        let ends = (0..WINDOW).map(|number| match number {
            0..3 => sample_of(2 << 30, &[(1, 2 << 30)]),
            _ => sample_of(2 << 30, &[]),
        });
        assert_eq!(
            bound_of(ends, &own),
            Some(Bytes::gib(2)),
            "its memory may be another's by now"
        );
    }

    const CAPACITY: u64 = 8 << 30;

    #[derive(Clone, Debug)]
    enum Step {
        /// A live process allocates this amount itself.
        Has(u32, u64),
        /// A live process exports this amount, which only descriptors hold.
        Exports(u32, u64),
        /// A process dies. Other processes hold its exports by descriptors.
        Dies(u32),
        /// Descriptors of each exited process's exports are closed down to this amount.
        Parked(u64),
        /// A live process maps orphaned exports, and the driver charges it for them.
        Mapped(u32, u64),
        /// Managed memory of live processes becomes resident, or is evicted: this amount is on the
        /// GPU now, which the driver charges to no process.
        Managed(u64),
        Look,
    }

    fn step() -> impl Strategy<Value = Step> {
        let (pid, bytes) = (1..5_u32, (0..64_u64).prop_map(|blocks| blocks * 2 * MIB));
        let of_process = || (pid.clone(), bytes.clone());
        prop_oneof![
            2 => of_process().prop_map(|(pid, bytes)| Step::Has(pid, bytes)),
            2 => of_process().prop_map(|(pid, bytes)| Step::Exports(pid, bytes)),
            1 => pid.clone().prop_map(Step::Dies),
            1 => bytes.clone().prop_map(Step::Parked),
            1 => of_process().prop_map(|(pid, bytes)| Step::Mapped(pid, bytes)),
            2 => (0..256_u64).prop_map(|chunks| Step::Managed(chunks * 2 * MIB)),
            24 => Just(Step::Look),
        ]
    }

    #[derive(Clone, Debug, Default)]
    struct Process {
        has: u64,
        exported: u64,
        /// The orphaned bytes that it maps, by exporter.
        mapped: BTreeMap<usize, u64>,
    }

    impl Process {
        fn listed(&self) -> u64 {
            self.has + self.mapped.values().sum::<u64>()
        }

        fn own(&self, pid: u32) -> OwnMemory {
            OwnMemory {
                allocation: AllocationId::from_bits(pid.into()),
                charged: Bytes(self.has + self.exported),
                exported: Bytes(self.exported),
                uncharged_margin: Bytes::mib(64),
            }
        }
    }

    /// The memory of a GPU.
    #[derive(Default)]
    struct Gpu {
        live: BTreeMap<u32, Process>,
        /// The bytes that only descriptors hold, by exited exporter.
        parked: Vec<u64>,
        managed: u64,
    }

    impl Gpu {
        fn pinned(&self) -> u64 {
            let of = |process: &Process| process.listed() + process.exported + 10 * MIB;
            self.live.values().map(of).sum::<u64>() + self.parked.iter().sum::<u64>()
        }

        fn sample(&self) -> GpuMemorySample {
            let listed = self.live.iter().map(|(pid, of)| (*pid, of.listed()));
            GpuMemorySample {
                capacity: Bytes(CAPACITY),
                ..sample_of(self.pinned() + self.managed, &listed.collect::<Vec<_>>())
            }
        }

        fn take(&mut self, step: Step) {
            match step {
                Step::Has(pid, bytes) => self.live.entry(pid).or_default().has = 518 * MIB + bytes,
                Step::Exports(pid, bytes) => {
                    let has_room = self.pinned() + bytes <= CAPACITY / 2;
                    if let Some(process) = self.live.get_mut(&pid).filter(|_| has_room) {
                        process.exported = bytes;
                    }
                }
                Step::Dies(pid) => {
                    let exported = self.live.remove(&pid).map(|process| process.exported);
                    self.parked.extend(exported);
                }
                Step::Parked(bytes) => {
                    for parked in &mut self.parked {
                        *parked = bytes.min(*parked);
                    }
                }
                Step::Mapped(pid, bytes) => {
                    if let Some(process) = self.live.get_mut(&pid) {
                        for (exporter, parked) in self.parked.iter_mut().enumerate() {
                            let moved = bytes.min(*parked);
                            *parked -= moved;
                            *process.mapped.entry(exporter).or_default() += moved;
                        }
                    }
                }
                Step::Managed(bytes) => self.managed = bytes,
                Step::Look => {}
            }
            self.managed = self.managed.min(CAPACITY - self.pinned());
        }

        /// Adds a sample, whose candidates are the exporters that have exited.
        fn look(&self, samples: &mut SampleWindow<usize>) {
            let own = self.live.iter();
            let own = own.map(|(pid, process)| (*pid, process.own(*pid)));
            samples.push(
                self.parked.len(),
                &self.sample(),
                &own.collect(),
                &BTreeMap::new(),
            );
        }

        /// The bytes that the first exited `exporters` have left and processes hold.
        fn held(&self, exporters: usize) -> u64 {
            let mapped = self.live.values().flat_map(|process| &process.mapped);
            let mapped = mapped.filter(|(exporter, _)| **exporter < exporters);
            let parked = self.parked.iter().take(exporters);
            parked.sum::<u64>() + mapped.map(|(_, bytes)| bytes).sum::<u64>()
        }
    }

    proptest! {
        /// Holders of orphaned exports only become fewer, as no process can start to hold them. The
        /// bound never falls below the bytes that the candidates left, but for noise, whatever
        /// managed memory comes and goes. It reaches zero once all holders have exited and the
        /// managed memory has left.
        #[test]
        fn bound_never_falls_below_orphaned_bytes_and_reaches_zero(steps in prop::collection::vec(step(), 0..200)) {
            let mut gpu = Gpu { parked: vec![256 * MIB], ..Gpu::default() };
            let mut samples = SampleWindow::default();
            for step in steps {
                let looks = matches!(step, Step::Look);
                gpu.take(step);
                if looks {
                    gpu.look(&mut samples);
                }
                if let Some((exporters, bound)) = samples.bound() {
                    // Each live process may have this margin beyond its charge, which may also hide
                    // bytes of others.
                    let besides = 64 * MIB * gpu.live.len() as u64;
                    let bound = bound.for_container(None).0;
                    prop_assert!(bound + NOISE_FLOOR + besides >= gpu.held(*exporters));
                }
            }
            gpu.parked.fill(0);
            gpu.live.values_mut().for_each(|process| process.mapped.clear());
            gpu.managed = 0;
            for _ in 0..WINDOW {
                gpu.look(&mut samples);
            }
            prop_assert_eq!(samples.bound().map(|(_, bound)| bound.for_container(None)), Some(Bytes::ZERO));
        }
    }
}
