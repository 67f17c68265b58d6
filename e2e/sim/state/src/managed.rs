//! Accounts for managed memory on a unit, as the driver's kernel module does
//! (docs/internals/benchmarks.md, "Resident managed memory").
//!
//! Managed memory is in use on a unit in chunks of 2 MiB and is charged to no process. The module
//! takes a batch of chunks at a time and keeps the free ones of the first time until the unit has
//! no context. All other memory displaces managed memory; managed memory displaces only its kind.
//! The chunks that were populated first leave first, whichever image they belong to.
//!
//! For each image and unit the table tells [`MAX_RUNS`](crate::table::MAX_RUNS) populations apart,
//! and those by the same image in a row are one. Beyond that the two that are nearest in time
//! merge, and the later one of them counts as old as the earlier one.
//!
//! Evicted memory takes host memory of its owner. The kernel kills an owner that has none left.

use crate::image::Charge;
use crate::sim::Sim;
use crate::table::{MAX_UNITS, RawManaged, RawRun, TableGuard};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bytes of a chunk.
pub const CHUNK: u64 = 2 << 20;

/// Chunks that became resident together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Population {
    /// The number of the chunks that found room.
    pub chunks: u64,
    /// The unit's number of the population, higher than those of earlier ones by other images.
    pub number: u64,
}

impl RawManaged {
    fn live_runs(&self) -> impl Iterator<Item = &RawRun> {
        self.runs.iter().filter(|run| run.bytes.load(Relaxed) > 0)
    }

