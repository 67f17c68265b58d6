//! Verifies the accounting while many processes allocate, free and are killed at random.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{DriverClient, ONE_GPU, SimMachine};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const CLIENTS: u64 = 8;
const STEPS: u64 = 1000;

/// Starts one client after the other. Each ends by SIGKILL, sometimes in the middle of a call.
fn allocate_and_crash(lab: &SimMachine, seed: u64) {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut actor: Option<DriverClient> = None;
    let mut held: Vec<String> = Vec::new();
    for _ in 0..STEPS {
        let Some(living) = &mut actor else {
            let mut fresh = lab.spawn_client().unwrap();
            // A full GPU refuses a context; the next attempt may succeed.
            if fresh.request("context 0").is_ok() {
                actor = Some(fresh);
            }
            continue;
        };
        let size = dice.random_range(1..=1024_u64) << 21;
        match dice.random_range(0..12) {
            0..=3 => held.extend(
                living
                    .request(&format!("alloc {size}"))
                    .ok()
                    .map(|at| format!("free {at}")),
            ),
            4..=6 => held.extend(
                living
                    .request(&format!("create {size}"))
                    .ok()
                    .map(|handle| format!("release {handle}")),
            ),
            7 => held.extend(
                living
                    .request(&format!("poolalloc {size}"))
                    .ok()
                    .map(|at| format!("poolfree {at}")),
            ),
            8..=10 if !held.is_empty() => {
                let place = dice.random_range(0..held.len());
                living.request(&held.swap_remove(place)).unwrap();
            }
            11 => {
                living.send_request(&format!("alloc {size}"));
                actor.take().unwrap().kill();
                held.clear();
            }
            _ => drop(living.request("sync").unwrap()),
        }
    }
}

#[test]
fn usage_stays_within_gpu_and_returns_to_zero_after_kills() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let done = AtomicBool::new(false);
    let highest = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let (sim, mut highest) = (lab.sim().unwrap(), 0);
            while !done.load(Ordering::Relaxed) {
                let usage = sim.usage(0);
                let listed = usage
                    .processes
                    .iter()
                    .map(|process| process.bytes)
                    .sum::<u64>();
                assert!(
                    listed <= usage.used && usage.used <= usage.total,
                    "{usage:?}"
                );
                highest = highest.max(usage.used);
                thread::sleep(std::time::Duration::from_millis(2));
            }
            highest
        });
        let lives: Vec<_> = (0..CLIENTS)
            .map(|seed| {
                scope.spawn({
                    let lab = &lab;
                    move || allocate_and_crash(lab, seed)
                })
            })
            .collect();
        lives.into_iter().for_each(|life| life.join().unwrap());
        done.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    });
    assert!(
        highest > 12 << 30,
        "the card was never nearly full: {highest}"
    );
    assert_eq!(lab.sim().unwrap().used(0), 0);
    let left = std::fs::read_dir(lab.path().join("state/mem"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "files of dead allocations are left");
}
