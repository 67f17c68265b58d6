//! Measures the shim's cost on the simulated driver, in alternating runs.
//!
//! The benchmark times a forwarded call, and allocate + free of linear and of stream-ordered
//! memory, with room and at the quota. The simulated driver is faster than a real one, so the
//! ratios are worse than on a GPU. On one, allocate + free takes 45 us, or 480 ns in stream order
//! (fact F9). The absolute difference is what to watch. The benchmark also times the start of a
//! process that never uses CUDA, because the library is preloaded into every process of a
//! container.
//!
//! `cargo bench -p bursar-shim --bench overhead -- ROW` measures the rows that have this word in
//! their names. `e2e/gpu/shims.py` runs it on a real GPU.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use support::{Client, Container, MIB};

const ROUNDS: usize = 9;

/// Returns the median time of one call, in nanoseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn is_wanted(row: &str) -> bool {
    let words = std::env::args().skip(1);
    let words: Vec<String> = words.filter(|word| !word.starts_with("--")).collect();
    words.is_empty() || words.iter().any(|word| row.contains(word))
}

fn compare(name: &str, bare: &mut Client, shim: &mut Client, command: &str, calls: u64) {
    if !is_wanted(name) {
        return;
    }
    let (mut native, mut hooked) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        native.push(bare.ok(command)[0] as f64 / calls as f64);
        hooked.push(shim.ok(command)[0] as f64 / calls as f64);
    }
    let (native, hooked) = (median(native), median(hooked));
    println!(
        "{name:<28} native {native:>8.1} ns  shim {hooked:>8.1} ns  +{:>6.1} ns  {:.3}x",
        hooked - native,
        hooked / native
    );
}

/// Compares the shortest of 500 runs of `/bin/true` without and with a preloaded library, in turn;
/// load only adds time.
fn compare_starts(library: &Path) {
    let life = |preload: &Path| {
        let start = Instant::now();
        let ended = Command::new("/bin/true")
            .env("LD_PRELOAD", preload)
            .status();
        assert!(ended.expect("there is one").success());
        start.elapsed()
    };
    let mut shortest = [Duration::MAX; 2];
    for _ in 0..500 {
        for (shortest, preload) in shortest.iter_mut().zip([Path::new(""), library]) {
            *shortest = life(preload).min(*shortest);
        }
    }
    println!(
        "/bin/true                    native {:?}  preloaded {:?}",
        shortest[0], shortest[1]
    );
}

fn main() {
    if is_wanted("/bin/true") {
        compare_starts(&support::built().join("libbursar_shim.so"));
    }
    // A pair takes a real driver a hundred times longer.
    let (pairs, small) = match support::is_real() {
        true => (5_000, 2_000),
        false => (50_000, 20_000),
    };
    let container = Container::with_quota(256 * MIB);
    let (mut bare, mut shim) = (container.bare_program(), container.program());
    compare(
        "forwarded call",
        &mut bare,
        &mut shim,
        "query 500000",
        500_000,
    );
    compare("launch", &mut bare, &mut shim, "launches 500000", 500_000);
    compare(
        "cuMemAlloc + cuMemFree 2 MiB",
        &mut bare,
        &mut shim,
        &format!("churn {pairs} {}", 2 * MIB),
        pairs,
    );
    // One piece is kept, so that the driver keeps the chunk.
    let kept = [&mut bare, &mut shim].map(|program| program.ok("alloc 512")[0]);
    for threads in [1, 8] {
        let name = format!("4 KiB by {threads} threads");
        let command = format!("churns {threads} {small} 4096");
        compare(&name, &mut bare, &mut shim, &command, small);
    }
    for (program, piece) in [&mut bare, &mut shim].into_iter().zip(kept) {
        program.ok(format!("free {piece}"));
    }
    // Freed memory stays in the pool, as in a program that allocates often.
    for program in [&mut bare, &mut shim] {
        let pool = program.ok("devicepool 0")[0];
        program.ok(format!("threshold {pool} {}", u64::MAX));
    }
    for (name, bytes) in [
        ("async alloc + free 1 MiB", MIB),
        ("async alloc + free, at quota", 250 * MIB),
    ] {
        let command = format!("asyncchurn {pairs} {bytes}");
        compare(name, &mut bare, &mut shim, &command, pairs);
    }
}