    fn resident(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes.load(Relaxed)).sum()
    }

    /// Adds bytes as the unit's latest population. Returns its number.
    fn populate(&self, latest: &AtomicU64, bytes: u64) -> u64 {
        let number = latest.load(Relaxed);
        let mut live = self.live_runs();
        if let Some(run) = live.find(|run| run.number.load(Relaxed) == number) {
            run.bytes.fetch_add(bytes, Relaxed);
            return number;
        }
        let number = latest.fetch_add(1, Relaxed) + 1;
        let unused = self.runs.iter().find(|run| run.bytes.load(Relaxed) == 0);
        let run = unused.unwrap_or_else(|| self.merge_nearest());
        run.number.store(number, Relaxed);
        run.bytes.store(bytes, Relaxed);
        number
    }

    /// Merges the two runs that are nearest in time. Returns the one that is unused now.
    fn merge_nearest(&self) -> &RawRun {
        let mut runs = self.runs.each_ref();
        runs.sort_by_key(|run| run.number.load(Relaxed));
        let distance = |earlier: &RawRun, later: &RawRun| {
            later.number.load(Relaxed) - earlier.number.load(Relaxed)
        };
        let pairs = runs.windows(2).map(|pair| (pair[0], pair[1]));
        let nearest = pairs.min_by_key(|(earlier, later)| distance(earlier, later));
        let (earlier, later) = nearest.expect("there are two runs or more");
        earlier
            .bytes
            .fetch_add(later.bytes.swap(0, Relaxed), Relaxed);
        later
    }

    /// Frees one chunk for each number of a population.
    pub(crate) fn free(&self, populations: &[u64]) {
        for population in populations {
            // The run that a population was merged into has a lower number.
            let number = |run: &&RawRun| run.number.load(Relaxed);
            let runs = self.live_runs().filter(|run| number(run) <= *population);
            if let Some(run) = runs.max_by_key(number) {
                run.bytes.fetch_sub(CHUNK, Relaxed);
            }
        }
    }
}

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
            .map(|(_, image)| image.managed[unit].resident())
            .sum()
    }

    /// Whether the driver refuses the eviction of managed memory that it is about to make.
    pub(crate) fn refuses_eviction(&self, unit: usize) -> bool {
        let count = &self.raw().evictions_to_refuse;
        let left = count.load(Relaxed);
        let refuses = left > 0 && self.managed_bytes(unit) > 0;
        if refuses {
            count.store(left - 1, Relaxed);
        }
        refuses
    }

    /// Evicts managed memory of a unit until `bytes` more are free, none is left, or an owner is
    /// killed. Returns the evicted bytes.
    pub(crate) fn evict_managed(&self, sim: &Sim, unit: usize, bytes: u64) -> u64 {
        let cache = &self.raw().units[unit].managed_cache;
        let mut missing = bytes.saturating_sub(cache.swap(0, Relaxed));
        let mut evicted = 0;
        while missing > 0 {
            let runs = self.images().flat_map(|(slot, image)| {
                let runs = image.managed[unit].live_runs();
                runs.map(move |run| (slot, image, run))
            });
            let Some((slot, image, run)) = runs.min_by_key(|(_, _, run)| run.number.load(Relaxed))
            else {
                break;
            };
            let taken = missing.next_multiple_of(CHUNK).min(run.bytes.load(Relaxed));
            if taken > image.host_room.load(Relaxed) {
                kill(sim.pid_of(image, slot));
                break;
            }
            image.host_room.fetch_sub(taken, Relaxed);
            run.bytes.fetch_sub(taken, Relaxed);
            image.managed[unit].evicted.fetch_add(taken, Relaxed);
            evicted += taken;
            missing = missing.saturating_sub(taken);
        }
        evicted
    }

    /// Gives an image chunks of a unit, as many as find room. Returns them, and the bytes that were
    /// evicted for them.
    pub(crate) fn populate_managed(
        &self,
        sim: &Sim,
        unit: usize,
        managed: &RawManaged,
        chunks: u64,
    ) -> (Population, u64) {
        let row = &self.raw().units[unit];
        let wanted = chunks * CHUNK;
        if self.managed_bytes(unit) == 0 {
            let batch = sim.config.uvm_batch.saturating_mul(CHUNK);
            let batch = batch.min(self.free(sim, unit)) / CHUNK * CHUNK;
            row.managed_cache
                .store(batch.saturating_sub(wanted), Relaxed);
        }
        let (free, mut evicted) = (self.free(sim, unit), 0);
        if free < wanted {
            evicted = self.evict_managed(sim, unit, wanted - free);
        }
        let given = wanted.min(self.free(sim, unit)) / CHUNK * CHUNK;
        if given == 0 {
            return (Population::default(), evicted);
        }
        let population = Population {
            chunks: given / CHUNK,
            number: managed.populate(&row.populations, given),
        };
        (population, evicted)
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

/// Kills a process as the kernel does that has no memory left. One without a pid in this namespace
/// goes on.
fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0) {
        // SAFETY: the call takes two numbers.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::MAX_RUNS;
    use crate::{Image, MachineDir, SimError};
    use proptest::prelude::*;
    use std::sync::Arc;

    const GIB: u64 = 1 << 30;
    const CHUNKS: u64 = GIB / CHUNK;
    /// The first chunks that the module takes by default.
    const BATCH: u64 = 64 * CHUNK;

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

    fn populate(image: &Image, chunks: u64) -> u64 {
        image.populate_managed(0, chunks).chunks
    }

    /// Frees the latest chunks.
    fn free_latest(image: &Image, chunks: u64) {
        image.free_managed(0, |_| vec![u64::MAX; chunks as usize]);
    }

    #[test]
    fn device_memory_displaces_managed_memory() {
        let (_folder, sim) = machine("");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        assert_eq!(populate(&owner, CHUNKS), CHUNKS);
        assert_eq!(sim.used(0), GIB);
        assert!(allocate(&neighbour, 3 * GIB / 4));
        assert_eq!(owner.evicted_chunks(0), 3 * CHUNKS / 4);
        assert_eq!(sim.used(0), GIB);
        assert_eq!(
            populate(&owner, CHUNKS),
            CHUNKS / 4,
            "the rest stays on the host"
        );
        assert!(allocate(&neighbour, GIB / 4));
        assert!(!allocate(&neighbour, 1));
        assert_eq!(populate(&owner, 1), 0);
        assert!(!allocate(&owner, 1), "managed memory displaces none");
    }

    #[test]
    fn oldest_chunks_leave_first_whichever_image_has_them() {
        let (_folder, sim) = machine("");
        let (first, second, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        populate(&first, CHUNKS / 4);
        populate(&second, CHUNKS / 2);
        populate(&first, CHUNKS / 4);
        for expected in [(1, 0), (1, 1), (1, 2), (2, 2)] {
            assert!(allocate(&neighbour, GIB / 4));
            let evicted = (first.evicted_chunks(0), second.evicted_chunks(0));
            let quarter = CHUNKS / 4;
            assert_eq!((evicted.0 / quarter, evicted.1 / quarter), expected);
        }
    }

    /// Two images take turns for longer than the table tells populations apart.
    #[test]
    fn order_stays_nearly_right_when_runs_merge() {
        const TURNS: u64 = 6 * MAX_RUNS as u64;
        let (_folder, sim) = machine("uvm-batch = 0");
        let images = [
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        ];
        let neighbour = Image::register(&sim).unwrap();
        let mut numbers = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            for (image, numbers) in images.iter().zip(&mut numbers) {
                numbers.push(image.populate_managed(0, 1).number);
            }
        }
        assert!(allocate(&neighbour, GIB - 2 * TURNS * CHUNK));
        for evicted in 1..=TURNS {
            assert!(allocate(&neighbour, CHUNK));
            let [first, second] = images.each_ref().map(|image| image.evicted_chunks(0));
            assert_eq!(first + second, evicted);
            assert!(first.abs_diff(second) <= TURNS / 8, "{first} and {second}");
        }
        for (image, numbers) in images.iter().zip(numbers) {
            image.free_managed(0, |evicted| numbers[evicted as usize..].to_vec());
        }
        assert_eq!(sim.used(0), GIB - TURNS * CHUNK, "all others are free");
    }

    #[test]
    fn free_chunks_stay_in_use_until_the_last_context_ends() {
        let (_folder, sim) = machine("");
        let (owner, other) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        other.charge(0, Charge::Context, CHUNK).unwrap();
        populate(&owner, 1);
        assert_eq!(sim.used(0), CHUNK + BATCH);
        populate(&owner, 100);
        free_latest(&owner, 101);
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
        populate(&owner, CHUNKS / 2);
        assert!(!allocate(&neighbour, 3 * GIB / 4));
        drop(owner);
        assert!(allocate(&neighbour, 3 * GIB / 4));
    }

    #[test]
    fn refused_eviction_fails_the_allocation_that_needs_it() {
        let (_folder, sim) = machine("uvm-batch = 1");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        populate(&owner, 1);
        assert_eq!(sim.used(0), CHUNK, "a batch of one chunk");
        populate(&owner, CHUNKS - 1);
        sim.refuse_evictions(2);
        assert!(!allocate(&neighbour, GIB / 2));
        assert!(!allocate(&neighbour, GIB / 2));
        assert_eq!(owner.evicted_chunks(0), 0);
        assert!(allocate(&neighbour, GIB / 2));
        sim.refuse_evictions(1);
        drop(owner);
        assert!(allocate(&neighbour, GIB / 2), "without an eviction");
    }

    #[test]
    fn eviction_takes_its_time_within_the_call() {
        let (_folder, sim) = machine("uvm-delay = 400");
        let (owner, neighbour) = (
            Image::register(&sim).unwrap(),
            Image::register(&sim).unwrap(),
        );
        let time = |call: &dyn Fn()| {
            let start = std::time::Instant::now();
            call();
            start.elapsed().as_millis()
        };
        populate(&owner, CHUNKS);
        assert!(time(&|| assert!(allocate(&neighbour, GIB / 2))) >= 200);
        sim.set_eviction_delay(1_000);
        assert!(time(&|| assert!(allocate(&neighbour, GIB / 4))) >= 250);
    }

    #[test]
    fn owner_without_host_memory_is_killed_by_an_eviction() {
        let (_folder, sim) = machine("uvm-host-room = \"256Mi\"");
        // SAFETY: the child calls nothing that depends on another thread of its parent.
        let owner = unsafe { libc::fork() };
        if owner == 0 {
            let image = Image::register(&sim).unwrap();
            populate(&image, CHUNKS);
            std::thread::sleep(std::time::Duration::from_secs(60));
            // SAFETY: ends the child without the parent's cleanup.
            unsafe { libc::_exit(0) };
        }
        while sim.used(0) < GIB {
            std::thread::yield_now();
        }
        let neighbour = Image::register(&sim).unwrap();
        assert!(allocate(&neighbour, GIB / 4), "the room suffices");
        assert!(!allocate(&neighbour, GIB / 4));
        let mut status = 0;
        // SAFETY: waits for this process's own child, and `status` lives through the call.
        assert_eq!(unsafe { libc::waitpid(owner, &mut status, 0) }, owner);
        assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
        assert!(allocate(&neighbour, 3 * GIB / 4), "its memory is free");
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
                populate(&owner, 64);
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

    fn step(most_bytes: u64) -> impl Strategy<Value = Step> {
        let most_chunks = most_bytes / CHUNK;
        prop_oneof![
            3 => (0..most_bytes).prop_map(Step::Allocate),
            1 => Just(Step::FreeAll),
            4 => (0..2 * most_chunks).prop_map(Step::Populate),
            1 => (0..most_chunks).prop_map(Step::FreeManaged),
            1 => Just(Step::Die),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is populated, evicted and freed, and whichever image ends, device memory is
        /// refused only for lack of room beside other device memory. None is lost, and the unit is
        /// never more than full.
        #[test]
        fn managed_memory_never_counts_as_free_or_refuses(
            steps in prop::collection::vec((0..3_usize, step(GIB)), 0..60),
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
                        prop_assert!(populate(&images[place], chunks) <= chunks);
                    }
                    Step::FreeManaged(chunks) => free_latest(&images[place], chunks),
                    Step::Die => {
                        images[place] = Image::register(&sim).unwrap();
                        charged[place] = 0;
                    }
                }
                let held = charged.iter().sum::<u64>();
                prop_assert!((held..=GIB).contains(&sim.used(0)), "{} of {held}", sim.used(0));
            }
        }

        /// Whatever is allocated, populated and freed, and whichever image ends: each eviction
        /// takes the chunks that were populated first.
        #[test]
        fn eviction_takes_the_oldest_chunks_in_any_history(
            steps in prop::collection::vec((0..3_usize, step(GIB / 16)), 0..200),
        ) {
            let (_folder, sim) = machine("");
            let mut images: Vec<Image> = (0..3).map(|_| Image::register(&sim).unwrap()).collect();
            let mut charged = [0_u64; 3];
            // The image and population of each resident chunk, the oldest first.
            let mut chunks: Vec<(usize, u64)> = Vec::new();
            for (place, step) in steps {
                let before: Vec<u64> = images.iter().map(|image| image.evicted_chunks(0)).collect();
                let mut population = Population::default();
                match step {
                    Step::Allocate(bytes) => {
                        charged[place] += if allocate(&images[place], bytes) { bytes } else { 0 };
                    }
                    Step::FreeAll => {
                        images[place].release(0, Charge::Memory, charged[place]).unwrap();
                        charged[place] = 0;
                    }
                    Step::Populate(wanted) => {
                        let mut own = chunks.clone();
                        own.retain(|(image, _)| *image == place);
                        own.dedup();
                        // The order is exact until runs merge.
                        if own.len() < MAX_RUNS {
                            population = images[place].populate_managed(0, wanted);
                        }
                    }
                    Step::FreeManaged(kept) => {
                        let mut freed = Vec::new();
                        let mut own = 0;
                        chunks.retain(|(image, number)| {
                            own += u64::from(*image == place);
                            let stays = *image != place || own % (kept % 7 + 1) != 0;
                            freed.extend((!stays).then_some(*number));
                            stays
                        });
                        images[place].free_managed(0, |_| freed);
                    }
                    Step::Die => {
                        images[place] = Image::register(&sim).unwrap();
                        charged[place] = 0;
                        chunks.retain(|(image, _)| *image != place);
                        continue;
                    }
                }
                let after = images.iter().map(|image| image.evicted_chunks(0));
                let evicted = after.zip(before).map(|(after, before)| after - before);
                let evicted: Vec<u64> = evicted.collect();
                let total = evicted.iter().sum::<u64>() as usize;
                prop_assert!(total <= chunks.len());
                let mut expected = [0; 3];
                for (image, _) in chunks.drain(..total) {
                    expected[image] += 1;
                }
                prop_assert_eq!(evicted, expected);
                chunks.extend((0..population.chunks).map(|_| (place, population.number)));
                let resident = chunks.len() as u64 * CHUNK;
                prop_assert!(sim.used(0) >= resident + charged.iter().sum::<u64>());
            }
        }
    }
}
