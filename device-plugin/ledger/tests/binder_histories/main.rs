//! Tests the ledger and its binder over random histories of a node.
//!
//! `cargo test -p bursar-ledger --test binder_histories` runs 10,000 histories, and 100,000 with
//! `BURSAR_LONG`. `BURSAR_HISTORIES` sets another number, and `BURSAR_SEED` selects a single
//! history. A failure prints its seed and its history, cut to the shortest beginning that fails.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, with its place"
)]

mod checks;
mod kubelet;
mod node;

use std::panic::{AssertUnwindSafe, catch_unwind};

use node::Node;

const HISTORIES: u64 = 10_000;
const LONG_HISTORIES: u64 = 100_000;
const STEPS: usize = 36;

fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")),
    )
}

/// Runs one history of `steps` random steps, and then until every claim was bound.
fn run_history(seed: u64, steps: usize, log: bool) -> Node {
    let mut node = Node::new(seed, log);
    for _ in 0..steps {
        node.step();
    }
    node.drain();
    node
}

/// Runs one history. A failure is reported with the shortest failing number of steps.
fn check_history(seed: u64) -> Node {
    let fails = |steps| catch_unwind(AssertUnwindSafe(|| run_history(seed, steps, false))).err();
    match catch_unwind(AssertUnwindSafe(|| run_history(seed, STEPS, false))) {
        Ok(node) => node,
        Err(_) => {
            let steps = (0..=STEPS)
                .find(|&steps| fails(steps).is_some())
                .unwrap_or(STEPS);
            eprintln!("BURSAR_SEED={seed} fails after {steps} steps and the drain:");
            run_history(seed, steps, true);
            panic!("seed {seed} failed once and passed once");
        }
    }
}

#[test]
fn random_histories_keep_all_invariants() {
    if let Some(seed) = env_number("BURSAR_SEED") {
        run_history(seed, STEPS, true);
        return;
    }
    let default = match std::env::var_os("BURSAR_LONG") {
        Some(_) => LONG_HISTORIES,
        None => HISTORIES,
    };
    let histories = env_number("BURSAR_HISTORIES").unwrap_or(default);
    let mut coverage = node::Coverage::default();
    for seed in 0..histories {
        coverage.add(&check_history(seed).coverage);
    }
    println!("{histories} histories: {coverage:?}");
    // The histories must contain every kind of event.
    if histories >= 1000 {
        coverage.assert_complete();
    }
}

#[test]
fn small_pods_do_not_starve_a_large_pod() {
    for seed in 0..500 {
        kubelet::stream_against_a_large_pod(seed);
    }
}
