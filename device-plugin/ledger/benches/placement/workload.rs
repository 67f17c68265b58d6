//! Generates the pods: sizes, arrivals in bursts, and run times.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub(crate) const GPUS: usize = 8;
pub(crate) const GPU_GIB: u32 = 141;
const BURST: usize = 64;
const MEAN_LIFE_MS: f64 = 120_000.0;
const SIZES: [u32; 16] = [4, 4, 4, 8, 8, 8, 10, 10, 16, 16, 20, 24, 32, 40, 64, 80];

/// A pod with one container.
#[derive(Clone, Copy)]
pub(crate) struct Pod {
    pub(crate) created_ms: u64,
    pub(crate) gib: u32,
    /// How long the pod runs once it has started.
    pub(crate) life_ms: u64,
}

/// Pods in order of creation.
pub(crate) struct Workload {
    pub(crate) pods: Vec<Pod>,
}

impl Workload {
    /// `bursts` bursts at random times that request `load` times the capacity of the GPUs.
    pub(crate) fn new(seed: u64, load: f64, bursts: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mean_gib = f64::from(SIZES.iter().sum::<u32>()) / SIZES.len() as f64;
        let node_gib = GPUS as f64 * f64::from(GPU_GIB);
        let gap_ms = BURST as f64 * mean_gib * MEAN_LIFE_MS / (node_gib * load);
        let mut now = 0.0;
        let mut pods = Vec::new();
        for _ in 0..bursts {
            now += gap_ms * random.random_range(0.5..1.5);
            for _ in 0..BURST {
                pods.push(Pod {
                    created_ms: now as u64,
                    gib: SIZES[random.random_range(0..SIZES.len())],
                    life_ms: exponential(&mut random, MEAN_LIFE_MS) as u64 + 1,
                });
            }
        }
        Self { pods }
    }
}

fn exponential(random: &mut StdRng, mean: f64) -> f64 {
    -mean * (1.0 - random.random::<f64>()).ln()
}
