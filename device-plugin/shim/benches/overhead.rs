//! What the shim costs on the simulated driver, in alternating runs: a forwarded call, and
//! allocate + free, of linear and of stream-ordered memory, with room and without. The simulated driver
//! is quicker than a real one, so that the ratios here are worse than on a GPU (design F9: 45 us for
//! allocate + free, 480 ns where it is stream-ordered); the difference is what to watch.

#[path = "../tests/support/mod.rs"]
mod support;

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

fn main() {
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
