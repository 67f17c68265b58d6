//! Measures the shim's cost on the simulated driver, in alternating runs.
//!
//! The benchmark times a forwarded call, and allocate + free of linear and of stream-ordered
//! memory, with room and at the quota. The simulated driver is faster than a real one, so the
//! ratios are worse than on a GPU. On one, allocate + free takes 45 us, or 480 ns in stream order
//! (fact F9). The absolute difference is what to watch. The benchmark also times the start of a
//! process that never uses CUDA, and its memory, because every process of a container loads the
//! entries of the shims.
//!
//! `cargo bench -p bursar-shim --bench overhead -- ROW` measures the rows that have this word in
//! their names. `e2e/gpu/shims.py` runs it on a real GPU.

#[path = "../tests/support/mod.rs"]
mod support;

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

/// Compares a program that uses no GPU without and with the files of a container's
/// `/etc/ld.so.preload`: by turns (A B B A), each figure the shortest of some starts, because load
/// only adds time.
fn compare_starts() {
    const TURNS: usize = 60;
    const STARTS: usize = 10;
    let container = Container::with_quota(256 * MIB);
    let folder = tempfile::tempdir().expect("there is room");
    let (_, installed) = support::installed::install_shims(folder.path(), &container.sim(), "1.0");
    let list = std::fs::read_to_string(installed.join("ld.so.preload")).expect("it is installed");
    let names = list.lines().filter_map(|line| line.rsplit('/').next());
    let files: Vec<String> = names
        .map(|name| installed.join(name).display().to_string())
        .collect();
    let preloads = [String::new(), files.join(" ")];

    let start = |preload: &str| {
        let start = Instant::now();
        let ended = Command::new("/bin/true")
            .env("LD_PRELOAD", preload)
            .status();
        assert!(ended.expect("there is one").success());
        start.elapsed()
    };
    let shortest = |preload: &str| (0..STARTS).map(|_| start(preload)).min();
    let (mut logs, mut times) = (Vec::new(), [Vec::new(), Vec::new()]);
    for turn in 0..TURNS {
        let mut pair = [0.0; 2];
        for side in [turn % 2, 1 - turn % 2] {
            pair[side] = shortest(&preloads[side]).unwrap_or_default().as_secs_f64();
            times[side].push(pair[side] * 1e6);
        }
        logs.push((pair[1] / pair[0]).ln());
    }
    let mean = logs.iter().sum::<f64>() / TURNS as f64;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let deviation = 2.0 * (squares / (TURNS * (TURNS - 1)) as f64).sqrt();
    let [native, preloaded] = times.map(median);
    let [native_kib, preloaded_kib] = preloads.map(|preload| proportional_kib(&preload));
    println!(
        "/bin/true                    native {native:>8.0} us  entries {preloaded:>5.0} us  {:.3}x \
         ({:.3} to {:.3}), {TURNS} turns of the shortest of {STARTS}",
        mean.exp(),
        (mean - deviation).exp(),
        (mean + deviation).exp()
    );
    println!(
        "a sleeping process           native {native_kib:>8} KiB  entries {preloaded_kib:>4} KiB (PSS)"
    );
}

/// Returns the memory of a sleeping process (`Pss` of `smaps_rollup`, proc(5)).
fn proportional_kib(preload: &str) -> u64 {
    let mut process = Command::new("/bin/sleep")
        .arg("60")
        .env("LD_PRELOAD", preload)
        .spawn()
        .expect("there is one");
    std::thread::sleep(Duration::from_millis(200));
    let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", process.id()));
    process
        .kill()
        .and_then(|()| process.wait())
        .expect("it sleeps");
    let rollup = rollup.expect("it slept");
    let line = rollup.lines().find(|line| line.starts_with("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.expect("proc(5)")
}

fn main() {
    if is_wanted("/bin/true") && !support::is_real() {
        compare_starts();
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
