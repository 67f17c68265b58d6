//! Compares random histories with a model of all byte ranges, and runs threads against each other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};

use proptest::prelude::*;

use super::credit::LOW_CREDIT_DRAWS;
use super::*;
use crate::pool::tlsf::GRANULE;
use crate::resource::BudgetSnapshot;

const MIB: u64 = 1 << 20;

/// A request of 1 MiB.
const ONE: Request = Request {
    bytes: MIB,
    align: 1,
};

/// Creates shards with one slab and a limit for live bytes.
fn shards(limit: u64, slab: u64) -> Shards {
    let shards = Shards::new(limit);
    shards
        .add_region(0, GRANULE, slab, StreamDeps::NONE)
        .expect("it can be added");
    shards
}

#[derive(Clone, Debug)]
enum Step {
    Take { slot: usize, request: Request },
    Free { which: usize },
    ReturnChunks,
    AddSlab { mib: u64 },
    RemoveSlab { which: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![3 => 1..=64 * 1024u64, 3 => 1..=4 * MIB, 2 => 1..=48 * MIB];
    let align = prop_oneof![6 => Just(1), 1 => (8..22u32).prop_map(|power| 1 << power)];
    let step = prop_oneof![
        12 => (0..6usize, bytes, align)
            .prop_map(|(slot, bytes, align)| Step::Take { slot, request: Request { bytes, align } }),
        10 => any::<usize>().prop_map(|which| Step::Free { which }),
        1 => Just(Step::ReturnChunks),
        1 => (1..=96u64).prop_map(|mib| Step::AddSlab { mib }),
        1 => any::<usize>().prop_map(|which| Step::RemoveSlab { which }),
    ];
    proptest::collection::vec(step, 1..300)
}

#[derive(Default)]
struct Model {
    slabs: Vec<(EmptyRegion, u64, u64)>,
    added: u32,
    end: u64,
    live: BTreeMap<u64, (BlockHandle, u64)>,
}

impl Model {
    fn gaps(&self) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        for &(_, start, bytes) in &self.slabs {
            let mut at = start;
            for (&address, &(_, size)) in self.live.range(start..start + bytes) {
                gaps.push((at, address - at));
                at = address + size;
            }
            gaps.push((at, start + bytes - at));
        }
        gaps
    }

    fn fits(&self, request: Request) -> bool {
        let align = request.align.max(GRANULE);
        let bytes = request.bytes.next_multiple_of(GRANULE);
        self.gaps()
            .iter()
            .any(|&(at, gap)| at.next_multiple_of(align) - at + bytes <= gap)
    }
}

