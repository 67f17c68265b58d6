//! Measures `DeviceState::check`, which is the cost of every `GpuRef::access`.
//!
//! The benchmark compares the check outside and inside a container, where the check also reads the
//! agent's fence, with a single atomic load. Blocks of each run in turn; the output is the median
//! time of one call and the median ratio of neighbouring blocks.

use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bursar_runtime::state::ErrorMonitor;

const ROUNDS: usize = 301;
const CALLS: u32 = 100_000;

/// Returns the fence as the shim does, from a page once there is one.
extern "C" fn fence() -> u64 {
    static PAGE: OnceLock<Box<AtomicU64>> = OnceLock::new();
    PAGE.get_or_init(Box::default).load(Ordering::Relaxed)
}

/// Returns the nanoseconds of one call.
fn block(call: impl Fn() -> bool) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        assert!(black_box(call()));
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<_> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let (outside, inside) = (ErrorMonitor::new(), ErrorMonitor::new());
    inside.set_fence_fn(fence);
    let (word, outside, inside) = (AtomicU64::new(0), outside.new_state(), inside.new_state());
    let rounds: Vec<_> = (0..ROUNDS)
        .map(|_| {
            [
                block(|| black_box(&word).load(Ordering::Acquire) == 0),
                block(|| black_box(&outside).check().is_ok()),
                block(|| black_box(&inside).check().is_ok()),
            ]
        })
        .collect();
    for (at, name) in ["one load", "no agent", "an agent's word"]
        .iter()
        .enumerate()
    {
        let time = median(rounds.iter().map(|round| round[at]));
        let ratio = median(rounds.iter().map(|round| round[at] / round[0]));
        println!("{name:<16} {time:>6.2} ns  {ratio:.2}x");
    }
}
