//! Finds the sets of containers that may run at the same time: pure.

use super::MAX_CONTAINERS;
use crate::units::DeviceIdSet;

/// The most steps of the search for containers that may run at the same time.
const MAX_STEPS: u32 = 1_000;

/// The maximal sets of containers that may run at the same time, because no two share a device id.
/// None where there are too many sets.
pub(super) fn concurrent_sets(device_ids: &[&DeviceIdSet]) -> Option<Vec<u64>> {
    if device_ids.len() > 2 * MAX_CONTAINERS {
        return None;
    }
    let compatible = |index: usize| {
        let others = (0..device_ids.len()).filter(|other| *other != index);
        others
            .filter(|other| !device_ids[index].overlaps(device_ids[*other]))
            .fold(0, |set, other| set | (1_u64 << other))
    };
    let compatible: Vec<u64> = (0..device_ids.len()).map(compatible).collect();
    let (mut sets, mut tries) = (Vec::new(), MAX_STEPS);
    let all = (1 << device_ids.len()) - 1;
    extend_sets(&compatible, 0, all, 0, &mut sets, &mut tries)?;
    (sets.len() <= MAX_CONTAINERS).then_some(sets)
}

/// The Bron-Kerbosch algorithm with a pivot: extends `set` by all of `more` that are compatible
/// with it, without those in `done`. None where that takes too many steps.
fn extend_sets(
    compatible: &[u64],
    set: u64,
    mut more: u64,
    mut done: u64,
    sets: &mut Vec<u64>,
    tries: &mut u32,
) -> Option<()> {
    *tries = tries.checked_sub(1)?;
    if more == 0 && done == 0 {
        sets.push(set);
    }
    let pivot = (0..compatible.len())
        .filter(|index| ((more | done) >> index) & 1 == 1)
        .max_by_key(|index| (more & compatible[*index]).count_ones());
    let mut left = more & !pivot.map_or(0, |pivot| compatible[pivot]);
    while left != 0 {
        let next = left.trailing_zeros() as usize;
        let go = compatible[next];
        extend_sets(
            compatible,
            set | (1 << next),
            more & go,
            done & go,
            sets,
            tries,
        )?;
        left &= !(1 << next);
        more &= !(1 << next);
        done |= 1 << next;
    }
    Some(())
}
