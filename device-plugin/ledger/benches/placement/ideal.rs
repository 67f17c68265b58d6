//! Simulates the ideal: a central scheduler that sees every GPU and starts a pod as soon as it
//! fits. It is independent code, because it is the measure of the binder.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Outcome;
use crate::workload::{GPU_GIB, GPUS, Workload};

/// First come first served, best fit, later pods may overtake. The free memory of the GPU with the
/// smallest shortage is set aside for the first pod that does not fit.
pub(crate) fn run(work: &Workload) -> Outcome {
    simulate(work, true)
}

/// A run without reservations: large pods wait while small ones overtake them.
pub(crate) fn run_greedy(work: &Workload) -> Outcome {
    simulate(work, false)
}

fn simulate(work: &Workload, fair: bool) -> Outcome {
    let last = work.pods.last().map_or(0, |pod| pod.created_ms);
    let mut free = [GPU_GIB; GPUS];
    let mut ends = BinaryHeap::new();
    let mut queue: Vec<usize> = Vec::new();
    let mut waits = vec![0; work.pods.len()];
    let mut used_gib_ms = 0;
    let mut coming = 0;
    while coming < work.pods.len() || !ends.is_empty() {
        let arrival = work.pods.get(coming).map(|pod| pod.created_ms);
        let end = ends.peek().map(|&Reverse((at, _, _))| at);
        let now = arrival.into_iter().chain(end).min().unwrap_or_default();
        while let Some(&Reverse((at, gpu, gib))) = ends.peek()
            && at == now
        {
            let _: u32 = gib;
            let gpu: usize = gpu;
            free[gpu] += gib;
            ends.pop();
        }
        while work
            .pods
            .get(coming)
            .is_some_and(|pod| pod.created_ms == now)
        {
            queue.push(coming);
            coming += 1;
        }
        let mut kept = None;
        queue.retain(|&pod| {
            let gib = work.pods[pod].gib;
            let fits = (0..GPUS).filter(|&gpu| free[gpu] >= gib && kept != Some(gpu));
            let Some(gpu) = fits.min_by_key(|&gpu| free[gpu]) else {
                if fair && kept.is_none() {
                    kept = (0..GPUS).max_by_key(|&gpu| free[gpu]);
                }
                return true;
            };
            free[gpu] -= gib;
            waits[pod] = now - work.pods[pod].created_ms;
            let until = now + work.pods[pod].life_ms;
            used_gib_ms += u128::from(until.min(last).saturating_sub(now)) * u128::from(gib);
            ends.push(Reverse((until, gpu, gib)));
            false
        });
    }
    Outcome {
        wait_times_ms: waits,
        failures: 0,
        used_gib_ms,
        window_ms: last,
    }
}
