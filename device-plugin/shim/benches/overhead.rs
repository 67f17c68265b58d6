//! What the shim costs on the simulated driver, in alternating runs: a forwarded call, and
//! allocate + free, of linear and of stream-ordered memory, with room and without. The simulated driver
//! is quicker than a real one, so that the ratios here are worse than on a GPU (design F9: 45 us for
//! allocate + free, 480 ns where it is stream-ordered); the difference is what to watch. And what it costs a process
//! that never uses it: the loader's work, for it is preloaded into all of a container.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use support::{Client, Container, MIB};

const ROUNDS: usize = 9;

/// The median time of one call, in nanoseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare(name: &str, bare: &mut Client, shim: &mut Client, command: &str, calls: u64) {
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

/// The shortest of 500 lives of `/bin/true` without and with a library preloaded, in turn: load only adds to them.
fn compare_starts(library: &Path) {
    let life = |preload: &Path| {
        let begun = Instant::now();
        let ended = Command::new("/bin/true")
            .env("LD_PRELOAD", preload)
            .status();
        assert!(ended.expect("there is one").success());
        begun.elapsed()
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
    compare_starts(&support::built().join("libbursar_shim.so"));
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
        &format!("churn 50000 {}", 2 * MIB),
        50_000,
    );
    // What is freed stays in the pool, as in a program that allocates often.
    for program in [&mut bare, &mut shim] {
        let pool = program.ok("devicepool 0")[0];
        program.ok(format!("threshold {pool} {}", u64::MAX));
    }
    for (name, bytes) in [
        ("async alloc + free 1 MiB", MIB),
        ("async alloc + free, at quota", 250 * MIB),
    ] {
        let command = format!("asyncchurn 50000 {bytes}");
        compare(name, &mut bare, &mut shim, &command, 50_000);
    }
}
