//! Histories over many shards against a model that keeps every byte range, and threads against one another.

use super::*;
use crate::pool::tlsf::GRANULE;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};

const MIB: u64 = 1 << 20;

/// A request of 1 MiB.
const ONE: Request = Request {
    bytes: MIB,
    align: 1,
};

/// With one slab, and a limit for live bytes.
fn arena(limit: u64, slab: u64) -> Arena {
    let arena = Arena::new(limit);
    arena
        .add(0, GRANULE, slab, After::NOTHING)
        .expect("it can be added");
    arena
}

#[derive(Clone, Debug)]
enum Step {
    Take { lane: usize, request: Request },
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
            .prop_map(|(lane, bytes, align)| Step::Take { lane, request: Request { bytes, align } }),
        10 => any::<usize>().prop_map(|which| Step::Free { which }),
        1 => Just(Step::ReturnChunks),
        1 => (1..=96u64).prop_map(|mib| Step::AddSlab { mib }),
        1 => any::<usize>().prop_map(|which| Step::RemoveSlab { which }),
    ];
    proptest::collection::vec(step, 1..300)
}

#[derive(Default)]
struct Model {
    slabs: Vec<(Whole, u64, u64)>,
    added: u32,
    end: u64,
    live: BTreeMap<u64, (Place, u64)>,
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

fn play(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (arena, mut model) = (Arena::new(u64::MAX), Model::default());
    model.end = GRANULE;
    for step in steps {
        match step {
            Step::AddSlab { mib } => {
                let whole = arena.add(model.added, model.end, mib * MIB, After::NOTHING);
                model
                    .slabs
                    .push((whole.expect("a slab can be added"), model.end, mib * MIB));
                model.added += 1;
                model.end += mib * MIB;
            }
            Step::Take { lane, request } => {
                let fits = model.fits(request);
                let placed = arena
                    .take(lane, request)
                    .or_else(|| arena.take_drawing(lane, request));
                prop_assert!(fits || placed.is_none());
                let placed = placed.or_else(|| arena.anywhere(request));
                // The gaps of the model know nothing of chunks, and each block's crumb is still in them.
                prop_assert_eq!(placed.is_some(), fits, "{:?}", request);
                let Some(placed) = placed else { continue };
                prop_assert_eq!(placed.address % request.align.max(GRANULE), 0);
                let bytes = arena.bytes_of(placed.place);
                let inside = model
                    .gaps()
                    .into_iter()
                    .any(|(at, gap)| at <= placed.address && placed.address + bytes <= at + gap);
                prop_assert!(inside, "{:?} overlaps", placed);
                model.live.insert(placed.address, (placed.place, bytes));
            }
            Step::Free { which } => {
                let Some(nth) = which.checked_rem(model.live.len()) else {
                    continue;
                };
                let (&at, &(place, _)) = model.live.iter().nth(nth).expect("it has as many");
                prop_assert!(arena.free(place, After::NOTHING, |all| all).is_ok());
                prop_assert!(arena.free(place, After::NOTHING, |all| all).is_err());
                model.live.remove(&at);
            }
            Step::ReturnChunks => arena.return_chunks(),
            Step::RemoveSlab { which } => {
                let Some(nth) = which.checked_rem(model.slabs.len()) else {
                    continue;
                };
                let (whole, start, bytes) = model.slabs[nth];
                arena.return_chunks();
                let free = model.live.range(start..start + bytes).next().is_none();
                prop_assert_eq!(arena.remove(whole).is_some(), free);
                if free {
                    model.slabs.remove(nth);
                }
            }
        }
        let totals = arena.totals();
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
    fn a_request_is_refused_only_where_no_free_range_is_large_enough(steps in steps()) {
        play(steps)?;
    }
}

impl Arena {
    /// As a pool does that cannot grow.
    fn anywhere(&self, request: Request) -> Option<Placed> {
        self.charge(request.bytes).ok()?;
        let placed = self.take_anywhere(request);
        if placed.is_none() {
            self.discharge(request.bytes);
        }
        placed
    }

    fn bytes_of(&self, place: Place) -> u64 {
        self.parts[place.part as usize]
            .share
            .lock()
            .heap
            .bytes_of(place.id)
    }
}

/// As `rand` would, without its cost: a test's threads must meet in the arena, not in their numbers.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn eight_threads_never_get_one_byte_twice_and_lose_none() {
    const BYTES: u64 = 256 * MIB;
    let arena = arena(u64::MAX, BYTES);
    let owners: Vec<AtomicU8> = (0..BYTES / GRANULE).map(|_| AtomicU8::new(0)).collect();
    let owners = |address: u64, bytes: u64| {
        let first = (address / GRANULE - 1) as usize;
        &owners[first..first + bytes.div_ceil(GRANULE) as usize]
    };
    std::thread::scope(|scope| {
        for thread in 1..=8u8 {
            let (arena, owners) = (&arena, &owners);
            scope.spawn(move || {
                let mut state = 0x9e37_79b9_7f4a_7c15 ^ u64::from(thread);
                let mut live: Vec<(Placed, u64)> = Vec::new();
                let release = |(placed, bytes): (Placed, u64)| {
                    for owner in owners(placed.address, bytes) {
                        assert_eq!(owner.swap(0, Ordering::Relaxed), thread);
                    }
                    arena
                        .free(placed.place, After::NOTHING, |all| all)
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
                    // The threads share two lanes, so that shards meet threads and threads shards.
                    let lane = usize::from(thread % 2);
                    let placed = arena
                        .take(lane, request)
                        .or_else(|| arena.take_drawing(lane, request))
                        .or_else(|| arena.anywhere(request));
                    let placed =
                        placed.expect("8 x 40 blocks of half a MiB at most are less than there is");
                    for owner in owners(placed.address, bytes) {
                        assert_eq!(owner.swap(thread, Ordering::Relaxed), 0);
                    }
                    live.push((placed, bytes));
                }
                live.drain(..).for_each(release);
            });
        }
    });
    let all = arena.anywhere(Request {
        bytes: BYTES,
        align: 1,
    });
    assert!(
        all.is_some(),
        "the heap is whole again: {:?}",
        arena.totals()
    );
}

#[test]
fn eight_threads_fill_the_limit_to_its_last_byte_and_never_pass_it() {
    const EACH: u64 = 1000;
    const LIMIT: u64 = 801 * EACH - 1;
    let arena = arena(LIMIT, 64 * MIB);
    let request = Request {
        bytes: EACH,
        align: 1,
    };
    for lane in 0..4 {
        let taken: Vec<Vec<Placed>> = std::thread::scope(|scope| {
            let fill = || {
                let take = || {
                    arena
                        .take(lane, request)
                        .or_else(|| arena.take_drawing(lane, request))
                        .or_else(|| arena.anywhere(request))
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
            arena.limit(),
            BudgetSnapshot {
                limit: LIMIT,
                used: 800 * EACH
            }
        );
        for placed in taken {
            arena
                .free(placed.place, After::NOTHING, |all| all)
                .expect("it is live");
        }
    }
    assert_eq!(arena.limit().used, 0);
}

#[test]
fn credit_that_was_drawn_is_within_a_limit_that_was_lowered() {
    let arena = arena(64 * MIB, 64 * MIB);
    let first = arena.take_drawing(0, ONE).expect("it fits");
    arena.set_limit(MIB);
    assert!(arena.take(0, ONE).or_else(|| arena.anywhere(ONE)).is_none());
    arena.set_limit(2 * MIB);
    let second = arena
        .take(0, ONE)
        .or_else(|| arena.anywhere(ONE))
        .expect("it fits");
    for placed in [first, second] {
        arena
            .free(placed.place, After::NOTHING, |all| all)
            .expect("it is live");
    }
}

#[test]
fn what_is_freed_above_a_lowered_limit_is_not_for_the_next_until_live_bytes_are_within_it() {
    let arena = arena(10 * MIB, 64 * MIB);
    let take = || {
        arena
            .take(0, ONE)
            .or_else(|| arena.take_drawing(0, ONE))
            .or_else(|| arena.anywhere(ONE))
    };
    let free = |placed: Placed| {
        arena
            .free(placed.place, After::NOTHING, |all| all)
            .expect("it is live");
    };
    let mut live: Vec<_> = std::iter::from_fn(take).collect();
    assert_eq!(live.len(), 10);
    arena.set_limit(5 * MIB);
    for _ in 0..5 {
        live.pop().into_iter().for_each(free);
        assert!(take().is_none(), "{:?}", arena.limit());
    }
    for _ in 0..3 {
        live.pop().into_iter().for_each(free);
        live.push(take().expect("it is within the limit"));
        assert!(take().is_none(), "{:?}", arena.limit());
    }
}

#[test]
fn a_part_gets_the_credit_that_another_has() {
    let arena = arena(8 * MIB, 64 * MIB);
    let request = |bytes| Request { bytes, align: 1 };
    let take = |lane, bytes| {
        arena
            .take_drawing(lane, request(bytes))
            .or_else(|| arena.anywhere(request(bytes)))
    };
    let blocks: Vec<_> = (0..8).filter_map(|lane| take(lane, MIB)).collect();
    assert_eq!(blocks.len(), 8);
    for block in blocks {
        arena
            .free(block.place, After::NOTHING, |all| all)
            .expect("it is live");
    }
    assert!(take(9, 8 * MIB + 1).is_none());
    assert!(take(9, 8 * MIB).is_some(), "it is idle in eight parts");
    assert!(take(1, 1).is_none());
}

/// An arena whose limit of 8 MiB is reached by a block in each of eight parts, and how a part takes one: whether all others
/// had to be asked.
fn at_its_limit() -> (Arena, Vec<Placed>) {
    let arena = arena(8 * MIB, 64 * MIB);
    let blocks = (0..8).map(|lane| turn(&arena, lane).0).collect();
    (arena, blocks)
}

fn turn(arena: &Arena, lane: usize) -> (Placed, bool) {
    let taken = arena
        .take(lane, ONE)
        .or_else(|| arena.take_drawing(lane, ONE));
    let asked = taken.is_none();
    let placed = taken.or_else(|| arena.anywhere(ONE));
    (placed.expect("it is within the limit"), asked)
}

fn give_back(arena: &Arena, placed: Placed) {
    arena
        .free(placed.place, After::NOTHING, |all| all)
        .expect("it is live");
}

#[test]
fn parts_that_take_turns_at_the_limit_ask_one_another_once_at_most() {
    let (arena, mut blocks) = at_its_limit();
    let mut asked = 0;
    for at in 0..1000 {
        give_back(&arena, blocks.remove(at % 8));
        let (placed, others) = turn(&arena, at * 3);
        asked += usize::from(others);
        blocks.push(placed);
    }
    assert!(asked <= 1, "{asked} of 1000");
}

#[test]
fn a_part_keeps_its_credit_again_once_much_of_the_limit_is_left() {
    let (arena, mut blocks) = at_its_limit();
    give_back(&arena, blocks.remove(0));
    blocks.push(turn(&arena, 1).0);
    for placed in blocks {
        give_back(&arena, placed);
    }
    let scarce = || arena.scarce.load(Ordering::Relaxed);
    assert!(scarce());
    let kept = turn(&arena, 2).0;
    give_back(&arena, kept);
    assert!(!scarce());
    assert!(arena.account.0.snapshot().used >= MIB);
}

#[test]
fn who_alone_goes_on_at_the_limit_draws_for_a_while_only() {
    let (arena, mut blocks) = at_its_limit();
    give_back(&arena, blocks.remove(0));
    for _ in 0..=SCARCE_DRAWS {
        let placed = turn(&arena, 1).0;
        give_back(&arena, placed);
    }
    assert!(arena.take(1, ONE).is_some(), "the part has credit");
}

#[test]
fn credit_that_comes_back_while_parts_are_looked_through_is_found() {
    let arena = arena(2 * MIB, 64 * MIB);
    let (first, idle) = (&arena.parts[shard_of(0, 0)], &arena.parts[shard_of(5, 0)]);
    arena.account.0.take(MIB).expect("nothing is live");
    idle.set_credit(&mut idle.share.lock(), MIB);
    let live = arena.take_drawing(7, ONE).expect("it fits");
    let held = first.share.lock();
    std::thread::scope(|scope| {
        let charged = scope.spawn(|| arena.charge(MIB));
        while !arena.scarce.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        // It waits for the first part now. At no time is more than half of the limit live.
        std::thread::sleep(std::time::Duration::from_millis(50));
        give_back(&arena, live);
        assert!(arena.take_drawing(5, ONE).is_some(), "it has credit");
        drop(held);
        assert_eq!(charged.join().expect("it ends"), Ok(()));
    });
}

#[test]
fn a_thread_that_finds_its_shard_taken_again_and_again_goes_to_another() {
    let arena = arena(u64::MAX, 64 * MIB);
    let (_, held) = arena.shard(0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // Only tries: it waits for nobody.
            let moved = (0..1000).any(|_| {
                assert!(arena.take(0, ONE).is_none());
                shard_of(0, shard_affinity::of_thread()) != shard_of(0, 0)
            });
            assert!(moved);
            arena.take_drawing(0, ONE).map(|placed| placed.place.part)
        });
        let part = other.join().expect("it ends");
        assert!(part.is_some_and(|part| part as usize != shard_of(0, 0)));
    });
    drop(held);
}
