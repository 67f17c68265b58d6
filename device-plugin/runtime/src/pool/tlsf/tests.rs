//! Compares random histories with a model of all byte ranges.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Allocate { size: u64, align: u64 },
    Free { which: usize, deps: StreamDeps },
    FreeTwice { which: usize },
    Remove { which: usize },
    Add { granules: u64 },
    Look,
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        1..=4096u64,
        1..=1u64 << 20,
        (1..=64u64).prop_map(|granules| granules * GRANULE)
    ]
}

fn deps() -> impl Strategy<Value = StreamDeps> {
    (0..4u64, 0..8u64).prop_map(|(slots, stamp)| StreamDeps { slots, stamp })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let aligns = prop_oneof![6 => Just(GRANULE), 1 => (0..8u32).prop_map(|power| GRANULE << power), 1 => Just(1)];
    let step = prop_oneof![
        10 => (sizes(), aligns).prop_map(|(size, align)| Step::Allocate { size, align }),
        8 => (any::<usize>(), deps()).prop_map(|(which, deps)| Step::Free { which, deps }),
        1 => any::<usize>().prop_map(|which| Step::FreeTwice { which }),
        1 => any::<usize>().prop_map(|which| Step::Remove { which }),
        1 => (1..=16384u64).prop_map(|granules| Step::Add { granules }),
        1 => Just(Step::Look),
    ];
    proptest::collection::vec(step, 1..200)
}

/// Expected state of the heap.
#[derive(Default)]
struct Model {
    regions: Vec<(EmptyRegion, u64, u64)>,
    added: u32,
    /// Live blocks by address, with their sizes in bytes.
    live: BTreeMap<u64, (BlockId, u64)>,
    dead: Vec<BlockId>,
}

impl Model {
    /// Maximal free ranges.
    fn gaps(&self) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        for &(_, start, bytes) in &self.regions {
            let mut at = start;
            for (&address, &(_, size)) in self.live.range(start..start + bytes) {
                if address > at {
                    gaps.push((at, address - at));
                }
                at = address + size;
            }
            if at < start + bytes {
                gaps.push((at, start + bytes - at));
            }
        }
        gaps
    }

    fn fits(&self, size: u64, align: u64) -> bool {
        let size = size.next_multiple_of(GRANULE);
        let align = align.max(GRANULE);
        self.gaps()
            .iter()
            .any(|&(at, bytes)| at.next_multiple_of(align) - at + size <= bytes)
    }

    fn pick(&self, which: usize) -> Option<(u64, BlockId)> {
        let nth = which.checked_rem(self.live.len())?;
        self.live.iter().nth(nth).map(|(&at, &(id, _))| (at, id))
    }
}

