//! Cuts a container's memory into shares, each on a GPU of its own.

/// The memory that one GPU or MIG instance offers to pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuCapacity {
    /// The memory, in quanta; zero where the container can have none of it.
    pub quanta: u32,
    /// Whether one program can use the GPU together with others. It cannot for a MIG instance.
    pub is_combinable: bool,
}

/// Cuts `quanta` into shares, largest first: evenly over as few GPUs as could hold them if they
/// were empty, and over `least` at least. Where no even cut fits GPUs of different size, the GPUs
/// cap the shares. None if all GPUs together are too small or too few.
///
/// Quanta that do not fit into one MIG instance are not cut: a program opens one instance. Agent
/// and operator cut alike, so that the operator makes room for what the agent will place.
pub fn split_quanta(gpus: &[GpuCapacity], quanta: u32, least: u16) -> Option<Vec<u32>> {
    let usable = || gpus.iter().filter(|gpu| gpu.quanta > 0);
    let least = usize::from(least).clamp(1, quanta.max(1) as usize);
    if least == 1 && usable().any(|gpu| gpu.quanta >= quanta) {
        return Some(vec![quanta]);
    }
    let combinable = usable().filter(|gpu| gpu.is_combinable);
    let mut capacities: Vec<u32> = combinable.map(|gpu| gpu.quanta).collect();
    capacities.sort_unstable_by(|a, b| b.cmp(a));
    let most = capacities.len().min(quanta as usize);
    (least..=most)
        .map(|n| split_evenly(quanta, n))
        .find(|shares| shares.iter().zip(&capacities).all(|(s, c)| s <= c))
        .or_else(|| {
            (least..=most)
                .map(|n| &capacities[..n])
                .find(|largest| sum(largest) >= u64::from(quanta))
                .map(|largest| split_capped(quanta, largest))
        })
}

fn sum(capacities: &[u32]) -> u64 {
    capacities.iter().map(|quanta| u64::from(*quanta)).sum()
}

/// Cuts `quanta` into `n` parts that differ by one at most.
fn split_evenly(quanta: u32, n: usize) -> Vec<u32> {
    split_capped(quanta, &vec![u32::MAX; n])
}

/// Cuts `quanta` as evenly as `caps` (descending, enough together) allow, in their order.
fn split_capped(quanta: u32, caps: &[u32]) -> Vec<u32> {
    let mut left = quanta;
    let mut shares = vec![0; caps.len()];
    for (i, (share, &cap)) in shares.iter_mut().zip(caps).enumerate().rev() {
        *share = cap.min(left / (i as u32 + 1));
        left -= *share;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(capacities: &[u32], is_combinable: bool) -> Vec<GpuCapacity> {
        let gpu = |&quanta: &u32| GpuCapacity {
            quanta,
            is_combinable,
        };
        capacities.iter().map(gpu).collect()
    }

    #[test]
    fn container_is_cut_evenly_over_the_fewest_gpus() {
        let of = |quanta, least, capacities: &[u32]| {
            split_quanta(&gpus(capacities, true), quanta, least)
        };
        assert_eq!(of(8, 1, &[16, 16]), Some(vec![8]));
        assert_eq!(of(9, 2, &[16, 16, 16]), Some(vec![5, 4]));
        assert_eq!(of(24, 1, &[16, 16]), Some(vec![12, 12]));
        assert_eq!(of(24, 3, &[16, 16]), None, "two GPUs are no three");
        assert_eq!(of(40, 1, &[16, 16]), None);
    }

    #[test]
    fn gpus_of_different_size_take_uneven_shares() {
        let gpus = gpus(&[80, 20], true);
        assert_eq!(split_quanta(&gpus, 90, 1), Some(vec![70, 20]));
        assert_eq!(split_quanta(&gpus, 101, 1), None);
    }

    #[test]
    fn container_is_not_cut_over_mig_instances() {
        let instances = gpus(&[10, 10], false);
        assert_eq!(split_quanta(&instances, 16, 1), None);
        assert_eq!(split_quanta(&instances, 8, 2), None);
        assert_eq!(split_quanta(&instances, 10, 1), Some(vec![10]));
        let mixed = [gpus(&[10], false), gpus(&[8, 8], true)].concat();
        assert_eq!(split_quanta(&mixed, 16, 1), Some(vec![8, 8]));
    }
}