fn run_history(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (shards, mut model) = (Shards::new(u64::MAX), Model::default());
    model.end = GRANULE;
    for step in steps {
        match step {
            Step::AddSlab { mib } => {
                let whole = shards.add_region(model.added, model.end, mib * MIB, StreamDeps::NONE);
                model
                    .slabs
                    .push((whole.expect("a slab can be added"), model.end, mib * MIB));
                model.added += 1;
                model.end += mib * MIB;
            }
            Step::Take { slot, request } => {
                let fits = model.fits(request);
                let allocation = shards
                    .try_allocate(slot, request)
                    .or_else(|| shards.allocate_with_draw(slot, request));
                prop_assert!(fits || allocation.is_none());
                let allocation = allocation.or_else(|| shards.allocate_anywhere(request));
                // The model ignores chunks, and counts the slack of each block as free.
                prop_assert_eq!(allocation.is_some(), fits, "{:?}", request);
                let Some(allocation) = allocation else {
                    continue;
                };
                prop_assert_eq!(allocation.address % request.align.max(GRANULE), 0);
                let bytes = shards.bytes_of(allocation.handle);
                let inside = model.gaps().into_iter().any(|(at, gap)| {
                    at <= allocation.address && allocation.address + bytes <= at + gap
                });
                prop_assert!(inside, "{:?} overlaps", allocation);
                model
                    .live
                    .insert(allocation.address, (allocation.handle, bytes));
            }
            Step::Free { which } => {
                let Some(nth) = which.checked_rem(model.live.len()) else {
                    continue;
                };
                let (&at, &(handle, _)) = model.live.iter().nth(nth).expect("it has as many");
                prop_assert!(shards.free(handle, StreamDeps::NONE, |all| all).is_ok());
                prop_assert!(shards.free(handle, StreamDeps::NONE, |all| all).is_err());
                model.live.remove(&at);
            }
            Step::ReturnChunks => shards.return_chunks(),
            Step::RemoveSlab { which } => {
                let Some(nth) = which.checked_rem(model.slabs.len()) else {
                    continue;
                };
                let (whole, start, bytes) = model.slabs[nth];
                shards.return_chunks();
                let free = model.live.range(start..start + bytes).next().is_none();
                prop_assert_eq!(shards.remove_region(whole).is_some(), free);
                if free {
                    model.slabs.remove(nth);
                }
            }
        }
        let totals = shards.totals();
        prop_assert_eq!(totals.blocks, model.live.len() as u64);
        prop_assert_eq!(
            totals.live,
            model.live.values().map(|&(_, bytes)| bytes).sum::<u64>()
        );
        prop_assert_eq!(
            totals.free,
            model.gaps().iter().map(|&(_, gap)| gap).sum::<u64>()
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn request_fails_only_when_no_free_range_fits(steps in steps()) {
        run_history(steps)?;
    }
}

impl Shards {
    /// Allocates from any heap, as a pool does that cannot grow.
    fn allocate_anywhere(&self, request: Request) -> Option<Allocation> {
        self.charge(request.bytes).ok()?;
        let allocation = self.allocate_any(request);
        if allocation.is_none() {
            self.uncharge(request.bytes);
        }
        allocation
    }

    fn bytes_of(&self, handle: BlockHandle) -> u64 {
        self.shards[handle.shard as usize]
            .state
            .lock()
            .heap
            .bytes_of(handle.id)
    }
}

/// Cheaper than `rand`: the threads must contend in the shards, not in their random numbers.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn eight_threads_never_share_or_lose_a_byte() {
    const BYTES: u64 = 256 * MIB;
    let shards = shards(u64::MAX, BYTES);
    let owners: Vec<AtomicU8> = (0..BYTES / GRANULE).map(|_| AtomicU8::new(0)).collect();
    let owners = |address: u64, bytes: u64| {
        let first = (address / GRANULE - 1) as usize;
        &owners[first..first + bytes.div_ceil(GRANULE) as usize]
    };
    std::thread::scope(|scope| {
        for thread in 1..=8u8 {
            let (shards, owners) = (&shards, &owners);
            scope.spawn(move || {
                let mut state = 0x9e37_79b9_7f4a_7c15 ^ u64::from(thread);
                let mut live: Vec<(Allocation, u64)> = Vec::new();
                let release = |(allocation, bytes): (Allocation, u64)| {
                    for owner in owners(allocation.address, bytes) {
                        assert_eq!(owner.swap(0, Ordering::Relaxed), thread);
                    }
                    shards
                        .free(allocation.handle, StreamDeps::NONE, |all| all)
                        .expect("it is live");
                };
                for _ in 0..1_000_000 {
                    let draw = next(&mut state);
                    if live.len() > 40 || (draw & 3 == 0 && !live.is_empty()) {
                        release(live.swap_remove((draw >> 8) as usize % live.len()));
                        continue;
                    }
                    let bytes = 1 + (draw >> 8) % (1 << (8 + (draw >> 3) % 12));
                    let request = Request { bytes, align: 1 };
                    // The threads share two slots, so that both thread and stream select the shard.
                    let slot = usize::from(thread % 2);
                    let allocation = shards
                        .try_allocate(slot, request)
                        .or_else(|| shards.allocate_with_draw(slot, request))
                        .or_else(|| shards.allocate_anywhere(request));
                    let allocation = allocation
                        .expect("8 x 40 blocks of half a MiB at most are less than there is");
                    for owner in owners(allocation.address, bytes) {
                        assert_eq!(owner.swap(thread, Ordering::Relaxed), 0);
                    }
                    live.push((allocation, bytes));
                }
                live.drain(..).for_each(release);
            });
        }
    });
    let all = shards.allocate_anywhere(Request {
        bytes: BYTES,
        align: 1,
    });
    assert!(
        all.is_some(),
        "the heap is whole again: {:?}",
        shards.totals()
    );
}

#[test]
fn eight_threads_fill_the_limit_to_the_last_byte() {
    const EACH: u64 = 1000;
    const LIMIT: u64 = 801 * EACH - 1;
    let shards = shards(LIMIT, 64 * MIB);
    let request = Request {
        bytes: EACH,
        align: 1,
    };
    for slot in 0..4 {
        let taken: Vec<Vec<Allocation>> = std::thread::scope(|scope| {
            let fill = || {
                let take = || {
                    shards
                        .try_allocate(slot, request)
                        .or_else(|| shards.allocate_with_draw(slot, request))
                        .or_else(|| shards.allocate_anywhere(request))
                };
                std::iter::from_fn(take).collect()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(fill)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("it ends"))
                .collect()
        });
        let taken: Vec<_> = taken.into_iter().flatten().collect();
        assert_eq!(taken.len(), 800);
        assert_eq!(
            shards.budget(),
            BudgetSnapshot {
                limit: LIMIT,
                used: 800 * EACH
            }
        );
        for allocation in taken {
            shards
                .free(allocation.handle, StreamDeps::NONE, |all| all)
                .expect("it is live");
        }
    }
    assert_eq!(shards.budget().used, 0);
}

#[test]
fn drawn_credit_obeys_a_lowered_limit() {
    let shards = shards(64 * MIB, 64 * MIB);
    let first = shards.allocate_with_draw(0, ONE).expect("it fits");
    shards.set_limit(MIB);
    assert!(
        shards
            .try_allocate(0, ONE)
            .or_else(|| shards.allocate_anywhere(ONE))
            .is_none()
    );
    shards.set_limit(2 * MIB);
    let second = shards
        .try_allocate(0, ONE)
        .or_else(|| shards.allocate_anywhere(ONE))
        .expect("it fits");
    for allocation in [first, second] {
        shards
            .free(allocation.handle, StreamDeps::NONE, |all| all)
            .expect("it is live");
    }
}

#[test]
fn freed_bytes_above_a_lowered_limit_are_not_reused() {
    let shards = shards(10 * MIB, 64 * MIB);
    let take = || {
        shards
            .try_allocate(0, ONE)
            .or_else(|| shards.allocate_with_draw(0, ONE))
            .or_else(|| shards.allocate_anywhere(ONE))
    };
    let free = |allocation: Allocation| {
        shards
            .free(allocation.handle, StreamDeps::NONE, |all| all)
            .expect("it is live");
    };
    let mut live: Vec<_> = std::iter::from_fn(take).collect();
    assert_eq!(live.len(), 10);
    shards.set_limit(5 * MIB);
    for _ in 0..5 {
        live.pop().into_iter().for_each(free);
        assert!(take().is_none(), "{:?}", shards.budget());
    }
    for _ in 0..3 {
        live.pop().into_iter().for_each(free);
        live.push(take().expect("it is within the limit"));
        assert!(take().is_none(), "{:?}", shards.budget());
    }
}

#[test]
fn shard_gets_the_idle_credit_of_another() {
    let shards = shards(8 * MIB, 64 * MIB);
    let request = |bytes| Request { bytes, align: 1 };
    let take = |slot, bytes| {
        shards
            .allocate_with_draw(slot, request(bytes))
            .or_else(|| shards.allocate_anywhere(request(bytes)))
    };
    let blocks: Vec<_> = (0..8).filter_map(|slot| take(slot, MIB)).collect();
    assert_eq!(blocks.len(), 8);
    for block in blocks {
        shards
            .free(block.handle, StreamDeps::NONE, |all| all)
            .expect("it is live");
    }
    assert!(take(9, 8 * MIB + 1).is_none());
    assert!(take(9, 8 * MIB).is_some(), "it is idle in eight parts");
    assert!(take(1, 1).is_none());
}

/// Fills a limit of 8 MiB with one block in each of eight shards. `turn` says whether other shards
/// had to give credit.
fn shards_at_the_limit() -> (Shards, Vec<Allocation>) {
    let shards = shards(8 * MIB, 64 * MIB);
    let blocks = (0..8)
        .map(|slot| allocate_in_turn(&shards, slot).0)
        .collect();
    (shards, blocks)
}

fn allocate_in_turn(shards: &Shards, slot: usize) -> (Allocation, bool) {
    let taken = shards
        .try_allocate(slot, ONE)
        .or_else(|| shards.allocate_with_draw(slot, ONE));
    let asked = taken.is_none();
    let allocation = taken.or_else(|| shards.allocate_anywhere(ONE));
    (allocation.expect("it is within the limit"), asked)
}

fn free(shards: &Shards, allocation: Allocation) {
    shards
        .free(allocation.handle, StreamDeps::NONE, |all| all)
        .expect("it is live");
}

#[test]
fn shards_alternating_at_the_limit_collect_credit_once() {
    let (shards, mut blocks) = shards_at_the_limit();
    let mut asked = 0;
    for at in 0..1000 {
        free(&shards, blocks.remove(at % 8));
        let (allocation, others) = allocate_in_turn(&shards, at * 3);
        asked += usize::from(others);
        blocks.push(allocation);
    }
    assert!(asked <= 1, "{asked} of 1000");
}

#[test]
fn shard_keeps_credit_again_when_plenty_is_left() {
    let (shards, mut blocks) = shards_at_the_limit();
    free(&shards, blocks.remove(0));
    blocks.push(allocate_in_turn(&shards, 1).0);
    for allocation in blocks {
        free(&shards, allocation);
    }
    let scarce = || shards.low_credit.load(Ordering::Relaxed);
    assert!(scarce());
    let kept = allocate_in_turn(&shards, 2).0;
    free(&shards, kept);
    assert!(!scarce());
    assert!(shards.account.0.snapshot().used >= MIB);
}

#[test]
fn single_shard_at_the_limit_leaves_low_credit_mode() {
    let (shards, mut blocks) = shards_at_the_limit();
    free(&shards, blocks.remove(0));
    for _ in 0..=LOW_CREDIT_DRAWS {
        let allocation = allocate_in_turn(&shards, 1).0;
        free(&shards, allocation);
    }
    assert!(shards.try_allocate(1, ONE).is_some(), "the part has credit");
}

#[test]
fn credit_freed_during_a_collection_is_found() {
    let shards = shards(2 * MIB, 64 * MIB);
    let (first, idle) = (
        &shards.shards[shard_index(0, 0)],
        &shards.shards[shard_index(5, 0)],
    );
    shards.account.0.charge(MIB).expect("nothing is live");
    idle.set_credit(&mut idle.state.lock(), MIB);
    let live = shards.allocate_with_draw(7, ONE).expect("it fits");
    let held = first.state.lock();
    std::thread::scope(|scope| {
        let charged = scope.spawn(|| shards.charge(MIB));
        while !shards.low_credit.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        // The thread waits for the first shard now. At no time is more than half of the limit live.
        std::thread::sleep(std::time::Duration::from_millis(50));
        free(&shards, live);
        assert!(shards.allocate_with_draw(5, ONE).is_some(), "it has credit");
        drop(held);
        assert_eq!(charged.join().expect("it ends"), Ok(()));
    });
}

#[test]
fn thread_changes_its_shard_after_repeated_contention() {
    let shards = shards(u64::MAX, 64 * MIB);
    let (_, held) = shards.lock_shard(0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // Only `try_lock`, so the loop waits for no thread.
            let moved = (0..1000).any(|_| {
                assert!(shards.try_allocate(0, ONE).is_none());
                shard_index(0, shard_affinity::shard_offset()) != shard_index(0, 0)
            });
            assert!(moved);
            shards
                .allocate_with_draw(0, ONE)
                .map(|allocation| allocation.handle.shard)
        });
        let shard = other.join().expect("it ends");
        assert!(shard.is_some_and(|shard| shard as usize != shard_index(0, 0)));
    });
    drop(held);
}