fn run_history(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (mut heap, mut model) = (TlsfHeap::new(), Model::default());
    for step in steps {
        match step.clone() {
            Step::Add { granules } => {
                // Adjacent regions must not merge.
                let start = model
                    .regions
                    .iter()
                    .map(|&(_, at, bytes)| at + bytes)
                    .max()
                    .unwrap_or(GRANULE * 3);
                let region =
                    heap.add_region(model.added, start, granules * GRANULE, StreamDeps::NONE);
                model.regions.push((
                    region.expect("a region of that size can be added"),
                    start,
                    granules * GRANULE,
                ));
                model.added += 1;
            }
            Step::Allocate { size, align } => {
                let fits = model.fits(size, align);
                let taken = heap.allocate(size, align);
                prop_assert_eq!(taken.is_some(), fits, "{} bytes at {}", size, align);
                let Some(taken) = taken else { continue };
                let granules = size.next_multiple_of(GRANULE);
                prop_assert!((granules..=granules + granules / 64).contains(&taken.bytes));
                prop_assert_eq!(taken.address % align.max(GRANULE), 0);
                let inside = model.gaps().into_iter().any(|(at, bytes)| {
                    at <= taken.address && taken.address + taken.bytes <= at + bytes
                });
                prop_assert!(inside, "{:?} overlaps", taken);
                model.live.insert(taken.address, (taken.id, taken.bytes));
            }
            Step::Free { which, deps } => {
                let Some((at, id)) = model.pick(which) else {
                    continue;
                };
                prop_assert!(heap.free(id, deps, unchanged).is_ok());
                model.live.remove(&at);
                model.dead.push(id);
            }
            Step::FreeTwice { which } => {
                if let Some(nth) = which.checked_rem(model.dead.len()) {
                    prop_assert!(
                        heap.free(model.dead[nth], StreamDeps::NONE, unchanged)
                            .is_err()
                    );
                }
            }
            Step::Remove { which } => {
                let Some(nth) = which.checked_rem(model.regions.len()) else {
                    continue;
                };
                let (region, start, size) = model.regions[nth];
                let free = model.live.range(start..start + size).next().is_none();
                prop_assert_eq!(heap.remove_region(region).is_some(), free);
                if free {
                    model.regions.remove(nth);
                    prop_assert!(heap.remove_region(region).is_none());
                }
            }
            Step::Look => {}
        }
        let gaps = model.gaps();
        prop_assert_eq!(
            heap.free_bytes(),
            gaps.iter().map(|&(_, bytes)| bytes).sum::<u64>()
        );
        prop_assert_eq!(
            heap.live_bytes(),
            model.live.values().map(|&(_, bytes)| bytes).sum::<u64>()
        );
        prop_assert_eq!(heap.live_blocks(), model.live.len() as u64);
        // One header for each block and each gap, and one for the last freed block.
        let used = |heap: &TlsfHeap| heap.headers.iter().filter(|header| header.size > 0).count();
        let blocks = gaps.len() + model.live.len();
        prop_assert!((blocks..=blocks + 2).contains(&used(&heap)));
        if matches!(step, Step::Look) {
            prop_assert_eq!(
                heap.largest_free(),
                gaps.iter().map(|&(_, bytes)| bytes).max().unwrap_or(0)
            );
            prop_assert_eq!(used(&heap), blocks, "neighbours were merged");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn blocks_never_overlap_and_free_neighbours_merge(steps in steps()) {
        run_history(steps)?;
    }
}

/// The freeing stream has waited for no other.
fn unchanged(deps: StreamDeps) -> StreamDeps {
    deps
}

fn heap(bytes: u64) -> (TlsfHeap, EmptyRegion) {
    let mut heap = TlsfHeap::new();
    let region = heap
        .add_region(0, 1 << 40, bytes, StreamDeps::NONE)
        .expect("a region can be added");
    (heap, region)
}

#[test]
fn merged_block_has_the_deps_of_all_its_parts() {
    let (mut heap, region) = heap(3 * GRANULE);
    let taken: Vec<_> = (0..3).filter_map(|_| heap.allocate(GRANULE, 1)).collect();
    for (slot, taken) in (0..).zip(&taken) {
        let deps = StreamDeps {
            slots: 1 << slot,
            stamp: 10 - slot,
        };
        heap.free(taken.id, deps, unchanged).expect("it is live");
    }
    assert_eq!(
        heap.remove_region(region),
        Some(StreamDeps {
            slots: 0b111,
            stamp: 10
        })
    );
}

#[test]
fn remainder_of_a_split_block_keeps_its_deps() {
    let (mut heap, region) = heap(2 * GRANULE);
    let whole = heap.allocate(2 * GRANULE, 1).expect("it fits");
    let deps = StreamDeps { slots: 1, stamp: 7 };
    heap.free(whole.id, deps, unchanged).expect("it is live");
    let first = heap.allocate(GRANULE, 1).expect("it fits");
    assert_eq!(first.deps, deps);
    heap.free(first.id, StreamDeps::NONE, unchanged)
        .expect("it is live");
    assert_eq!(heap.remove_region(region), Some(deps));
}

#[test]
fn stale_block_id_frees_nothing() {
    let (mut heap, _) = heap(GRANULE);
    let old = heap.allocate(1, 1).expect("it fits");
    heap.free(old.id, StreamDeps::NONE, unchanged)
        .expect("it is live");
    let new = heap.allocate(1, 1).expect("it fits");
    assert_eq!(old.id.index, new.id.index);
    assert!(heap.free(old.id, StreamDeps::NONE, unchanged).is_err());
    assert!(heap.free(new.id, StreamDeps::NONE, unchanged).is_ok());
    assert!(heap.free(new.id, StreamDeps::NONE, unchanged).is_err());
}

#[test]
fn last_freed_block_is_reused_for_the_same_size() {
    let (mut heap, region) = heap(64 * GRANULE);
    let _kept = heap.allocate(GRANULE, 1).expect("it fits");
    let deps = StreamDeps { slots: 1, stamp: 7 };
    let first = heap.allocate(8 * GRANULE, 1).expect("it fits");
    heap.free(first.id, deps, unchanged).expect("it is live");
    let other = heap.allocate(9 * GRANULE, 1).expect("it fits");
    assert_ne!(other.address, first.address);
    let second = heap.allocate(8 * GRANULE, 1).expect("it fits");
    assert_eq!((second.address, second.deps), (first.address, deps));
    assert!(heap.free(first.id, deps, unchanged).is_err());
    assert_eq!(heap.empty_region_deps(region), None);
}

#[test]
fn last_freed_block_is_available_to_any_request() {
    let (mut heap, _) = heap(3 * GRANULE);
    let _low = heap.allocate(GRANULE, 1).expect("it fits");
    let high = heap.allocate(GRANULE, 1).expect("it fits");
    heap.free(high.id, StreamDeps::NONE, unchanged)
        .expect("it is live");
    assert!(heap.allocate(2 * GRANULE, 1).is_some());
}

#[test]
fn last_freed_block_keeps_deps_of_another_stream() {
    let (mut heap, region) = heap(8 * GRANULE);
    let used = |slots| StreamDeps { slots, stamp: 1 };
    let taken: Vec<_> = (0..3).filter_map(|_| heap.allocate(GRANULE, 1)).collect();
    let free =
        |heap: &mut TlsfHeap, taken: HeapBlock, slots, left: fn(StreamDeps) -> StreamDeps| {
            heap.free(taken.id, used(slots), left).expect("it is live");
        };
    free(&mut heap, taken[1], 0b001, unchanged);
    free(&mut heap, taken[2], 0b010, unchanged);
    let other = heap.allocate(2 * GRANULE, 1).expect("it fits");
    // Slot 2 has waited for slot 0, but not for slot 1, whose block merges with its neighbour now.
    free(&mut heap, other, 0b100, |before| StreamDeps {
        slots: before.slots & !0b001,
        ..before
    });
    free(&mut heap, taken[0], 0, unchanged);
    assert_eq!(heap.remove_region(region), Some(used(0b111)));
}

impl TlsfHeap {
    pub(in crate::pool) fn bytes_of(&self, id: BlockId) -> u64 {
        to_bytes(self.headers[id.index as usize].size)
    }
}

#[test]
fn merge_drops_deps_that_the_freeing_stream_met() {
    let (mut heap, region) = heap(2 * GRANULE);
    let [first, second] = [0; 2].map(|_| heap.allocate(GRANULE, 1).expect("it fits"));
    let used = |slots, stamp| StreamDeps { slots, stamp };
    heap.free(second.id, used(0b01, 1), unchanged)
        .expect("it is live");
    heap.merge_last_freed();
    let left = |before: StreamDeps| used(before.slots & !0b01, before.stamp);
    heap.free(first.id, used(0b10, 2), left)
        .expect("it is live");
    assert_eq!(heap.empty_region_deps(region), Some(used(0b10, 2)));
}
