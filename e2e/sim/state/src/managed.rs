//! Accounts for managed memory on a unit, as the driver's kernel module does
//! (docs/benchmarks.md, "Resident managed memory").
//!
//! Managed memory is in use on a unit in chunks of 2 MiB and is charged to no process. The module
//! takes 64 chunks at a time and keeps the free ones of the first time until the unit has no
//! context. All other memory displaces managed memory; managed memory displaces only its kind. The
//! image that has had managed memory on the unit for longest loses its own first.

use crate::image::Charge;
use crate::sim::Sim;
use crate::table::{MAX_UNITS, RawManaged, TableGuard};
use std::sync::atomic::Ordering::Relaxed;

/// The bytes of a chunk.
pub const CHUNK: u64 = 2 << 20;

/// The bytes that the module takes at a time.
const BATCH: u64 = 64 * CHUNK;

impl TableGuard<'_> {
    /// The bytes of a unit that are neither charged nor managed memory.
    pub(crate) fn free(&self, sim: &Sim, unit: usize) -> u64 {
        let used = self.raw().units[unit].used.load(Relaxed);
        let taken = used + self.managed_bytes(unit);
        sim.units[unit].total.saturating_sub(taken)
    }

    /// The bytes of a unit with managed memory, and those that are kept for it.
    pub(crate) fn managed_bytes(&self, unit: usize) -> u64 {
        self.raw().units[unit].managed_cache.load(Relaxed) + self.resident(unit)
    }

    fn resident(&self, unit: usize) -> u64 {
        let images = self.images();
        images
            .map(|(_, image)| image.managed[unit].resident.load(Relaxed))
            .sum()
    }

    /// Evicts managed memory of a unit until `bytes` more are free, or none is left.
    pub(crate) fn evict_managed(&self, unit: usize, bytes: u64) {
        let cache = &self.raw().units[unit].managed_cache;
        let mut missing = bytes.saturating_sub(cache.swap(0, Relaxed));
        let mut images: Vec<&RawManaged> = self
            .images()
            .map(|(_, image)| &image.managed[unit])
            .filter(|managed| managed.resident.load(Relaxed) > 0)
            .collect();
        images.sort_by_key(|managed| managed.since.load(Relaxed));
        for managed in images {
            let most = missing.next_multiple_of(CHUNK);
            let taken = most.min(managed.resident.load(Relaxed));
            managed.resident.fetch_sub(taken, Relaxed);
            managed.evicted.fetch_add(taken, Relaxed);
            missing = missing.saturating_sub(taken);
        }
    }

    /// Gives an image chunks of a unit, as many as find room. Returns their number.
    pub(crate) fn populate_managed(
        &self,
        sim: &Sim,
        unit: usize,
        managed: &RawManaged,
        chunks: u64,
    ) -> u64 {
        let row = &self.raw().units[unit];
        let wanted = chunks * CHUNK;
        if self.managed_bytes(unit) == 0 {
            let batch = BATCH.min(self.free(sim, unit)) / CHUNK * CHUNK;
            row.managed_cache
                .store(batch.saturating_sub(wanted), Relaxed);
        }
        let free = self.free(sim, unit);
        if free < wanted {
            self.evict_managed(unit, wanted - free);
        }
        let given = wanted.min(self.free(sim, unit)) / CHUNK * CHUNK;
        if given > 0 && managed.resident.fetch_add(given, Relaxed) == 0 {
            let number = row.populations.fetch_add(1, Relaxed) + 1;
            managed.since.store(number, Relaxed);
        }
        given / CHUNK
    }

    /// Frees chunks of an image.
    pub(crate) fn free_managed(&self, managed: &RawManaged, chunks: u64) {
        let freed = (chunks * CHUNK).min(managed.resident.load(Relaxed));
        managed.resident.fetch_sub(freed, Relaxed);
    }

    /// Frees what is kept for managed memory on units where no image has a context.
    pub(crate) fn drop_unused_caches(&self) {
        let mut is_in_use = [false; MAX_UNITS];
        for (_, image) in self.images() {
            for (in_use, charges) in is_in_use.iter_mut().zip(&image.charges) {
                *in_use |= charges[Charge::Context as usize].load(Relaxed) > 0;
            }
        }
        for (unit, in_use) in self.raw().units.iter().zip(is_in_use) {
            if !in_use {
                unit.managed_cache.store(0, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Image, MachineDir, SimError};
    use proptest::prelude::*;
    use std::sync::Arc;

    const GIB: u64 = 1 << 30;
    const CHUNKS: u64 = GIB / CHUNK;

    /// A machine with one GPU of 1 GiB, whose contexts take nothing.
    fn machine(more: &str) -> (tempfile::TempDir, Arc<Sim>) {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("given.toml");
        let gpu = "[[gpu]]\nname = \"g\"\nuuid = \"GPU-00000000-0000-0000-0000-000000000001\"\n\
                   memory = \"1Gi\"\nminor = 0\n";
        std::fs::write(&config, format!("{more}\n{gpu}")).unwrap();
        let machine = MachineDir::at(folder.path().join("sim"));
        machine.init(&config, &[]).unwrap();
        let sim = Arc::new(Sim::open(&folder.path().join("sim")).unwrap());
        (folder, sim)
    }

    fn allocate(image: &Image, bytes: u64) -> bool {
        match image.charge(0, Charge::Memory, bytes) {
            Ok(()) => true,
            Err(SimError::OutOfMemory { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn device_memory_displaces_managed_memory() {
        let (_folder, sim) = machine("");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        assert_eq!(owner.populate_managed(0, CHUNKS), CHUNKS);
        assert_eq!(sim.used(0), GIB);
        assert!(allocate(&neighbour, 3 * GIB / 4));
        assert_eq!(owner.evicted_chunks(0), 3 * CHUNKS / 4);
        assert_eq!(sim.used(0), GIB);
        assert_eq!(
            owner.populate_managed(0, CHUNKS),
            CHUNKS / 4,
            "the rest stays on the host"
        );
        assert!(allocate(&neighbour, GIB / 4));
        assert!(!allocate(&neighbour, 1));
        assert_eq!(owner.populate_managed(0, 1), 0);
        assert!(!allocate(&owner, 1), "managed memory displaces none");
    }

    #[test]
    fn oldest_owner_loses_its_memory_first() {
        let (_folder, sim) = machine("");
        let (old, new) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        old.populate_managed(0, CHUNKS / 2);
        new.populate_managed(0, CHUNKS / 2);
        assert!(allocate(&new, GIB / 2));
        assert_eq!(
            (old.evicted_chunks(0), new.evicted_chunks(0)),
            (CHUNKS / 2, 0)
        );
    }

    #[test]
    fn free_chunks_stay_in_use_until_the_last_context_ends() {
        let (_folder, sim) = machine("");
        let (owner, other) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        other.charge(0, Charge::Context, CHUNK).unwrap();
        owner.populate_managed(0, 1);
        assert_eq!(sim.used(0), CHUNK + BATCH);
        owner.populate_managed(0, 100);
        owner.free_managed(0, 101);
        assert_eq!(sim.used(0), CHUNK + BATCH - CHUNK);
        drop(owner);
        assert_eq!(sim.used(0), CHUNK + BATCH - CHUNK);
        other.release(0, Charge::Context, CHUNK).unwrap();
        assert_eq!(sim.used(0), 0);
    }

    #[test]
    fn pinned_managed_memory_refuses_a_neighbour() {
        let (_folder, sim) = machine("uvm-oversubscription = false");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        owner.populate_managed(0, CHUNKS / 2);
        assert!(!allocate(&neighbour, 3 * GIB / 4));
        drop(owner);
        assert!(allocate(&neighbour, 3 * GIB / 4));
    }

    /// A program with more managed memory than the GPU beside one that allocates its whole quota.
    #[test]
    fn neighbour_is_never_refused_beside_managed_memory() {
        let (_folder, sim) = machine("");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        assert!(allocate(&owner, GIB / 16));
        let quota = GIB - GIB / 16;
        for round in 0..1_000 {
            for _ in 0..16 {
                owner.populate_managed(0, 64);
            }
            assert_eq!(sim.used(0), GIB, "{round}: the GPU is full");
            assert!(allocate(&neighbour, quota), "{round}: refused");
            neighbour.release(0, Charge::Memory, quota).unwrap();
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Allocate(u64),
        FreeAll,
        Populate(u64),
        FreeManaged(u64),
        Die,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..GIB).prop_map(Step::Allocate),
            1 => Just(Step::FreeAll),
            4 => (0..2 * CHUNKS).prop_map(Step::Populate),
            1 => (0..CHUNKS).prop_map(Step::FreeManaged),
            1 => Just(Step::Die),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is populated, evicted and freed, and whichever image ends: device memory is
        /// refused only for lack of room beside other device memory, none is lost, and the unit is
        /// never more than full.
        #[test]
        fn managed_memory_never_counts_as_free_or_refuses(
            steps in prop::collection::vec((0..3_usize, step()), 0..60),
        ) {
            let (_folder, sim) = machine("");
            let mut images: Vec<Image> = (0..3).map(|_| Image::register(&sim).unwrap()).collect();
            let mut charged = [0_u64; 3];
            for (place, step) in steps {
                match step {
                    Step::Allocate(bytes) => {
                        let fits = charged.iter().sum::<u64>() + bytes <= GIB;
                        prop_assert_eq!(allocate(&images[place], bytes), fits);
                        charged[place] += if fits { bytes } else { 0 };
                    }
                    Step::FreeAll => {
                        images[place].release(0, Charge::Memory, charged[place]).unwrap();
                        charged[place] = 0;
                    }
                    Step::Populate(chunks) => {
                        prop_assert!(images[place].populate_managed(0, chunks) <= chunks);
                    }
                    Step::FreeManaged(chunks) => images[place].free_managed(0, chunks),
                    Step::Die => {
                        images[place] = Image::register(&sim).unwrap();
                        charged[place] = 0;
                    }
                }
                let held = charged.iter().sum::<u64>();
                prop_assert!((held..=GIB).contains(&sim.used(0)), "{} of {held}", sim.used(0));
            }
        }
    }
}
