//! Measures how long pods wait for GPU memory, and how full the GPUs get. The real binder runs
//! behind a scheduler that sees node totals only.
//!
//! The benchmark is a discrete-event simulation. An ideal scheduler, which sees every GPU, runs
//! over the same pods.
//!
//! `cargo bench -p bursar-ledger --bench placement`

mod ideal;
mod late;
mod workload;

use std::process::ExitCode;

use workload::{GPU_GIB, GPUS, Pod, Workload};

/// The results for a run's pods.
pub(crate) struct Outcome {
    /// For each pod the milliseconds from its creation to its start.
    wait_times_ms: Vec<u64>,
    /// Pods that were refused for lack of memory (Failed for ever in Kubernetes).
    failures: usize,
    /// Memory times time that pods ran with until the last pod was created.
    used_gib_ms: u128,
    /// The time of the last pod's creation.
    window_ms: u64,
}

impl Outcome {
    fn mean_s(&self) -> f64 {
        self.wait_times_ms.iter().sum::<u64>() as f64 / self.wait_times_ms.len() as f64 / 1000.0
    }

    fn quantile_s(&self, quantile: f64) -> f64 {
        let mut waits = self.wait_times_ms.clone();
        waits.sort_unstable();
        waits[((waits.len() - 1) as f64 * quantile) as usize] as f64 / 1000.0
    }

    fn utilisation(&self) -> f64 {
        self.used_gib_ms as f64
            / (self.window_ms as f64 * f64::from(GPUS as u32) * f64::from(GPU_GIB))
    }
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this target too, to check that it starts.
    let quick = !std::env::args().any(|arg| arg == "--bench");
    let scale = if quick { 20 } else { 1 };
    println!(
        "{:<10} {:<30} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7} {:>6}",
        "load", "scheduler", "failed", "mean s", "ratio", "p99 s", "max s", "80GiB s", "used"
    );
    let mut failures = 0;
    for (name, load, bursts) in [("65 %", 0.65, 600), ("100 %", 1.0, 300), ("150 %", 1.5, 60)] {
        let work = Workload::new(7, load, bursts / scale);
        let ideal = ideal::run(&work);
        print_row(name, "ideal, per GPU", &work, &ideal, &ideal);
        let greedy = ideal::run_greedy(&work);
        print_row(name, "ideal without fairness", &work, &greedy, &ideal);
        for (scheduler, steered) in [("late binding", false), ("late binding, steered", true)] {
            let late = late::run(&work, steered);
            print_row(name, scheduler, &work, &late, &ideal);
            failures += late.failures;
        }
    }
    if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn print_row(load: &str, scheduler: &str, work: &Workload, run: &Outcome, ideal: &Outcome) {
    let big: Vec<u64> = work
        .pods
        .iter()
        .zip(&run.wait_times_ms)
        .filter(|(Pod { gib, .. }, _)| *gib == 80)
        .map(|(_, wait)| *wait)
        .collect();
    println!(
        "{load:<10} {scheduler:<30} {:>8} {:>8.1} {:>8.2} {:>9.1} {:>8.1} {:>7.1} {:>5.1}%",
        run.failures,
        run.mean_s(),
        run.mean_s() / ideal.mean_s(),
        run.quantile_s(0.99),
        run.quantile_s(1.0),
        big.iter().sum::<u64>() as f64 / big.len() as f64 / 1000.0,
        run.utilisation() * 100.0,
    );
}
