//! The ledger and its binder, held to their promises over random histories of a node.
//!
//! `cargo test -p bursar-ledger --test binder_histories`; `BURSAR_HISTORIES` says how many
//! (100,000), `BURSAR_SEED` which one alone. A failure prints its seed and its history, cut to the
//! shortest beginning that fails.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, with its place"
)]

mod checks;
mod kubelet;
mod node;

use std::panic::{AssertUnwindSafe, catch_unwind};

use node::Node;

const HISTORIES: u64 = 100_000;
const STEPS: usize = 36;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")),
    )
}

/// Runs one history of `steps` random steps, and then until everybody had his turn.
fn run(seed: u64, steps: usize, log: bool) -> Node {
    let mut node = Node::new(seed, log);
    for _ in 0..steps {
        node.step();
    }
    node.drain();
    node
}

/// Runs it; a failure is told with the shortest failing number of steps.
fn check(seed: u64) -> Node {
    let fails = |steps| catch_unwind(AssertUnwindSafe(|| run(seed, steps, false))).err();
    match catch_unwind(AssertUnwindSafe(|| run(seed, STEPS, false))) {
        Ok(node) => node,
        Err(_) => {
            let steps = (0..=STEPS)
                .find(|&steps| fails(steps).is_some())
                .unwrap_or(STEPS);
            eprintln!("BURSAR_SEED={seed} fails after {steps} steps and the drain:");
            run(seed, steps, true);
            panic!("seed {seed} failed once and passed once");
        }
    }
}

#[test]
fn every_history_keeps_the_promises() {
    if let Some(seed) = number("BURSAR_SEED") {
        run(seed, STEPS, true);
        return;
    }
    let histories = number("BURSAR_HISTORIES").unwrap_or(HISTORIES);
    let mut seen = node::Seen::default();
    for seed in 0..histories {
        seen.add(&check(seed).seen);
    }
    println!("{histories} histories: {seen:?}");
    // The histories are worth what happens in them.
    if histories >= 1000 {
        seen.assert_everything_happened();
    }
}

#[test]
fn a_stream_of_small_pods_does_not_starve_a_large_one() {
    for seed in 0..500 {
        kubelet::stream_against_a_large_pod(seed);
    }
}
